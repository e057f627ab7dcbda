"""Speculative entries: blocks that pods will soon hold, because requests were just sent to them.

They are in the index beside the confirmed blocks, in a tier of their own, with one reference per request.
They keep a burst of requests with one new prefix together at the pod that computes the prefix. This module
decides when entries begin and end; time is passed in.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias

from indexer.index.index import FlatIndex
from indexer.keys import Keys
from indexer.wire.tiers import SPECULATIVE_TIER

# Time of the next check, unique number, request.
_Due: TypeAlias = tuple[float, int, Hashable]


@dataclass(slots=True)
class _Request:
    renewed_s: float  # start of its TTL, unless one of its pods stored a block later
    ends_s: float  # latest end: `max_s` after the start, or the grace time after `settle`
    assumed: dict[str, Keys] = field(default_factory=dict)  # keys of its entries, by pod


class Speculation:
    """Speculative entries, by request. Thread-safe.

    Request ids must be unique among the requests in flight; ids chosen by clients are not.

    The entries of a request end when an event confirms its last block (engines store a prompt's blocks in
    order) or shortly after the request is settled. For requests without further reports they end with a TTL.
    The TTL restarts whenever the pod stores a block, because the pod is working off its queue. `max_s` ends
    the entries in any case.
    """

    def __init__(self, index: FlatIndex, *, ttl_s: float, max_s: float, max_entries: int) -> None:
        self._index = index
        self._ttl_s = ttl_s
        self._max_s = max_s
        # Most triples of (request, pod, block); above it those of the oldest requests end. 0: no entries.
        self._max_entries = max_entries
        self._lock = threading.Lock()
        self._entries = 0
        self._requests: dict[Hashable, _Request] = {}
        # By pod: keys of the requests' last blocks, and the requests that end with each.
        self._awaited: dict[str, dict[int, list[Hashable]]] = {}
        self._stored_s: dict[str, float] = {}
        # Heap of checks; a request's deadline may have moved since, and the request may have ended.
        self._due: list[_Due] = []
        self._numbers = count()

    def __len__(self) -> int:
        return self._entries

    def assume(self, request_id: Hashable, pod: str, keys: Keys, now_s: float) -> None:
        """Add entries for a request sent to a pod; a second call replaces them and restarts the TTL."""
        if not len(keys) or not self._max_entries:
            return
        with self._lock:
            if request_id in self._requests:
                # If its entries have expired, it starts as a new request.
                self._expire(now_s)
            request = self._requests.get(request_id)
            if request is None:
                request = self._requests[request_id] = _Request(now_s, now_s + self._max_s)
                self._look_later(now_s + self._ttl_s, request_id)
            request.renewed_s = now_s
            self._release(request_id, request, pod)
            request.assumed[pod] = keys
            self._entries += len(keys)
            self._awaited.setdefault(pod, {}).setdefault(int(keys[-1]), []).append(request_id)
            self._index.store(pod, self._index.tiers.speculative, keys)
            if self._entries > self._max_entries:
                self._expire(now_s)
            while self._entries > self._max_entries:
                self._end([next(iter(self._requests))])

    def settle(self, request_id: Hashable, now_s: float, grace_s: float) -> None:
        """Let the entries of a request expire after `grace_s`; unknown requests are ignored."""
        with self._lock:
            request = self._requests.get(request_id)
            if request is not None and now_s + grace_s < request.ends_s:
                request.ends_s = now_s + grace_s
                self._look_later(request.ends_s, request_id)

    def stored(self, pod: str, keys: Sequence[int], now_s: float) -> None:
        """End the entries of requests whose last block is among a pod's newly stored blocks."""
        if pod not in self._awaited:
            return
        with self._lock:
            awaited = self._awaited.get(pod)
            if awaited is None:
                return
            self._stored_s[pod] = now_s
            # Nearly always no request waits for these blocks; isdisjoint avoids building a set.
            if awaited.keys().isdisjoint(keys):
                return
            self._end([each for key in awaited.keys() & keys for each in awaited[key]], pod)

    def drop_pod(self, pod: str) -> None:
        with self._lock:
            awaited = self._awaited.get(pod, {})
            self._end([each for requests in awaited.values() for each in requests], pod)

    def expire(self, now_s: float) -> None:
        # Read without the lock: an entry added meanwhile has not expired yet.
        first = self._due[:1]
        if first and first[0][0] <= now_s:
            with self._lock:
                self._expire(now_s)

    def _expire(self, now_s: float) -> None:
        due: list[Hashable] = []
        while self._due and self._due[0][0] <= now_s:
            due.append(heapq.heappop(self._due)[2])
        self._end([request_id for request_id in due if self._is_over(request_id, now_s)])

    def _is_over(self, request_id: Hashable, now_s: float) -> bool:
        request = self._requests.get(request_id)
        if request is None:
            return False
        if request.ends_s <= now_s:
            return True
        signs_s = [self._stored_s.get(pod, 0.0) for pod in request.assumed]
        deadline_s = min(request.ends_s, max([request.renewed_s, *signs_s]) + self._ttl_s)
        if deadline_s > now_s:
            self._look_later(deadline_s, request_id)
        return deadline_s <= now_s

    def _look_later(self, due_s: float, request_id: Hashable) -> None:
        heapq.heappush(self._due, (due_s, next(self._numbers), request_id))

    def _end(self, request_ids: Iterable[Hashable], pod: str | None = None) -> None:
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                continue
            for each in tuple(request.assumed) if pod is None else (pod,):
                self._release(request_id, request, each)
            if not request.assumed:
                del self._requests[request_id]

    def _release(self, request_id: Hashable, request: _Request, pod: str) -> None:
        keys = request.assumed.pop(pod, None)
        if keys is None:
            return
        self._index.remove(pod, SPECULATIVE_TIER, keys)
        self._entries -= len(keys)
        awaited, last = self._awaited[pod], int(keys[-1])
        waiting = awaited[last]
        if len(waiting) > 1:
            waiting.remove(request_id)
            return
        del awaited[last]
        if not awaited:
            del self._awaited[pod]
            self._stored_s.pop(pod, None)
