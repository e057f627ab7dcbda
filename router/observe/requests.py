"""Metrics, decision log, traces and error log around the routing core, which itself knows none of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from common.repeated_log import RepeatedLog
from router.errors import RequestError
from router.inflight.dispatch import Dispatch
from router.observe.decision_log import Explain
from router.observe.metrics import RouterMetrics
from router.observe.tracing import Traces
from router.picking.decision import Decision
from router.picking.route import Router
from router.prompts.request import RouteRequest

_log = logging.getLogger(__name__)
_repeated = RepeatedLog(_log)


@dataclass(frozen=True, slots=True)
class ObservedRouter:
    """A `Router` whose picks and failures are timed, traced and logged; safe to share between threads."""

    router: Router
    metrics: RouterMetrics
    traces: Traces | None = None

    def route(
        self, request: RouteRequest, now_s: float, is_active: Callable[[], bool] | None = None
    ) -> Decision:
        """Route the request, see `Router.route`.

        Raises:
            RequestError: The request cannot be routed. 500: routing failed, and the log has the traceback.
        """
        started_s = time.perf_counter()
        traces, decision = self.traces, None
        # Unix times in nanoseconds at which the request arrived and each step ended.
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
                "request %s could not be routed",
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
    """Recorder of requests' lifecycles in the decision log and the metrics."""

    decision_log: Explain
    metrics: RouterMetrics

    def decided(self, decision: Decision) -> None:
        """Record a decision before anything can be reported of its request."""
        self.decision_log.decided(decision)

    def prefill_ended(self, dispatch: Dispatch, source: str, now_s: float) -> None:
        """Record that a prefill ended, or is believed to have ended."""
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
        """Record the end of a request, and how its cached tokens compare with the prediction.

        Args:
            late_s: Seconds since the end, if the source reports them.
            cached_tokens: Prompt tokens that the engine served from its cache, if reported.
            dispatch: The request in flight that ended; None if another report ended it before.
            pod: The pod that the source names, if any.
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
        """Record by how many seconds a source reported an event after the first source that did."""
        self.metrics.observe("late", late_s, event, source)
