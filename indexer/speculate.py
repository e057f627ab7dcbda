"""What pods will soon hold: the blocks of requests that were just sent to them.

They lie in the index beside the confirmed blocks, in a tier of their own, one reference for each request.
They save bursts of one fresh context, whose requests would else be sent anywhere but to the pod that
computes it. Time comes in; this module knows when an assumption begins and ends, the index knows what it
means.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from indexer.index import Index
from indexer.keys import Keys
from indexer.tiers import SPECULATIVE_TIER


@dataclass(slots=True)
class _Request:
    # Its TTL runs from here, or from the last sign of life of its pods.
    renewed_s: float
    # Its end in any case: the hard cap, or the grace after it was settled.
    ends_s: float
    keys_by_pod: dict[str, Keys] = field(default_factory=dict)


class Speculation:
    """Blocks that are assumed, by the requests that they are assumed for. Thread-safe.

    Callers tell requests apart by their ids: a client's own, which it may use again, does not.

    An assumption ends when an event confirms its last block (an engine stores a prompt's blocks in order),
    shortly after its request is settled, or, as a safety net for requests of which nothing is heard any more,
    when its TTL is over. While a request waits for its first token the TTL starts again whenever its pod
    stores a block: it works off its queue. The hard cap ends it anyway.

    Args:
        index: Where the blocks are assumed.
        ttl_s: Life of an assumption without a sign of life.
        max_s: Hard cap of its life.
        max_entries: Most triples of (request, pod, block); beyond it the oldest requests' are dropped.
    """

    def __init__(self, index: Index, *, ttl_s: float, max_s: float, max_entries: int) -> None:
        self._index = index
        self._ttl_s = ttl_s
        self._max_s = max_s
        self._max_entries = max_entries
        self._lock = threading.Lock()
        self._entries = 0
        self._requests: dict[Hashable, _Request] = {}
        # Of each pod: the last blocks that are assumed, and the requests that wait for them.
        self._awaited: dict[str, dict[int, set[Hashable]]] = {}
        self._stored_s: dict[str, float] = {}
        # When to look at which request; a request's real deadline may have moved since.
        self._due: list[tuple[float, Hashable]] = []

    def __len__(self) -> int:
        return self._entries

    def assume(self, request_id: Hashable, pod: str, keys: Keys, now_s: float) -> None:
        """The request was sent to this pod; said again, its TTL starts again, with these blocks."""
        if not len(keys):
            return
        with self._lock:
            self._expire(now_s)
            request = self._requests.get(request_id)
            if request is None:
                request = self._requests[request_id] = _Request(now_s, now_s + self._max_s)
                heapq.heappush(self._due, (now_s + self._ttl_s, request_id))
            request.renewed_s = now_s
            if pod in request.keys_by_pod:
                self._release(request_id, request, pod)
            request.keys_by_pod[pod] = keys
            self._entries += len(keys)
            self._awaited.setdefault(pod, {}).setdefault(int(keys[-1]), set()).add(request_id)
            self._index.add(pod, SPECULATIVE_TIER, keys)
            while self._entries > self._max_entries:
                self._drop_request(next(iter(self._requests)))

    def settle(self, request_id: Hashable, now_s: float, grace_s: float) -> None:
        """The request got its first token, failed or ended; unknown requests are passed over."""
        with self._lock:
            request = self._requests.get(request_id)
            if request is not None and now_s + grace_s < request.ends_s:
                request.ends_s = now_s + grace_s
                heapq.heappush(self._due, (request.ends_s, request_id))

    def stored(self, pod: str, keys: Sequence[int], now_s: float) -> None:
        """The pod told that it holds these blocks: who waited for one as its last is confirmed."""
        if pod not in self._awaited:
            return
        with self._lock:
            awaited = self._awaited.get(pod)
            if awaited is None:
                return
            self._stored_s[pod] = now_s
            # Nearly always nobody waited: that is seen without making a set.
            if awaited.keys().isdisjoint(keys):
                return
            for key in awaited.keys() & keys:
                for request_id in tuple(awaited[key]):
                    self._end(request_id, pod)

    def drop_pod(self, pod: str) -> None:
        """The pod is not what it was: nothing is assumed of it any more."""
        with self._lock:
            awaited = self._awaited.get(pod, {})
            for request_id in [request_id for requests in awaited.values() for request_id in requests]:
                self._end(request_id, pod)

    def expire(self, now_s: float) -> None:
        """Drops what is over by now."""
        # Without the lock: an entry that is added meanwhile is not over yet.
        if self._due and self._due[0][0] <= now_s:
            with self._lock:
                self._expire(now_s)

    def _expire(self, now_s: float) -> None:
        while self._due and self._due[0][0] <= now_s:
            _, request_id = heapq.heappop(self._due)
            request = self._requests.get(request_id)
            if request is None:
                continue
            sign_of_life_s = max((self._stored_s.get(pod, 0.0) for pod in request.keys_by_pod), default=0.0)
            deadline_s = min(request.ends_s, max(request.renewed_s, sign_of_life_s) + self._ttl_s)
            if deadline_s <= now_s:
                self._drop_request(request_id)
            else:
                heapq.heappush(self._due, (deadline_s, request_id))

    def _drop_request(self, request_id: Hashable) -> None:
        for pod in tuple(self._requests[request_id].keys_by_pod):
            self._end(request_id, pod)

    def _end(self, request_id: Hashable, pod: str) -> None:
        """Ends what is assumed of this pod for this request; with its last pod the request."""
        request = self._requests[request_id]
        self._release(request_id, request, pod)
        if not request.keys_by_pod:
            del self._requests[request_id]

    def _release(self, request_id: Hashable, request: _Request, pod: str) -> None:
        keys = request.keys_by_pod.pop(pod)
        self._entries -= len(keys)
        self._index.remove(pod, SPECULATIVE_TIER, keys)
        awaited = self._awaited[pod]
        last = int(keys[-1])
        awaited[last].remove(request_id)
        if not awaited[last]:
            del awaited[last]
        if not awaited:
            del self._awaited[pod]
            self._stored_s.pop(pod, None)
