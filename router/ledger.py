"""The requests in flight: dispatches and their ends in, the work that each pod has out.

No I/O and no clock: time comes in. One lock guards it all, held for a few dictionary operations and never
while calling out, so it may be called from any thread, also under others' locks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from threading import Lock


@dataclass(frozen=True, slots=True)
class LedgerParameters:
    """Limits of the ledger.

    Attributes:
        capacity: Requests in flight; when full, the oldest is taken for ended.
        lifetime_s: A request of which nothing more is heard is taken for ended after this.
        patience: A prefill whose end no event will announce is taken for ended after this many times its
            expected seconds, and `slack_s`; one whose event is awaited after five times as long again, and
            `event_slack_s`.
    """

    capacity: int = 100_000
    lifetime_s: float = 600.0
    patience: float = 2.0
    slack_s: float = 0.1
    event_slack_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One request sent to one pod.

    Attributes:
        uncached_tokens: Prompt tokens the pod has to compute.
        confirm_key: Key of the last block it will compute: when the pod announces it, the prefill is over.
            None where no such announcement is to be expected.
        found_idle: Whether nobody awaited a first token there.
    """

    request_id: str
    pod: str
    uncached_tokens: int
    queued_prefill_s: float
    own_prefill_s: float
    confirm_key: int | None
    found_idle: bool
    dispatched_s: float


@dataclass(frozen=True, slots=True)
class PodWork:
    """What a pod has to do, as far as this router caused it."""

    awaiting: int = 0
    awaiting_tokens: int = 0
    decoding: int = 0
    held_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Expired:
    """Requests whose prefill, and requests whose life, is over by the clock alone."""

    prefills: list[Dispatch] = field(default_factory=list)
    lives: list[Dispatch] = field(default_factory=list)


class Ledger:
    """In-flight requests with per-pod sums."""

    def __init__(self, parameters: LedgerParameters) -> None:
        self._parameters = parameters
        self._entries: dict[str, _Entry] = {}
        self._pods: dict[str, _Sums] = {}
        self._due: list[tuple[float, int, bool]] = []
        self._by_number: dict[int, _Entry] = {}
        self._numbers = count()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._entries

    def work(self, pod: str) -> PodWork:
        """The pod's sums, in constant time."""
        with self._lock:
            sums = self._pods.get(pod)
            if sums is None:
                return PodWork()
            return PodWork(sums.awaiting, sums.awaiting_tokens, sums.decoding, sums.held_tokens)

    def dispatch(self, dispatch: Dispatch) -> list[Dispatch]:
        """Enters a request.

        Returns:
            What it took the place of: an older request of the same id, or the oldest when the ledger is full.
        """
        with self._lock:
            displaced = [self._remove(old)] if (old := self._entries.get(dispatch.request_id)) else []
            if len(self._entries) >= self._parameters.capacity:
                displaced.append(self._remove(next(iter(self._entries.values()))))
            entry = _Entry(dispatch, next(self._numbers))
            self._entries[dispatch.request_id] = self._by_number[entry.number] = entry
            self._pods.setdefault(dispatch.pod, _Sums()).add(entry)
            self._schedule(entry)
            return displaced

    def stored(self, pod: str, keys: Sequence[int]) -> list[Dispatch]:
        """The pod announced these blocks; returns the requests whose prefill this ends."""
        with self._lock:
            sums = self._pods.get(pod)
            if sums is None or not sums.confirming:
                return []
            ended = []
            for key in keys:
                for entry in list(sums.confirming.get(key, ())):
                    sums.to_decoding(entry)
                    ended.append(entry.dispatch)
            return ended

    def first_token(self, request_id: str) -> Dispatch | None:
        """Its first token was seen; returns the request if that was news."""
        with self._lock:
            entry = self._entries.get(request_id)
            if entry is None or entry.decoding:
                return None
            self._pods[entry.dispatch.pod].to_decoding(entry)
            return entry.dispatch

    def end(self, request_id: str) -> Dispatch | None:
        """It is done or has failed; returns the request if it was in flight."""
        with self._lock:
            entry = self._entries.get(request_id)
            return self._remove(entry) if entry else None

    def expire(self, now_s: float) -> Expired:
        """Ends what is over by the clock."""
        expired = Expired()
        with self._lock:
            while self._due and self._due[0][0] <= now_s:
                _, number, is_life = heapq.heappop(self._due)
                entry = self._by_number.get(number)
                if entry is None:
                    continue
                if is_life:
                    expired.lives.append(self._remove(entry))
                elif not entry.decoding:
                    self._pods[entry.dispatch.pod].to_decoding(entry)
                    expired.prefills.append(entry.dispatch)
        return expired

    def _schedule(self, entry: _Entry) -> None:
        known, dispatch = self._parameters, entry.dispatch
        expected_s = known.patience * (dispatch.queued_prefill_s + dispatch.own_prefill_s)
        if dispatch.confirm_key is None:
            prefill_s = expected_s + known.slack_s
        else:
            prefill_s = 5 * expected_s + known.event_slack_s
        start_s = dispatch.dispatched_s
        heapq.heappush(self._due, (start_s + min(prefill_s, known.lifetime_s), entry.number, False))
        heapq.heappush(self._due, (start_s + known.lifetime_s, entry.number, True))
        # Ended requests leave their deadlines behind; now and then they are swept out.
        if len(self._due) > 4 * len(self._entries) + 1024:
            self._due = [due for due in self._due if due[1] in self._by_number]
            heapq.heapify(self._due)

    def _remove(self, entry: _Entry) -> Dispatch:
        del self._entries[entry.dispatch.request_id], self._by_number[entry.number]
        sums = self._pods[entry.dispatch.pod]
        sums.remove(entry)
        if not sums.awaiting and not sums.decoding:
            del self._pods[entry.dispatch.pod]
        return entry.dispatch


@dataclass(slots=True, eq=False)
class _Entry:
    dispatch: Dispatch
    number: int
    decoding: bool = False


@dataclass(slots=True)
class _Sums:
    """One pod's sums, and by key the requests that await that key's announcement."""

    awaiting: int = 0
    awaiting_tokens: int = 0
    decoding: int = 0
    held_tokens: int = 0
    confirming: dict[int, list[_Entry]] = field(default_factory=dict)

    def add(self, entry: _Entry) -> None:
        self.awaiting += 1
        self.awaiting_tokens += entry.dispatch.uncached_tokens
        self.held_tokens += entry.dispatch.uncached_tokens
        if (key := entry.dispatch.confirm_key) is not None:
            self.confirming.setdefault(key, []).append(entry)

    def to_decoding(self, entry: _Entry) -> None:
        self._stop_awaiting(entry)
        entry.decoding = True
        self.decoding += 1

    def remove(self, entry: _Entry) -> None:
        if entry.decoding:
            self.decoding -= 1
        else:
            self._stop_awaiting(entry)
        self.held_tokens -= entry.dispatch.uncached_tokens

    def _stop_awaiting(self, entry: _Entry) -> None:
        self.awaiting -= 1
        self.awaiting_tokens -= entry.dispatch.uncached_tokens
        if (key := entry.dispatch.confirm_key) is not None:
            waiting = self.confirming[key]
            waiting.remove(entry)
            if not waiting:
                del self.confirming[key]
