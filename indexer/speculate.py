"""What pods will soon hold: the blocks of requests that were just sent to them.

An overlay that `match` consults beside the index, so that the index stays the confirmed truth. It saves
bursts of one fresh context, whose requests would else be sent anywhere but to the pod that computes it.
Time comes in.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Request:
    # Its TTL runs from here, or from the last sign of life of its pods.
    renewed_s: float
    # Its end in any case: the hard cap, or the grace after it was settled.
    ends_s: float
    # Triples of this request that are still assumed.
    pending: int = 0
    keys_by_pod: dict[str, tuple[int, ...]] = field(default_factory=dict)


class Speculation:
    """Blocks that are assumed, by the requests that they are assumed for. Thread-safe.

    An assumption ends when an event confirms it, shortly after its request is settled, or, as a safety net
    for requests of which nothing is heard any more, when its TTL is over. While a request waits for its
    first token the TTL starts again whenever its pod stores a block: it works off its queue. The hard cap
    ends it anyway.

    Args:
        ttl_s: Life of an assumption without a sign of life.
        max_s: Hard cap of its life.
        max_entries: Most triples of (request, pod, block); beyond it the oldest requests' are dropped.
    """

    def __init__(self, *, ttl_s: float, max_s: float, max_entries: int) -> None:
        self._ttl_s = ttl_s
        self._max_s = max_s
        self._max_entries = max_entries
        self._lock = threading.Lock()
        self._entries = 0
        self._requests: dict[str, _Request] = {}
        # Of each block: pod -> the requests that it is assumed for.
        self._holders: dict[int, dict[str, set[str]]] = {}
        self._requests_by_pod: dict[str, set[str]] = {}
        self._stored_s: dict[str, float] = {}
        # When to look at which request; a request's real deadline may have moved since.
        self._due: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return self._entries

    def assume(self, request_id: str, pod: str, keys: Sequence[int], now_s: float) -> None:
        """The request was sent to this pod; said again, its TTL starts again."""
        if not keys:
            return
        with self._lock:
            self._expire(now_s)
            request = self._requests.get(request_id)
            if request is None:
                request = self._requests[request_id] = _Request(now_s, now_s + self._max_s)
                heapq.heappush(self._due, (now_s + self._ttl_s, request_id))
            request.renewed_s = now_s
            request.keys_by_pod[pod] = tuple(dict.fromkeys((*request.keys_by_pod.get(pod, ()), *keys)))
            self._requests_by_pod.setdefault(pod, set()).add(request_id)
            for key in keys:
                requests = self._holders.setdefault(key, {}).setdefault(pod, set())
                if request_id not in requests:
                    requests.add(request_id)
                    request.pending += 1
                    self._entries += 1
            while self._entries > self._max_entries:
                self._drop_request(next(iter(self._requests)))

    def settle(self, request_id: str, now_s: float, grace_s: float) -> None:
        """The request got its first token, failed or ended; unknown requests are passed over."""
        with self._lock:
            request = self._requests.get(request_id)
            if request is not None and now_s + grace_s < request.ends_s:
                request.ends_s = now_s + grace_s
                heapq.heappush(self._due, (request.ends_s, request_id))

    def stored(self, pod: str, keys: Sequence[int], now_s: float) -> None:
        """The pod told that it holds these blocks: they need not be assumed any more."""
        with self._lock:
            if pod not in self._requests_by_pod:
                return
            self._stored_s[pod] = now_s
            for key in keys:
                for request_id in tuple(self._holders.get(key, {}).get(pod, ())):
                    self._drop_entry(key, pod, request_id)
                    self._drop_if_done(request_id)

    def drop_pod(self, pod: str) -> None:
        """The pod is not what it was: nothing is assumed of it any more."""
        with self._lock:
            for request_id in tuple(self._requests_by_pod.get(pod, ())):
                self._release(request_id, pod)
                self._drop_if_done(request_id)

    def assumed(self, keys: Sequence[int], pods: Collection[str], now_s: float) -> dict[str, set[int]]:
        """Which of `keys` are assumed of which of `pods`, as positions in `keys`."""
        found: dict[str, set[int]] = {}
        with self._lock:
            self._expire(now_s)
            if not self._holders:
                return found
            for position, key in enumerate(keys):
                for pod in self._holders.get(key, ()):
                    if pod in pods:
                        found.setdefault(pod, set()).add(position)
        return found

    def expire(self, now_s: float) -> None:
        """Drops what is over by now, which else waits for the next request."""
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

    def _drop_if_done(self, request_id: str) -> None:
        if request_id in self._requests and not self._requests[request_id].pending:
            self._drop_request(request_id)

    def _drop_request(self, request_id: str) -> None:
        for pod in tuple(self._requests[request_id].keys_by_pod):
            self._release(request_id, pod)

    def _release(self, request_id: str, pod: str) -> None:
        """Drops what is assumed of this pod for this request; with its last pod the request."""
        request = self._requests[request_id]
        for key in request.keys_by_pod.pop(pod):
            if request_id in self._holders.get(key, {}).get(pod, ()):
                self._drop_entry(key, pod, request_id)
        self._requests_by_pod[pod].remove(request_id)
        if not self._requests_by_pod[pod]:
            del self._requests_by_pod[pod]
            self._stored_s.pop(pod, None)
        if not request.keys_by_pod:
            del self._requests[request_id]

    def _drop_entry(self, key: int, pod: str, request_id: str) -> None:
        self._entries -= 1
        self._requests[request_id].pending -= 1
        requests_by_pod = self._holders[key]
        requests_by_pod[pod].remove(request_id)
        if not requests_by_pod[pod]:
            del requests_by_pod[pod]
        if not requests_by_pod:
            del self._holders[key]
