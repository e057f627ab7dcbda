"""The requests in flight: dispatches and their ends in, the work that each pod has out.

No I/O and no clock: time comes in. One lock guards it all, held for a few dictionary operations and never
while calling out, so it may be called from any thread, also under others' locks.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from threading import Lock
from typing import Protocol, TypeVar

from indexer.keys import Keys
from router.inflight.dispatch import Dispatch, Entry, SentAdapters
from router.pods.load_table import PodBoard

_Key = TypeVar("_Key", int, str)


@dataclass(frozen=True, slots=True)
class LedgerParameters:
    """Limits of the ledger."""

    capacity: int = 100_000  # requests in flight; when full, the oldest is taken for ended
    lifetime_s: float = 600.0  # a request of which nothing more is heard is taken for ended after this
    # A prefill whose end no event will announce is taken for ended after this many times its expected
    # seconds, and `slack_s`; one whose event is awaited after five times as long again, and `event_slack_s`.
    patience: float = 2.0
    slack_s: float = 0.1
    event_slack_s: float = 5.0
    # An engine that tells of no requests has had what was sent there `patience` times its expected seconds
    # and this long before it was asked. A request is on its page only once a step has ended: until then it
    # travels, is tokenized, and its first tokens are computed.
    idle_slack_s: float = 0.5
    reuse: int = 64  # requests in flight under one id; beyond it the oldest of them is taken for ended
    remembered: int = 10_000  # ids of ended requests that are still known; the same of unknown ids' ends
    travel_s: float = 2.0  # a request sent so shortly before an engine told its load may not be in it


class ChangeListener(Protocol):
    """Receiver of the ledger's changes, in their order; called with the ledger's lock held."""

    def begin(self, in_flight: Sequence[tuple[int, Dispatch, bool]]) -> None:
        """Note the requests in flight: number, dispatch, and whether its first token is believed out."""

    def note(self, kind: str, change: object) -> None:
        """Note one change: `(number, dispatch, keys)` for "sent", else the request's number."""


class Ledger:
    """In-flight requests, and what they add up to on the board.

    Each dispatch is an entry of its own: clients reuse request ids, also while the first use is in flight.
    News of an id concerns its oldest entry, or the oldest on the pod that the news names, or the one that was
    sent when the news says. The clock only guesses a prefill's end: the request leaves the pod's queue, and
    who tells its true end still brings news.
    """

    def __init__(
        self,
        parameters: LedgerParameters,
        board: PodBoard | None = None,
        adapters: SentAdapters | None = None,
    ) -> None:
        self._parameters = parameters
        self.board = board or PodBoard()
        self.adapters = adapters or SentAdapters()
        # Told of every change in its order, under the lock; see `tell`.
        self.changes: ChangeListener | None = None
        # Oldest first, as are the entries of each id and of each pod.
        self._entries: dict[int, Entry] = {}
        self._by_id: dict[str, list[Entry]] = {}
        self._by_pod: dict[str, dict[int, Entry]] = {}
        self._ended_s: OrderedDict[str, float] = OrderedDict()
        self._unknown_ended_s: OrderedDict[str, float] = OrderedDict()
        # By pod and key: the requests whose last prompt block that is, until it is announced.
        self._confirming: dict[str, dict[int, list[Entry]]] = {}
        # Tokens that each pod should find in its cache: for requests that it has yet to answer, and answered.
        self._open_tokens: Counter[str] = Counter()
        self._answered_tokens: Counter[str] = Counter()
        # When each prefill is taken for ended, and its entry's number.
        self._due: list[tuple[float, int]] = []
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def tell(self, listener: ChangeListener | None) -> None:
        """Has a listener told of every change from now on, and of what is in flight now; None: none."""
        with self._lock:
            self.changes = listener
            if listener is not None:
                entries = self._entries.values()
                listener.begin([(one.number, one.dispatch, not one.is_waiting) for one in entries])

    def dispatch(self, dispatch: Dispatch, keys: Keys | None = None) -> list[Dispatch]:
        """Enters a request.

        Args:
            keys: Of the blocks that it will bring; for `changes` alone.

        Returns:
            The requests that had to go: the oldest when the ledger is full, or when its id has too many.
        """
        request_id, now_s, confirm_key = dispatch.request_id, dispatch.dispatched_s, dispatch.confirm_key
        pod = dispatch.prefill_pod or dispatch.pod
        with self._lock:
            displaced = self._make_room(request_id, now_s)
            number = self.board.begin(pod, dispatch.uncached_tokens, now_s)
            self.adapters.began(pod, dispatch.adapter)
            if promised_tokens := dispatch.promised_tokens:
                self._open_tokens[dispatch.pod] += promised_tokens
            entry = Entry(dispatch, number, pod, now_s, confirm_key, promised_tokens)
            self._entries[number] = entry
            self._by_id.setdefault(request_id, []).append(entry)
            self._by_pod.setdefault(pod, {})[number] = entry
            if confirm_key is not None:
                self._confirming.setdefault(pod, {}).setdefault(confirm_key, []).append(entry)
            self._schedule(dispatch, number)
            if (listener := self.changes) is not None:
                listener.note("sent", (number, dispatch, keys))
            return displaced

    def stored(self, pod: str, keys: Keys, now_s: float) -> tuple[list[Dispatch], list[float]]:
        """The pod announced blocks.

        Returns:
            The requests whose prefill this ends; and of each other whose last block is among them, how many
            seconds ago somebody else told that its prefill was over.
        """
        prefills: list[Dispatch] = []
        late_s: list[float] = []
        with self._lock:
            confirming = self._confirming.get(pod)
            stored = keys.tolist() if confirming else ()
            # Nearly always nobody waited: that is seen without making a set.
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
        self, request_id: str, now_s: float, pod: str | None = None, sent_s: float | None = None
    ) -> Dispatch | None:
        """Its first token was seen; returns the request if that was news."""
        with self._lock:
            entry = self._find(request_id, pod, sent_s)
            if entry is None or entry.prefill_ended_s is not None:
                return None
            self._end_prefill(entry, now_s)
            return entry.dispatch

    def end(
        self,
        request_id: str,
        now_s: float,
        pod: str | None = None,
        sent_s: float | None = None,
        *,
        late_s: float = 0.0,
        answered: bool = True,
    ) -> Dispatch | None:
        """It is done or has failed; returns the request if it was in flight.

        Args:
            late_s: How long ago it was over.
            answered: Whether the pod has computed it, so that it has looked its prompt up in its cache.
        """
        with self._lock:
            entry = self._find(request_id, pod, sent_s)
            if entry is not None:
                if answered:
                    self._close_promise(entry, self._answered_tokens)
                return self._remove(entry, now_s)
            self._remember(self._unknown_ended_s, request_id, now_s - late_s)
            return None

    def answered_tokens(self, pod: str) -> int:
        """Tokens that the pod should have found in its cache for all requests that it has answered."""
        return self._answered_tokens[pod]

    def promised_tokens(self, pod: str) -> int:
        """The same with those of requests that it has not answered yet."""
        with self._lock:
            return self._answered_tokens[pod] + self._open_tokens[pod]

    def keep(self, pods: Collection[str]) -> None:
        with self._lock:
            for gone in self._answered_tokens.keys() - set(pods):
                del self._answered_tokens[gone]

    def is_on(self, request_id: str, pod: str) -> bool:
        with self._lock:
            return any(entry.dispatch.pod == pod for entry in self._by_id.get(request_id, ()))

    def was_over(self, request_id: str, since_s: float) -> bool:
        """Whether an end was told of this id after `since_s`, while no request of it was in flight."""
        # Without the lock: nearly always there is nothing.
        return self._unknown_ended_s.get(request_id, since_s) > since_s

    def prefill_ended_s(
        self, request_id: str, pod: str | None = None, sent_s: float | None = None
    ) -> float | None:
        """When somebody told that its prefill is over; None until then, and after its end."""
        with self._lock:
            entry = self._find(request_id, pod, sent_s)
            return entry.prefill_ended_s if entry else None

    def ended_s(self, request_id: str) -> float | None:
        """When the last request of this id ended; None when none did, or it is forgotten."""
        with self._lock:
            return self._ended_s.get(request_id)

    def reconcile(self, pod: str, engine_requests: int, told_s: float, now_s: float) -> list[Dispatch]:
        """Ends the oldest requests beyond those that the pod's engine has: news of their ends was lost.

        Others may send requests there, too, so the engine's number is never too small.

        Args:
            engine_requests: Waiting and running there.
            told_s: When the engine said so.
        """
        with self._lock:
            sent_s = told_s - self._parameters.travel_s
            entries = self._by_pod.get(pod, {}).values()
            arrived = [entry for entry in entries if entry.arrived_s < sent_s]
            surplus = len(arrived) - engine_requests
            return [self._remove(entry, now_s) for entry in arrived[: max(0, surplus)]]

    def idle(self, pod: str, asked_s: float, now_s: float) -> list[Dispatch]:
        """The pod's engine told, when asked at `asked_s`, that it has no requests: none is queued there.

        Those leave the queue whose first token could have come by then; who knows when it came may yet tell.
        """
        with self._lock:
            latest_s = asked_s - self._parameters.idle_slack_s
            over = [
                entry
                for entry in self._by_pod.get(pod, {}).values()
                if entry.is_waiting and entry.arrived_s + self._patient_s(entry.dispatch) <= latest_s
            ]
            for entry in over:
                self._give_up_waiting(entry, now_s)
            return [entry.dispatch for entry in over]

    def expire(self, now_s: float) -> tuple[list[Dispatch], list[Dispatch]]:
        """Return the requests whose prefill, and those whose life, is over by the clock alone."""
        prefills: list[Dispatch] = []
        with self._lock:
            while self._due and self._due[0][0] <= now_s:
                _, number = heapq.heappop(self._due)
                entry = self._entries.get(number)
                if entry is not None and entry.is_waiting:
                    self._give_up_waiting(entry, now_s)
                    prefills.append(entry.dispatch)
            lifetime_s, entries = self._parameters.lifetime_s, self._entries.values()
            over = takewhile(lambda entry: entry.dispatch.dispatched_s + lifetime_s <= now_s, entries)
            return prefills, [self._remove(entry, now_s) for entry in list(over)]

    def _make_room(self, request_id: str, now_s: float) -> list[Dispatch]:
        displaced = []
        namesakes = self._by_id.get(request_id)
        if namesakes is not None and len(namesakes) >= self._parameters.reuse:
            displaced.append(self._remove(namesakes[0], now_s))
        if len(self._entries) >= self._parameters.capacity:
            displaced.append(self._remove(next(iter(self._entries.values())), now_s))
        return displaced

    def _schedule(self, dispatch: Dispatch, number: int) -> None:
        known = self._parameters
        expected_s = self._patient_s(dispatch)
        if dispatch.confirm_key is None:
            prefill_s = expected_s + known.slack_s
        else:
            prefill_s = 5 * expected_s + known.event_slack_s
        heapq.heappush(self._due, (dispatch.dispatched_s + min(prefill_s, known.lifetime_s), number))
        # Ended requests leave their deadlines behind; now and then they are swept out.
        if len(self._due) > 2 * len(self._entries) + 512:
            self._due = [due for due in self._due if due[1] in self._entries]
            heapq.heapify(self._due)

    def _patient_s(self, dispatch: Dispatch) -> float:
        return self._parameters.patience * (dispatch.queued_prefill_s + dispatch.own_prefill_s)

    def _give_up_waiting(self, entry: Entry, now_s: float) -> None:
        """Takes a request's prefill for ended, which nobody has told."""
        self._leave_queue(entry, now_s)
        if self.changes is not None:
            self.changes.note("overdue", entry.number)

    def _end_prefill(self, entry: Entry, now_s: float) -> None:
        entry.prefill_ended_s = now_s
        self._close_promise(entry, self._answered_tokens)
        # The clock may have guessed it before.
        if entry.is_waiting:
            self._leave_queue(entry, now_s)
        if self.changes is not None:
            self.changes.note("prefilled", entry.number)

    def _leave_queue(self, entry: Entry, now_s: float) -> None:
        dispatch = entry.dispatch
        if entry.pod == dispatch.pod:
            self.board.end_prefill(entry.pod, entry.number, now_s)
        else:
            self.board.hand_over(entry.pod, entry.number, dispatch.pod, dispatch.uncached_tokens, now_s)
            self.adapters.ended(entry.pod, dispatch.adapter)
            self.adapters.began(dispatch.pod, dispatch.adapter)
            self._leave_pod(entry)
            entry.pod, entry.arrived_s = dispatch.pod, now_s
            self._by_pod.setdefault(entry.pod, {})[entry.number] = entry
        entry.is_waiting = False

    def _remove(self, entry: Entry, now_s: float) -> Dispatch:
        dispatch = entry.dispatch
        self._close_promise(entry)
        del self._entries[entry.number]
        _remove_from(self._by_id, dispatch.request_id, entry)
        self._leave_pod(entry)
        self._remember(self._ended_s, dispatch.request_id, now_s)
        self.board.end(entry.pod, entry.number, dispatch.uncached_tokens, now_s)
        self.adapters.ended(entry.pod, dispatch.adapter)
        if entry.confirm_key is not None:
            self._stop_confirming(entry, entry.confirm_key)
        if self.changes is not None:
            self.changes.note("ended", entry.number)
        return dispatch

    def _close_promise(self, entry: Entry, kept: Counter[str] | None = None) -> None:
        """Awaits the entry's tokens no more; counts them in `kept`, where it is known that they are due."""
        tokens, entry.promised_tokens = entry.promised_tokens, 0
        if tokens:
            pod = entry.dispatch.pod
            self._open_tokens[pod] -= tokens
            if not self._open_tokens[pod]:
                del self._open_tokens[pod]
            if kept is not None:
                kept[pod] += tokens

    def _leave_pod(self, entry: Entry) -> None:
        on_pod = self._by_pod[entry.pod]
        del on_pod[entry.number]
        if not on_pod:
            del self._by_pod[entry.pod]

    def _stop_confirming(self, entry: Entry, confirm_key: int) -> None:
        pod = entry.dispatch.computed_on
        confirming = self._confirming[pod]
        _remove_from(confirming, confirm_key, entry)
        if not confirming:
            del self._confirming[pod]

    def _find(self, request_id: str, pod: str | None, sent_s: float | None) -> Entry | None:
        entries = self._by_id.get(request_id)
        if entries is None:
            return None
        if sent_s is not None:
            return next((entry for entry in entries if entry.dispatch.dispatched_s == sent_s), None)
        if len(entries) == 1 or pod is None:
            return entries[0]
        return next((entry for entry in entries if entry.dispatch.pod == pod), entries[0])

    def _remember(self, ended_s: OrderedDict[str, float], request_id: str, at_s: float) -> None:
        ended_s[request_id] = at_s
        ended_s.move_to_end(request_id)
        if len(ended_s) > self._parameters.remembered:
            ended_s.popitem(last=False)


def _remove_from(lists: dict[_Key, list[Entry]], key: _Key, entry: Entry) -> None:
    entries = lists[key]
    if len(entries) == 1:
        del lists[key]
    else:
        entries.remove(entry)
