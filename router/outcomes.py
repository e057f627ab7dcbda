"""How requests go on after their pick: news from every source in, ledger, rates and accounts up to date.

Sources are named: "blocks" (the pod announced the prompt's last block), "access_log", "response", "report",
"clock". Knows no protocol; callable from any thread, holds no lock of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.decision import Decision
from router.errors import RequestError
from router.explain import Explain
from router.ledger import Dispatch, Ledger
from router.metrics import RouterMetrics
from router.rates import PrefillRates

BLOCKS, ACCESS_LOG, RESPONSE, REPORT, CLOCK = "blocks", "access_log", "response", "report", "clock"


class Outcomes:
    """Keeps the accounts of dispatched requests.

    Args:
        settle: Ends a request's speculative index entries (request id, now_s).
    """

    def __init__(
        self,
        ledger: Ledger,
        rates: PrefillRates,
        explain: Explain,
        metrics: RouterMetrics,
        settle: Callable[[str, float], None],
    ) -> None:
        self._ledger = ledger
        self._rates = rates
        self._explain = explain
        self._metrics = metrics
        self._settle = settle

    def decided(self, decision: Decision, displaced: Sequence[Dispatch], took_s: float) -> None:
        """A pod was picked; `displaced` are requests that the ledger had to give up for it."""
        self._explain.decided(decision)
        self._metrics.decided(decision, took_s)
        for dispatch in displaced:
            self._metrics.ended("displaced", failed=True)
            if dispatch.request_id != decision.request_id:
                self._settle(dispatch.request_id, decision.decided_s)

    def refused(self, error: RequestError, took_s: float) -> None:
        """No pod was picked."""
        self._metrics.refused(error, took_s)

    def stored(self, pod: str, keys: Sequence[int], now_s: float) -> None:
        """A pod announced blocks: whose last prompt block is among them, its prefill is over."""
        for dispatch in self._ledger.stored(pod, keys):
            if dispatch.found_idle:
                self._rates.observe(pod, dispatch.uncached_tokens, now_s - dispatch.dispatched_s)
            self._prefill_ended(dispatch, BLOCKS, now_s)

    def first_token(self, request_id: str, source: str, now_s: float) -> bool:
        """Its first token was seen; answers whether the request is in flight."""
        dispatch = self._ledger.first_token(request_id)
        if dispatch is not None:
            if dispatch.found_idle:
                self._rates.observe(dispatch.pod, dispatch.uncached_tokens, now_s - dispatch.dispatched_s)
            self._prefill_ended(dispatch, source, now_s)
        return dispatch is not None or request_id in self._ledger

    def ended(
        self,
        request_id: str,
        source: str,
        now_s: float,
        *,
        failed: bool = False,
        cached_tokens: int | None = None,
    ) -> Dispatch | None:
        """The request is over; answers what it was, if it was in flight."""
        dispatch = self._ledger.end(request_id)
        if dispatch is not None:
            self._settle(request_id, now_s)
            self._metrics.ended(source, failed=failed)
        predicted = self._explain.predicted(request_id)
        if cached_tokens is not None and predicted is not None:
            self._metrics.delivered(predicted, cached_tokens)
        if dispatch is not None or cached_tokens is not None:
            self._explain.ended(request_id, source, now_s, failed=failed, cached_tokens=cached_tokens)
        return dispatch

    def expire(self, now_s: float) -> None:
        """Ends what is over by the clock alone."""
        expired = self._ledger.expire(now_s)
        for dispatch in expired.prefills:
            # A guess, not news: the request's speculative entries live on.
            self._metrics.prefill_ended(CLOCK, now_s - dispatch.dispatched_s)
            self._explain.prefill_ended(dispatch.request_id, CLOCK, now_s)
        for dispatch in expired.lives:
            self._settle(dispatch.request_id, now_s)
            self._metrics.ended(CLOCK, failed=True)
            self._explain.ended(dispatch.request_id, CLOCK, now_s, failed=True, cached_tokens=None)

    def _prefill_ended(self, dispatch: Dispatch, source: str, now_s: float) -> None:
        self._settle(dispatch.request_id, now_s)
        self._metrics.prefill_ended(source, now_s - dispatch.dispatched_s)
        self._explain.prefill_ended(dispatch.request_id, source, now_s)
