"""What the doors share: a request in, the decision out, for Envoy as one header value with the pods to try.

Knows route() and its refusals; knows no messages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import grpc

from indexer.repeated_log import RepeatedLog
from router.body_guard import BodyGuard
from router.decision import Decision
from router.errors import RequestError
from router.metrics import RouterMetrics
from router.request import RouteRequest
from router.route import Router

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}

_log = logging.getLogger(__name__)
_repeated = RepeatedLog(_log)


class GatewayPick:
    """route() for a gateway.

    Attributes:
        guard: Finds body fields that clients must not send; None when made: those of its defaults.
    """

    def __init__(self, router: Router, metrics: RouterMetrics, *, guard: BodyGuard | None = None) -> None:
        self.guard = guard or BodyGuard()
        self._router = router
        self._metrics = metrics

    def decide(self, request: RouteRequest, is_active: Callable[[], bool]) -> Decision:
        """Pick a pod.

        Args:
            is_active: Whether the client still waits.

        Raises:
            RequestError: Counted already; 500 when routing tripped over something.
        """
        try:
            return self._router.route(request, time.monotonic(), is_active)
        except RequestError:
            raise
        except Exception as error:
            _repeated.event(
                "pick_failed",
                "picks",
                "request %s could not be routed",
                request.request_id,
                level=logging.ERROR,
                error=error,
            )
            failure = RequestError(500, "the router failed to route this request")
            self._metrics.refused(failure)
            raise failure from error

    def destination(self, decision: Decision) -> str:
        if decision.routing is not None:
            return ",".join(decision.routing.destinations)
        return decision.primary.pod

    def pass_unseen(self) -> None:
        """Let a request pass whose body goes on before the router could see it.

        Raises:
            RequestError: Counted already; engines have a KV connector.
        """
        try:
            self.guard.unchecked()
        except RequestError as error:
            raise self.refused(error) from error

    def refused(self, error: RequestError) -> RequestError:
        """Counts an error that never got to route()."""
        self._metrics.refused(error)
        return error


def grpc_code(error: RequestError) -> grpc.StatusCode:
    """Return the gRPC status of an error."""
    return _CODES.get(error.status, grpc.StatusCode.INTERNAL)
