"""Observability around the routing core: metrics, decision log, traces and error log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from common.repeated_log import RepeatedLog
from router.errors import RequestError
from router.inflight.dispatch import Dispatch
from router.observe.decision_log import DecisionLog
from router.observe.metrics import RouterMetrics
from router.observe.tracing import Traces
from router.picking.decision import Decision
from router.picking.route import Router
from router.prompts.request import RouteRequest

_log = logging.getLogger(__name__)
_repeated = RepeatedLog(_log)


@dataclass(frozen=True, slots=True)
class ObservedRouter:
    """Router whose picks and failures are timed, traced and logged. Thread-safe."""

    router: Router
    metrics: RouterMetrics
    traces: Traces | None = None

    def route(
        self, request: RouteRequest, now_s: float, is_active: Callable[[], bool] | None = None
    ) -> Decision:
        """Route the request, see `Router.route`.

        Raises:
            RequestError: The request cannot be routed. Status 500: routing failed; the traceback is logged.
        """
        started_s = time.perf_counter()
        traces, decision = self.traces, None
        # Unix times in nanoseconds: the request's arrival, then the end of each step.
        steps_ns = [time.time_ns()]
        try:
            if traces is None:
                decision = self.router.route(request, now_s, is_active)
            else:
                decision = self.router.route(
                    request, now_s, is_active, lambda: steps_ns.append(time.time_ns())
                )
        except Exception as error:
            if traces is not None:
                traces.routed(request, steps_ns, error)
            if isinstance(error, RequestError):
                raise
            _repeated.event(
                "pick_failed",
                "picks",
                "pick failed: request_id=%s",
                request.request_id,
                level=logging.ERROR,
                error=error,
            )
            raise RequestError(500, "the router failed to route this request") from error
        finally:
            self.metrics.picked(time.perf_counter() - started_s, decision)
        if traces is not None:
            traces.routed(request, steps_ns, decision)
        return decision


@dataclass(frozen=True, slots=True)
class RequestRecorder:
    """Observer that records request lifecycles in the decision log and the metrics."""

    decision_log: DecisionLog
    metrics: RouterMetrics

    def decided(self, decision: Decision) -> None:
        """Record a decision; called before any report on its request."""
        self.decision_log.decided(decision)

    def prefill_ended(self, dispatch: Dispatch, source: str, now_s: float) -> None:
        """Record the reported or presumed end of a prefill."""
        self.metrics.observe("prefill_ends", now_s - dispatch.dispatched_s, source)
        self.decision_log.prefill_ended(dispatch, source, now_s)

    def ended(
        self,
        request_id: str,
        source: str,
        now_s: float,
        *,
        failed: bool,
        late_s: float | None = None,
        cached_tokens: int | None = None,
        dispatch: Dispatch | None = None,
        pod: str | None = None,
    ) -> None:
        """Record the end of a request, and its cached tokens beside the predicted ones.

        Args:
            late_s: Seconds since the end, if the source reports them.
            cached_tokens: Prompt tokens that the engine served from its cache, if reported.
            dispatch: The request in flight; None if an earlier report has ended it.
            pod: Pod that the source names, if any.
        """
        if dispatch is not None:
            self.metrics.ended(source, failed=failed, late_s=late_s)
        predicted = self.decision_log.ended(
            request_id, source, now_s, failed=failed, cached_tokens=cached_tokens, dispatch=dispatch, pod=pod
        )
        if predicted is not None and cached_tokens is not None:
            self.metrics.count("compared", number=predicted)
            self.metrics.count("delivered", number=cached_tokens)

    def reported_late(self, event: str, source: str, late_s: float) -> None:
        """Record the seconds between the first report of an event and this source's."""
        self.metrics.observe("late", late_s, event, source)
