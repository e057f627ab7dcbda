"""How requests go on after their pick: news from every source in, ledger, rates and accounts up to date.

Sources are named: "blocks" (the pod announced the prompt's last block), "access_log", "response", "report",
"scrape" (the engine has fewer requests than it was sent), "clock", "displaced" (the ledger gave it up for a
later one). The first to tell counts, of a prefill's end also after the clock, which only guesses; how late
each is goes to the metrics. Knows no protocol; `Outcomes` is callable from any thread, holds no lock.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from indexer.audit.engine_counters import EngineReading
from indexer.audit.mismatch_watch import DispatchKey
from indexer.keys import Keys
from router.inflight.dispatch import Dispatch
from router.inflight.ledger import Ledger
from router.inflight.rates import PrefillRates
from router.observe.decision_log import Explain
from router.observe.metrics import RouterMetrics
from router.picking.decision import Decision
from router.pods.engine_load import EngineLoad
from router.pods.pod_set import PodSnapshot

if TYPE_CHECKING:
    from router.feedback.fleet import Fleet


BLOCKS, ACCESS_LOG, RESPONSE, REPORT = "blocks", "access_log", "response", "report"
SCRAPE, CLOCK = "scrape", "clock"

FIRST_TOKEN, DONE, FAILED, REFUSED = "first_token", "done", "failed", "refused"

# Longer than an access log is kept back.
_ECHO_LIFE_S = 30.0

Text = Annotated[str, Meta(max_length=512)]
# As finite as a float can be.
Seconds = Annotated[float, Meta(ge=0.0, le=sys.float_info.max)]


class Heard(msgspec.Struct, frozen=True, omit_defaults=True):
    """News of a request that is none of this router's; other routers are sent it as it is."""

    request_id: Text
    # `FIRST_TOKEN`, `DONE`, `FAILED` or `REFUSED` (the pod answered that the client asked something wrong: it
    # has computed nothing); nothing follows from any other.
    event: Text
    source: Text  # who told: `ACCESS_LOG`, `RESPONSE` or `REPORT`
    pod: Text | None = None
    late_s: Seconds | None = None  # how long ago it was over, if that was told
    cached_tokens: Annotated[int, Meta(ge=0)] | None = None


@dataclass(slots=True)
class Outcomes:
    """Keeps the accounts of dispatched requests."""

    ledger: Ledger
    rates: PrefillRates
    explain: Explain
    metrics: RouterMetrics
    settle: Callable[[DispatchKey, float], None]  # ends a request's speculative index entries, at a time
    drop: Callable[[DispatchKey], None]  # a request's blocks need not be awaited; before it is settled
    _echoes: Echoes = field(init=False, default_factory=lambda: Echoes())
    _others: Fleet | None = field(init=False, default=None)

    def join(self, others: Fleet) -> None:
        """From now on other routers are told what is heard of requests that are none of ours."""
        self._others = others

    def decided(self, decision: Decision, displaced: Sequence[Dispatch], took_s: float) -> None:
        """A pod was picked; `displaced` are requests that the ledger had to give up for it."""
        self.explain.decided(decision)
        self.metrics.decided(decision, took_s)
        for dispatch in displaced:
            self.metrics.ended("displaced", failed=True)
            self._lost(dispatch, decision.decided_s)
        if decision.is_charged and self.ledger.was_over(decision.request_id, decision.decided_s - took_s):
            # Its client was gone before there was a pick, and Envoy tells that once.
            self.ended(
                decision.request_id, ACCESS_LOG, decision.decided_s, pod=decision.primary.pod, failed=True
            )

    def refused(self, took_s: float) -> None:
        self.metrics.pick_failed(took_s)

    def stored(self, pod: str, keys: Keys, now_s: float) -> None:
        """A pod announced blocks: whose last prompt block is among them, its prefill is over."""
        prefills, told_late_s = self.ledger.stored(pod, keys, now_s)
        for dispatch in prefills:
            self._prefill_ended(dispatch, BLOCKS, now_s)
        for late_s in told_late_s:
            self.metrics.observe("late", late_s, "first_token", BLOCKS)

    def first_token(
        self,
        request_id: str,
        source: str,
        now_s: float,
        *,
        pod: str | None = None,
        sent_s: float | None = None,
        passes_on: bool = True,
    ) -> bool:
        """Its first token was seen; answers whether the request is in flight.

        Args:
            pod: Where, if known: it tells apart requests in flight under one id.
            sent_s: When it was sent (`Decision.decided_s`), if known: so does this, on one pod, too.
            passes_on: Whether other routers are told, if it is none of ours.
        """
        dispatch = self.ledger.first_token(request_id, now_s, pod, sent_s)
        if dispatch is not None:
            self._prefill_ended(dispatch, source, now_s)
        elif (known_s := self.ledger.prefill_ended_s(request_id, pod, sent_s)) is not None:
            self.metrics.observe("late", now_s - known_s, "first_token", source)
        elif passes_on and self._others is not None and request_id not in self.ledger:
            self._others.heard(Heard(request_id, FIRST_TOKEN, source, pod))
        return request_id in self.ledger

    def ended(
        self,
        request_id: str,
        source: str,
        now_s: float,
        *,
        pod: str | None = None,
        sent_s: float | None = None,
        failed: bool = False,
        cached_tokens: int | None = None,
        late_s: float | None = None,
        refused: bool = False,
        passes_on: bool = True,
    ) -> Dispatch | None:
        """The request is over; answers what it was, if it was in flight.

        Args:
            pod, sent_s: See `first_token`.
            refused: The pod answered that the client asked something wrong: it has computed nothing.
            late_s: How long ago it was over, if the source tells; else late by what another was earlier.
            passes_on: See `first_token`.
        """
        dispatch = None
        if source != ACCESS_LOG or not self._echoes.take(request_id, now_s):
            answered = not (failed or refused)
            dispatch = self.ledger.end(
                request_id, now_s, pod, sent_s, late_s=max(0.0, late_s or 0.0), answered=answered
            )
        if dispatch is not None:
            if source == RESPONSE:
                self._echoes.expect(request_id, now_s)
            if failed or refused:
                self._lost(dispatch, now_s)
            else:
                self.settle(dispatch.key, now_s)
            self.metrics.ended(source, failed=failed, late_s=late_s or 0.0)
        elif (known_s := self.ledger.ended_s(request_id)) is not None:
            self.metrics.observe("late", now_s - known_s, "end", source)
        elif passes_on and self._others is not None:
            event = FAILED if failed else REFUSED if refused else DONE
            self._others.heard(Heard(request_id, event, source, pod, late_s, cached_tokens))
        if dispatch is not None or cached_tokens is not None:
            predicted = self.explain.ended(
                request_id,
                source,
                now_s,
                failed=failed,
                cached_tokens=cached_tokens,
                dispatch=dispatch,
                pod=pod,
            )
            if predicted is not None and cached_tokens is not None:
                # A prediction, together with what came true of it.
                self.metrics.count("compared", number=predicted)
                self.metrics.count("delivered", number=cached_tokens)
        return dispatch

    def expire(self, now_s: float) -> None:
        prefills, lives = self.ledger.expire(now_s)
        for dispatch in prefills:
            self._guessed(dispatch, CLOCK, now_s)
        for dispatch in lives:
            self._given_up(dispatch, CLOCK, now_s)

    def reconcile(self, pod: str, engine_requests: int, told_s: float, now_s: float) -> None:
        """An engine told how many requests it has: what was sent there beyond that is over."""
        for dispatch in self.ledger.reconcile(pod, engine_requests, told_s, now_s):
            self._given_up(dispatch, SCRAPE, now_s)

    def idle(self, pod: str, asked_s: float, now_s: float) -> None:
        """An engine that was asked at `asked_s` has no requests: what was sent before waits no more."""
        for dispatch in self.ledger.idle(pod, asked_s, now_s):
            self._guessed(dispatch, SCRAPE, now_s)

    def remembers(self, request_id: str) -> bool:
        """Whether a request of this id is in flight, or was not long ago; with other routers' in flight."""
        if request_id in self.ledger or self.ledger.ended_s(request_id) is not None:
            return True
        return self.is_others(request_id)

    def is_others(self, request_id: str) -> bool:
        return self._others is not None and self._others.know(request_id)

    def told(self, heard: Heard, now_s: float) -> None:
        """Another router has heard of a request that is none of its own: if it is one of ours, it is news."""
        request_id, source, pod = heard.request_id, heard.source, heard.pod
        # A gateway may have had to ask two of us for one request, and have taken the other's answer.
        if pod is not None and self.is_others(request_id) and not self.ledger.is_on(request_id, pod):
            return
        if heard.event == FIRST_TOKEN:
            self.first_token(request_id, source, now_s, pod=pod, passes_on=False)
        if heard.event not in (DONE, FAILED, REFUSED):
            return
        self.ended(
            request_id,
            source,
            now_s,
            pod=pod,
            failed=heard.event == FAILED,
            refused=heard.event == REFUSED,
            cached_tokens=heard.cached_tokens,
            late_s=heard.late_s,
            passes_on=False,
        )

    def _lost(self, dispatch: Dispatch, now_s: float) -> None:
        """It failed, was refused, or nothing was heard of it: without a first token that tells nothing."""
        self.drop(dispatch.key)
        self.settle(dispatch.key, now_s)

    def _given_up(self, dispatch: Dispatch, source: str, now_s: float) -> None:
        self._lost(dispatch, now_s)
        self.metrics.ended(source, failed=True)
        self.explain.ended(dispatch.request_id, source, now_s, failed=True, dispatch=dispatch)

    def _prefill_ended(self, dispatch: Dispatch, source: str, now_s: float) -> None:
        tokens, took_s = dispatch.uncached_tokens, now_s - dispatch.dispatched_s
        self.rates.observe(dispatch.computed_on, tokens, took_s, now_s, dispatch.lesson, dispatch.decoding)
        self.settle(dispatch.key, now_s)
        self._guessed(dispatch, source, now_s)

    def _guessed(self, dispatch: Dispatch, source: str, now_s: float) -> None:
        """Its prefill is taken for ended; while that is no news, its speculative entries live on."""
        self.metrics.observe("prefill_ends", now_s - dispatch.dispatched_s, source)
        self.explain.prefill_ended(dispatch, source, now_s)


class Echoes:
    """Ends that will be told once more: by the response phase first, then by Envoy's access log. Thread-safe.

    The log's entry names only the request's id, under which another request may be in flight by then: it must
    not end that one. Counts by id; what no log tells in time is forgotten.
    """

    def __init__(self, capacity: int = 10_000) -> None:
        self._capacity = capacity
        # How often, and when the last time.
        self._awaited: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._awaited)

    def expect(self, request_id: str, now_s: float) -> None:
        """A request under this id has ended, as was seen here."""
        with self._lock:
            ends, _ = self._awaited.get(request_id, (0, now_s))
            self._awaited[request_id] = ends + 1, now_s
            self._awaited.move_to_end(request_id)
            if len(self._awaited) > self._capacity:
                self._awaited.popitem(last=False)

    def take(self, request_id: str, now_s: float) -> bool:
        """The log tells of an end under this id; whether it is one that was seen."""
        with self._lock:
            ends, told_s = self._awaited.pop(request_id, (0, now_s))
            if not ends or now_s - told_s > _ECHO_LIFE_S:
                return False
            if ends > 1:
                self._awaited[request_id] = ends - 1, told_s
            return True


# Longer than Envoy keeps its access log back.
_NEWS_TRAVEL_S = 1.0
# Longer than what a deleted pod has begun usually lasts.
_GONE_S = 60.0


class Reconciler:
    """Ends requests whose ends nobody told, by each pod's scraped load.

    An engine's count is compared a moment after it was read: by then the ends that came before it have been
    told, so whatever the ledger still has beyond it is lost news. An engine without any request has no queue:
    that counts at once. Of a pod that went away nobody tells any more once its gateway is replaced, too: what
    was sent there is over a minute later. No pick depends on it, but the number of requests in flight does.
    """

    def __init__(self, outcomes: Outcomes) -> None:
        self._outcomes = outcomes
        self._told: dict[str, EngineLoad] = {}
        self._present: frozenset[str] = frozenset()
        self._gone_s: dict[str, float] = {}

    def look(self, pods: PodSnapshot, now_s: float) -> None:
        """Looks at what the pods have told; cheap, to be called often."""
        told = {}
        for address, pod in pods.items():
            load = self._told.get(address, pod.load)
            if pod.load is not None and pod.load.requests == 0:
                self._outcomes.idle(address, pod.load.asked_s, now_s)
            if load is None:
                continue
            if now_s - load.scraped_s < _NEWS_TRAVEL_S:
                told[address] = load
            elif address in self._told and load.requests is not None:
                self._outcomes.reconcile(address, load.requests, load.scraped_s, now_s)
        self._told = told
        self._end_of_gone(pods, now_s)

    def _end_of_gone(self, pods: PodSnapshot, now_s: float) -> None:
        gone = (self._present | self._gone_s.keys()) - pods.keys()
        self._gone_s = {address: self._gone_s.get(address, now_s) for address in gone}
        self._present = frozenset(pods)
        for address in [address for address in gone if now_s - self._gone_s[address] >= _GONE_S]:
            self._outcomes.reconcile(address, 0, now_s, now_s)
            del self._gone_s[address]


@dataclass(frozen=True, slots=True)
class EngineWatch:
    """Holds what engines tell of themselves against the views of their caches; to be used by one thread.

    A reading is completed with what was predicted of the engine's cache until then.
    """

    ledger: Ledger
    observe: Callable[[str, EngineReading], object]  # told the completed reading, see `KvIndexer.observe`

    def asked(self, pod: str) -> int:
        """The pod's page is about to be asked for; what to hand to `told` with it."""
        return self.ledger.answered_tokens(pod)

    def told(self, pod: str, reading: EngineReading, answered_tokens: int) -> None:
        promised_tokens = self.ledger.promised_tokens(pod)
        self.observe(
            pod, replace(reading, predicted_tokens=answered_tokens, predicted_sent_tokens=promised_tokens)
        )
