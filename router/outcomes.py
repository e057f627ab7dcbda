"""How requests go on after their pick: news from every source in, ledger, rates and accounts up to date.

Sources are named: "blocks" (the pod announced the prompt's last block), "access_log", "response", "report",
"scrape" (the engine has fewer requests than it was sent), "clock", "displaced" (the ledger gave it up for a
later one). The first to tell counts, of a prefill's end also after the clock, which only guesses; how late
each is goes to the metrics. Knows no protocol; callable from any thread, holds no lock of its own.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from indexer.keys import Keys
from indexer.parity import DispatchKey
from router.decision import Decision
from router.dispatch import Dispatch
from router.errors import RequestError
from router.explain import Explain
from router.ledger import Ledger
from router.metrics import RouterMetrics
from router.rates import PrefillRates

if TYPE_CHECKING:
    from router.replicas.fleet import Fleet

BLOCKS, ACCESS_LOG, RESPONSE, REPORT = "blocks", "access_log", "response", "report"
SCRAPE, CLOCK = "scrape", "clock"

FIRST_TOKEN, DONE, FAILED, REFUSED = "first_token", "done", "failed", "refused"

# Longer than an access log is kept back.
_ECHO_LIFE_S = 30.0

Text = Annotated[str, Meta(max_length=512)]
# As finite as a float can be.
Seconds = Annotated[float, Meta(ge=0.0, le=sys.float_info.max)]


class Heard(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was heard of a request that is none of this router's; other routers are sent it as it is.

    Attributes:
        event: `FIRST_TOKEN`, `DONE`, `FAILED` or `REFUSED` (the pod answered that the client asked something
            wrong: it has computed nothing); nothing follows from any other.
        source: Who told: `ACCESS_LOG`, `RESPONSE` or `REPORT`.
        late_s: How long ago it was over, if that was told.
    """

    request_id: Text
    event: Text
    source: Text
    pod: Text | None = None
    late_s: Seconds | None = None
    cached_tokens: Annotated[int, Meta(ge=0)] | None = None


class Outcomes:
    """Keeps the accounts of dispatched requests.

    Args:
        settle: Ends a request's speculative index entries (request, now_s).
        drop: Told of a request whose blocks need not be awaited; before it is settled.
    """

    def __init__(
        self,
        ledger: Ledger,
        rates: PrefillRates,
        explain: Explain,
        metrics: RouterMetrics,
        settle: Callable[[DispatchKey, float], None],
        drop: Callable[[DispatchKey], None],
    ) -> None:
        self._ledger = ledger
        self._rates = rates
        self._explain = explain
        self._metrics = metrics
        self._settle = settle
        self._drop = drop
        self._echoes = Echoes()
        self._others: Fleet | None = None

    def join(self, others: Fleet) -> None:
        """From now on other routers are told what is heard of requests that are none of ours."""
        self._others = others

    def decided(self, decision: Decision, displaced: Sequence[Dispatch], took_s: float) -> None:
        """A pod was picked; `displaced` are requests that the ledger had to give up for it."""
        self._explain.decided(decision)
        self._metrics.decided(decision, took_s)
        for dispatch in displaced:
            self._metrics.ended("displaced", failed=True)
            self._lost(dispatch, decision.decided_s)
        if decision.is_charged and self._ledger.was_over(decision.request_id, decision.decided_s - took_s):
            # Its client was gone before there was a pick, and Envoy tells that once.
            self.ended(
                decision.request_id, ACCESS_LOG, decision.decided_s, pod=decision.primary.pod, failed=True
            )

    def refused(self, error: RequestError, took_s: float) -> None:
        self._metrics.refused(error, took_s)

    def stored(self, pod: str, keys: Keys, now_s: float) -> None:
        """A pod announced blocks: whose last prompt block is among them, its prefill is over."""
        announced = self._ledger.stored(pod, keys, now_s)
        for dispatch in announced.prefills:
            self._prefill_ended(dispatch, BLOCKS, now_s)
        for late_s in announced.late_s:
            self._metrics.told_late("first_token", BLOCKS, late_s)

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
        dispatch = self._ledger.first_token(request_id, now_s, pod, sent_s)
        if dispatch is not None:
            self._prefill_ended(dispatch, source, now_s)
        elif (known_s := self._ledger.prefill_ended_s(request_id, pod, sent_s)) is not None:
            self._metrics.told_late("first_token", source, now_s - known_s)
        elif passes_on and self._others is not None and request_id not in self._ledger:
            self._others.heard(Heard(request_id, FIRST_TOKEN, source, pod))
        return request_id in self._ledger

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
            dispatch = self._ledger.end(
                request_id, now_s, pod, sent_s, late_s=max(0.0, late_s or 0.0), answered=answered
            )
        if dispatch is not None:
            if source == RESPONSE:
                self._echoes.expect(request_id, now_s)
            if failed or refused:
                self._lost(dispatch, now_s)
            else:
                self._settle(dispatch.key, now_s)
            self._metrics.ended(source, failed=failed, late_s=late_s or 0.0)
        elif (known_s := self._ledger.ended_s(request_id)) is not None:
            self._metrics.told_late("end", source, now_s - known_s)
        elif passes_on and self._others is not None:
            event = FAILED if failed else REFUSED if refused else DONE
            self._others.heard(Heard(request_id, event, source, pod, late_s, cached_tokens))
        if cached_tokens is not None:
            predicted = self._explain.predicted(request_id, dispatch, pod)
            if predicted is not None:
                self._metrics.delivered(predicted, cached_tokens)
        if dispatch is not None or cached_tokens is not None:
            self._explain.ended(
                request_id,
                source,
                now_s,
                failed=failed,
                cached_tokens=cached_tokens,
                dispatch=dispatch,
                pod=pod,
            )
        return dispatch

    def expire(self, now_s: float) -> None:
        expired = self._ledger.expire(now_s)
        for dispatch in expired.prefills:
            self._guessed(dispatch, CLOCK, now_s)
        for dispatch in expired.lives:
            self._given_up(dispatch, CLOCK, now_s)

    def reconcile(self, pod: str, engine_requests: int, told_s: float, now_s: float) -> None:
        """An engine told how many requests it has: what was sent there beyond that is over."""
        for dispatch in self._ledger.reconcile(pod, engine_requests, told_s, now_s):
            self._given_up(dispatch, SCRAPE, now_s)

    def idle(self, pod: str, asked_s: float, now_s: float) -> None:
        """An engine that was asked at `asked_s` has no requests: what was sent before waits no more."""
        for dispatch in self._ledger.idle(pod, asked_s, now_s):
            self._guessed(dispatch, SCRAPE, now_s)

    def remembers(self, request_id: str) -> bool:
        """Whether a request of this id is in flight, or was not long ago; with other routers' in flight."""
        if request_id in self._ledger or self._ledger.ended_s(request_id) is not None:
            return True
        return self.is_others(request_id)

    def is_others(self, request_id: str) -> bool:
        return self._others is not None and self._others.know(request_id)

    def told(self, heard: Heard, now_s: float) -> None:
        """Another router has heard of a request that is none of its own: if it is one of ours, it is news."""
        request_id, source, pod = heard.request_id, heard.source, heard.pod
        # A gateway may have had to ask two of us for one request, and have taken the other's answer.
        if pod is not None and self.is_others(request_id) and not self._ledger.is_on(request_id, pod):
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
        self._drop(dispatch.key)
        self._settle(dispatch.key, now_s)

    def _given_up(self, dispatch: Dispatch, source: str, now_s: float) -> None:
        self._lost(dispatch, now_s)
        self._metrics.ended(source, failed=True)
        self._explain.ended(dispatch.request_id, source, now_s, failed=True, dispatch=dispatch)

    def _prefill_ended(self, dispatch: Dispatch, source: str, now_s: float) -> None:
        tokens, took_s = dispatch.uncached_tokens, now_s - dispatch.dispatched_s
        self._rates.observe(dispatch.computed_on, tokens, took_s, now_s, dispatch.lesson, dispatch.decoding)
        self._settle(dispatch.key, now_s)
        self._guessed(dispatch, source, now_s)

    def _guessed(self, dispatch: Dispatch, source: str, now_s: float) -> None:
        """Its prefill is taken for ended; while that is no news, its speculative entries live on."""
        self._metrics.prefill_ended(source, now_s - dispatch.dispatched_s)
        self._explain.prefill_ended(dispatch, source, now_s)


class Echoes:
    """Ends that will be told once more: by the response phase first, then by Envoy's access log. Thread-safe.

    The log's entry names only the request's id, under which another request may be in flight by then: it must
    not end that one. Counts by id; what no log tells in time is forgotten.

    Args:
        capacity: Ids remembered; the one that was told of longest ago goes first.
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
