"""ext_authz in its gRPC form: one Check with the whole body in, the picked pod's header out.

For an Envoy of our own configuration: with_request_body, no partial bodies. The response never passes here;
its end is told by the access log. What to pick is route()'s.
"""

from __future__ import annotations

from typing import Any

import grpc
from envoy.service.auth.v3 import external_auth_pb2 as pb

from router.check_messages import body_of, denied_answer, ok_answer
from router.check_request import CheckRequests
from router.envoy_headers import kept_request_id, subset_hint, system_owned
from router.errors import RequestError
from router.gateway_pick import GatewayPick
from router.h2.methods import SteppedHandler
from router.health import CHECK_SERVICE
from router.metrics import RouterMetrics
from router.steps import Steps

_DOOR = "check"


class CheckDoor:
    """envoy.service.auth.v3.Authorization.

    Args:
        max_request_bytes: Larger bodies are answered with 413.
    """

    def __init__(self, picks: GatewayPick, metrics: RouterMetrics, max_request_bytes: int = 8 << 20) -> None:
        self._picks = picks
        self._metrics = metrics
        self._requests = CheckRequests(_DOOR, picks, metrics, max_request_bytes)

    def add_to(self, server: grpc.Server) -> None:
        """Registers the service; answers are serialised here, since most are the same."""
        check: Any = SteppedHandler(pb.CheckRequest.FromString, self._check)
        handler = grpc.method_handlers_generic_handler(CHECK_SERVICE, {"Check": check})
        server.add_generic_rpc_handlers((handler,))

    def _check(self, message: pb.CheckRequest, context: grpc.ServicerContext) -> Steps[bytes]:
        """Serves one HTTP request."""
        with self._metrics.inside(_DOOR):
            http = message.attributes.request.http
            headers = dict(http.headers)
            request_id, is_given = kept_request_id(headers)
            try:
                candidates = subset_hint(message.attributes.metadata_context)
                request = self._requests.read(
                    request_id, http.method, http.path, body_of(http), headers, candidates, http.size
                )
                decision = yield from self._picks.deciding(request, context.is_active)
            except RequestError as error:
                return denied_answer(error)
        destination = self._picks.destination(decision)
        routing = decision.routing
        removed = system_owned(headers, () if routing is None else routing.request_headers)
        if is_given and routing is None:
            return ok_answer(destination, None, removed)
        return ok_answer.__wrapped__(destination, None if is_given else request_id, removed, routing)
