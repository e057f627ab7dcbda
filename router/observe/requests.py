"""Observability around the routing core: metrics, traces and error log of each pick."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from common.repeated_log import RepeatedLog
from router.errors import RequestError
from router.observe.metrics import RouterMetrics
from router.observe.tracing import Traces
from router.picking.candidates import StatePods
from router.picking.decision import Decision
from router.picking.route import Router
from router.prompts.request import RequestKind, RouteRequest

_log = logging.getLogger(__name__)
_repeated = RepeatedLog(_log)
_STATEFUL = (RequestKind.PASSTHROUGH, RequestKind.RESPONSES)


@dataclass(frozen=True, slots=True)
class ObservedRouter:
    """Router whose picks and failures are timed, traced and logged. Thread-safe."""

    router: Router
    metrics: RouterMetrics
    traces: Traces | None = None
    states: StatePods | None = None  # pods of stored responses, conversations and files
    pool: str = ""  # InferencePool of all requests, where the router has several

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
            request = self._bound(request)
            steps = () if traces is None else (lambda: steps_ns.append(time.time_ns()),)
            decision = self.router.route(request, now_s, is_active, *steps)
        except Exception as error:
            if traces is not None:
                traces.routed(request, steps_ns, error)
            if isinstance(error, RequestError):
                raise
            text = "pick failed: request_id=%s"
            _repeated.event(
                "pick_failed", "picks", text, request.request_id, level=logging.ERROR, error=error
            )
            raise RequestError(500, "the router failed to route this request") from error
        finally:
            self.metrics.picked(time.perf_counter() - started_s, decision)
        if traces is not None:
            traces.routed(request, steps_ns, decision)
        return decision

    def explain(self, request: RouteRequest, now_s: float) -> Decision:
        """Return the decision that `route` would make now, without any trace of it; see `Router.explain`."""
        return self.router.explain(self._bound(request, dry=True), now_s)

    def _bound(self, request: RouteRequest, *, dry: bool = False) -> RouteRequest:
        """Return the request with its pool and the pod of its state."""
        if self.pool:
            request = msgspec.structs.replace(request, pool=self.pool)
        if self.states is not None and request.kind in _STATEFUL:
            request = self.states.bound(request, dry=dry)
        return request
