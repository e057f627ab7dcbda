"""In-flight ledger: records dispatches and their ends, and keeps each pod's outstanding work up to date.

No I/O and no clock: callers pass the time in seconds. One lock guards all state, held for a few dictionary
operations and never while calling other locked code, so any thread may call it, even under other locks.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import takewhile
from threading import Lock
from typing import TypeVar

from indexer.keys import Keys
from router.inflight.dispatch import Dispatch, Entry, SentAdapters
from router.pods.load_table import PodLoadTable

_Key = TypeVar("_Key", int, str)


@dataclass(frozen=True, slots=True)
class LedgerParameters:
    """Limits of the ledger."""

    capacity: int = 100_000  # requests in flight; a full ledger evicts its oldest request
    lifetime_s: float = 600.0  # seconds from dispatch after which a request is presumed ended
    # A prefill without a confirming event times out after `timeout_factor` times its expected seconds plus
    # `timeout_slack_s`; with one, after five times as long plus `event_timeout_slack_s`.
    timeout_factor: float = 2.0
    timeout_slack_s: float = 0.1
    event_timeout_slack_s: float = 5.0
    # An engine that reports no requests ends the waiting of those sent `timeout_factor` times their expected
    # seconds plus this before the scrape. Engines count a request only after its first step, that is after
    # network, tokenization and the first computed tokens.
    idle_slack_s: float = 0.5
    per_id_max: int = 64  # requests in flight under one id; beyond it the oldest of them is evicted
    ended_ids_max: int = 10_000  # remembered ids of ended requests, and likewise of ends of unknown requests
    transit_s: float = 2.0  # requests sent less than this before a scrape may be missing from its counts


@dataclass(eq=False)
class Ledger:
    """In-flight requests and their totals in the load table.

    Each dispatch has its own entry, because clients reuse request ids even while the first use is in flight.
    A report on an id applies to the entry with the given dispatch time, else to the oldest one on the given
    pod, else to the oldest one. A prefill timeout is only an estimate: the request leaves the pod's queue,
    and a later report of its first token still counts.
    """

    parameters: LedgerParameters
    load_table: PodLoadTable = field(default_factory=PodLoadTable)
    adapters: SentAdapters = field(default_factory=SentAdapters)

    def __post_init__(self) -> None:
        # Called with the kind of every change and the change, in order and under the lock; see `subscribe`.
        self.changes: Callable[[str, object], None] | None = None
        # All entries, and those of each id and of each pod, are ordered oldest first.
        self._entries: dict[int, Entry] = {}
        self._by_id: dict[str, list[Entry]] = {}
        self._by_pod: dict[str, dict[int, Entry]] = {}
        self._ended_s: OrderedDict[str, float] = OrderedDict()
        self._unknown_ended_s: OrderedDict[str, float] = OrderedDict()
        # By pod and block key: requests whose last prompt block is not published yet.
        self._confirming: dict[str, dict[int, list[Entry]]] = {}
        # Predicted cache-hit tokens by pod: of requests not answered yet, and of answered ones.
        self._open_hit_tokens: Counter[str] = Counter()
        self._answered_hit_tokens: Counter[str] = Counter()
        # By engine of pods with several: uncached tokens before the first token, and one per sequence.
        self.pending_tokens: Counter[str] = Counter()
        # Heap of (timeout of the prefill, entry number).
        self._due: list[tuple[float, int]] = []
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def subscribe(self, record: Callable[[str, object], None] | None, follower: object = None) -> None:
        """Record the requests in flight for a new follower, then every change; None stops that.

        Changes are ("joined", (follower, requests in flight)), each request as (number, dispatch, whether it
        presumably has its first token); ("sent", (number, dispatch, keys)); and others with the request's
        number.
        """
        with self._lock:
            self.changes = record
            if record is not None:
                entries = self._entries.values()
                in_flight = [(one.number, one.dispatch, not one.is_waiting) for one in entries]
                record("joined", (follower, in_flight))

    def dispatch(self, dispatch: Dispatch, keys: Keys | None = None) -> list[Dispatch]:
        """Add a request.

        Args:
            keys: Keys of the blocks the request adds to its pod; passed on to `changes` only.

        Returns:
            Evicted requests: the oldest if the ledger is full, the oldest of the id if it has too many.
        """
        request_id, now_s, confirm_key = dispatch.request_id, dispatch.dispatched_s, dispatch.confirm_key
        pod = dispatch.prefill_pod or dispatch.pod
        with self._lock:
            displaced = self._evict(request_id, now_s)
            number = self.load_table.begin(pod, dispatch.uncached_tokens, now_s)
            if dispatch.adapter is not None:
                self.adapters.count(pod, dispatch.adapter, 1)
            if predicted_hit_tokens := dispatch.predicted_hit_tokens:
                self._open_hit_tokens[dispatch.pod] += predicted_hit_tokens
            if dispatch.engine is not None:
                self.pending_tokens[dispatch.engine] += dispatch.uncached_tokens + dispatch.sequences
            entry = Entry(dispatch, number, pod, now_s, confirm_key, predicted_hit_tokens)
            self._entries[number] = entry
            self._by_id.setdefault(request_id, []).append(entry)
            self._by_pod.setdefault(pod, {})[number] = entry
            if confirm_key is not None:
                self._confirming.setdefault(pod, {}).setdefault(confirm_key, []).append(entry)
            self._schedule(dispatch, number)
            if self.changes is not None:
                self.changes("sent", (number, dispatch, keys))
            return displaced

    def stored(self, pod: str, keys: Keys, now_s: float) -> tuple[list[Dispatch], list[float]]:
        """Record blocks that the pod has stored.

        Returns:
            Requests whose prefill this ends; and for those whose prefill end was reported before, the seconds
            since that report.
        """
        prefills: list[Dispatch] = []
        late_s: list[float] = []
        with self._lock:
            confirming = self._confirming.get(pod)
            stored = keys.tolist() if confirming else ()
            # Most events confirm no request; `isdisjoint` finds that out without building a set.
            if not confirming or confirming.keys().isdisjoint(stored):
                return prefills, late_s
            for key in confirming.keys() & stored:
                for entry in confirming.pop(key):
                    entry.confirm_key = None
                    if entry.prefill_ended_s is None:
                        self._end_prefill(entry, now_s)
                        prefills.append(entry.dispatch)
                    else:
                        late_s.append(now_s - entry.prefill_ended_s)
            if not confirming:
                del self._confirming[pod]
        return prefills, late_s

    def first_token(
        self, request_id: str, now_s: float, pod: str | None = None, dispatched_s: float | None = None
    ) -> Dispatch | None:
        """Record a request's first token; return the request unless it is unknown or was reported before."""
        with self._lock:
            entry = self._find(request_id, pod, dispatched_s)
            if entry is None or entry.prefill_ended_s is not None:
                return None
            self._end_prefill(entry, now_s)
            return entry.dispatch

    def end(
        self,
        request_id: str,
        now_s: float,
        pod: str | None = None,
        dispatched_s: float | None = None,
        *,
        late_s: float = 0.0,
        answered: bool = True,
    ) -> Dispatch | None:
        """Remove a request that is done or has failed; return it if it was in flight.

        Args:
            late_s: Seconds since the end.
            answered: Whether the pod has computed the request, and so looked its prompt up in its cache.
        """
        with self._lock:
            entry = self._find(request_id, pod, dispatched_s)
            if entry is not None:
                if answered:
                    self._close_prediction(entry, answered=True)
                return self._remove(entry, now_s)
            self._remember(self._unknown_ended_s, request_id, now_s - late_s)
            return None

    def answered_hit_tokens(self, pod: str) -> int:
        """Return the predicted cache-hit tokens of all requests that the pod has answered."""
        return self._answered_hit_tokens[pod]

    def predicted_hit_tokens(self, pod: str) -> int:
        """Return the predicted cache-hit tokens of the pod's requests, answered or in flight."""
        with self._lock:
            return self._answered_hit_tokens[pod] + self._open_hit_tokens[pod]

    def keep(self, pods: Collection[str]) -> None:
        with self._lock:
            for gone in self._answered_hit_tokens.keys() - set(pods):
                del self._answered_hit_tokens[gone]

    def is_on(self, request_id: str, pod: str) -> bool:
        with self._lock:
            return any(entry.dispatch.pod == pod for entry in self._by_id.get(request_id, ()))

    def ended_while_unknown(self, request_id: str, since_s: float) -> bool:
        """Return whether an end of this id was reported after `since_s` with no such request in flight."""
        # No lock: one dictionary lookup, and the id is nearly always missing.
        return self._unknown_ended_s.get(request_id, since_s) > since_s

    def prefill_ended_s(
        self, request_id: str, pod: str | None = None, dispatched_s: float | None = None
    ) -> float | None:
        """Return when the end of a request's prefill was first reported; None if not, or not in flight."""
        with self._lock:
            entry = self._find(request_id, pod, dispatched_s)
            return entry.prefill_ended_s if entry else None

    def ended_s(self, request_id: str) -> float | None:
        """Return when the last request of this id ended; None if none did, or it is no longer remembered."""
        with self._lock:
            return self._ended_s.get(request_id)

    def end_lost(self, pod: str, engine_requests: int, scraped_s: float, now_s: float) -> list[Dispatch]:
        """Remove the pod's oldest requests in excess of its engine's count: reports of their ends were lost.

        Requests from other clients only raise the engine's count, so no running request is removed.

        Args:
            engine_requests: Waiting and running requests that the engine reported.
            scraped_s: Time of that report.
        """
        with self._lock:
            latest_s = scraped_s - self.parameters.transit_s
            entries = self._by_pod.get(pod, {}).values()
            arrived = [entry for entry in entries if entry.arrived_s < latest_s]
            surplus = len(arrived) - engine_requests
            return [self._remove(entry, now_s) for entry in arrived[: max(0, surplus)]]

    def engine_idle(self, pod: str, asked_s: float, now_s: float) -> list[Dispatch]:
        """Take requests off the pod's queue after a scrape at `asked_s` showed no requests; return them.

        Only requests whose first token was possible by then; a later report of the token still counts.
        """
        with self._lock:
            latest_s = asked_s - self.parameters.idle_slack_s
            over = [
                entry
                for entry in self._by_pod.get(pod, {}).values()
                if entry.is_waiting and entry.arrived_s + self._timeout_s(entry.dispatch) <= latest_s
            ]
            for entry in over:
                self._time_out_prefill(entry, now_s)
            return [entry.dispatch for entry in over]

    def expire(self, now_s: float) -> tuple[list[Dispatch], list[Dispatch]]:
        """Return requests whose prefill timed out, and requests removed because their lifetime is over."""
        prefills: list[Dispatch] = []
        with self._lock:
            while self._due and self._due[0][0] <= now_s:
                _, number = heapq.heappop(self._due)
                entry = self._entries.get(number)
                if entry is not None and entry.is_waiting:
                    self._time_out_prefill(entry, now_s)
                    prefills.append(entry.dispatch)
            lifetime_s, entries = self.parameters.lifetime_s, self._entries.values()
            over = takewhile(lambda entry: entry.dispatch.dispatched_s + lifetime_s <= now_s, entries)
            return prefills, [self._remove(entry, now_s) for entry in list(over)]

    def _evict(self, request_id: str, now_s: float) -> list[Dispatch]:
        displaced = []
        namesakes = self._by_id.get(request_id)
        if namesakes is not None and len(namesakes) >= self.parameters.per_id_max:
            displaced.append(self._remove(namesakes[0], now_s))
        if len(self._entries) >= self.parameters.capacity:
            displaced.append(self._remove(next(iter(self._entries.values())), now_s))
        return displaced

    def _schedule(self, dispatch: Dispatch, number: int) -> None:
        known = self.parameters
        expected_s = self._timeout_s(dispatch)
        if dispatch.confirm_key is None:
            prefill_s = expected_s + known.timeout_slack_s
        else:
            prefill_s = 5 * expected_s + known.event_timeout_slack_s
        heapq.heappush(self._due, (dispatch.dispatched_s + min(prefill_s, known.lifetime_s), number))
        # Ended requests leave their timeouts in the heap: remove these before they outnumber live ones.
        if len(self._due) > 2 * len(self._entries) + 512:
            self._due = [due for due in self._due if due[1] in self._entries]
            heapq.heapify(self._due)

    def _timeout_s(self, dispatch: Dispatch) -> float:
        return self.parameters.timeout_factor * (dispatch.queued_prefill_s + dispatch.own_prefill_s)

    def _time_out_prefill(self, entry: Entry, now_s: float) -> None:
        """Presume the end of a prefill that was not reported."""
        self._leave_queue(entry, now_s)
        if self.changes is not None:
            self.changes("overdue", entry.number)

    def _end_prefill(self, entry: Entry, now_s: float) -> None:
        entry.prefill_ended_s = now_s
        self._close_prediction(entry, answered=True)
        # False after a timeout: the request has left the queue.
        if entry.is_waiting:
            self._leave_queue(entry, now_s)
        if self.changes is not None:
            self.changes("prefilled", entry.number)

    def _leave_queue(self, entry: Entry, now_s: float) -> None:
        dispatch = entry.dispatch
        if dispatch.engine is not None:
            self.pending_tokens[dispatch.engine] -= dispatch.uncached_tokens
        if entry.pod == dispatch.pod:
            self.load_table.end_prefill(entry.pod, entry.number, now_s, dispatch.sequences)
        else:
            tokens, sequences = dispatch.uncached_tokens, dispatch.sequences
            self.load_table.hand_over(entry.pod, entry.number, dispatch.pod, tokens, now_s, sequences)
            self.adapters.count(entry.pod, dispatch.adapter, -1)
            self.adapters.count(dispatch.pod, dispatch.adapter, 1)
            self._leave_pod(entry)
            entry.pod, entry.arrived_s = dispatch.pod, now_s
            self._by_pod.setdefault(entry.pod, {})[entry.number] = entry
        entry.is_waiting = False

    def _remove(self, entry: Entry, now_s: float) -> Dispatch:
        dispatch = entry.dispatch
        self._close_prediction(entry)
        if (engine := dispatch.engine) is not None:
            pending = self.pending_tokens
            pending[engine] -= dispatch.sequences + (dispatch.uncached_tokens if entry.is_waiting else 0)
            if not pending[engine]:
                del pending[engine]
        del self._entries[entry.number]
        _remove_from(self._by_id, dispatch.request_id, entry)
        self._leave_pod(entry)
        self._remember(self._ended_s, dispatch.request_id, now_s)
        self.load_table.end(entry.pod, entry.number, dispatch.uncached_tokens, now_s, dispatch.sequences)
        self.adapters.count(entry.pod, dispatch.adapter, -1)
        if entry.confirm_key is not None:
            confirming = self._confirming[dispatch.computed_on]
            _remove_from(confirming, entry.confirm_key, entry)
            if not confirming:
                del self._confirming[dispatch.computed_on]
        if self.changes is not None:
            self.changes("ended", entry.number)
        return dispatch

    def _close_prediction(self, entry: Entry, *, answered: bool = False) -> None:
        """Remove the entry's predicted hit tokens from the open ones; count them if the pod has answered."""
        tokens, entry.predicted_hit_tokens = entry.predicted_hit_tokens, 0
        if tokens:
            pod = entry.dispatch.pod
            self._open_hit_tokens[pod] -= tokens
            if not self._open_hit_tokens[pod]:
                del self._open_hit_tokens[pod]
            if answered:
                self._answered_hit_tokens[pod] += tokens

    def _leave_pod(self, entry: Entry) -> None:
        on_pod = self._by_pod[entry.pod]
        del on_pod[entry.number]
        if not on_pod:
            del self._by_pod[entry.pod]

    def _find(self, request_id: str, pod: str | None, dispatched_s: float | None) -> Entry | None:
        entries = self._by_id.get(request_id)
        if entries is None:
            return None
        if dispatched_s is not None:
            return next((entry for entry in entries if entry.dispatch.dispatched_s == dispatched_s), None)
        if len(entries) == 1 or pod is None:
            return entries[0]
        return next((entry for entry in entries if entry.dispatch.pod == pod), entries[0])

    def _remember(self, ended_s: OrderedDict[str, float], request_id: str, at_s: float) -> None:
        ended_s[request_id] = at_s
        ended_s.move_to_end(request_id)
        if len(ended_s) > self.parameters.ended_ids_max:
            ended_s.popitem(last=False)


def _remove_from(lists: dict[_Key, list[Entry]], key: _Key, entry: Entry) -> None:
    entries = lists[key]
    if len(entries) == 1:
        del lists[key]
    else:
        entries.remove(entry)
