"""Envoy's cheapest door: one ext_authz Check with the whole body in, the picked pod's header out.

For an Envoy of our own configuration: with_request_body, no partial bodies. The response never passes here;
its end is told by the access log. What to pick is route()'s.
"""

from __future__ import annotations

import logging
from typing import Any

import grpc
from envoy.service.auth.v3 import attribute_context_pb2
from envoy.service.auth.v3 import external_auth_pb2 as pb

from router.check_messages import body_of, denied_answer, is_partial, ok_answer
from router.envoy_headers import kept_request_id, subset_hint, system_owned
from router.errors import RequestError
from router.gateway_pick import GatewayPick
from router.health import CHECK_SERVICE
from router.metrics import RouterMetrics
from router.plugins.handlers import unset_handler_headers
from router.request import RequestKind, RouteRequest, http_request, too_large

_log = logging.getLogger(__name__)

_DOOR = "check"


class CheckDoor:
    """envoy.service.auth.v3.Authorization.

    Args:
        max_request_bytes: Larger bodies are answered with 413.
    """

    def __init__(self, picks: GatewayPick, metrics: RouterMetrics, max_request_bytes: int = 8 << 20) -> None:
        self._picks = picks
        self._metrics = metrics
        self._max_request_bytes = max_request_bytes
        self._told_partial = False

    def add_to(self, server: grpc.Server) -> None:
        """Registers the service; answers are serialised here, since most are the same."""
        check: Any = grpc.unary_unary_rpc_method_handler(
            self._check, request_deserializer=pb.CheckRequest.FromString
        )
        handler = grpc.method_handlers_generic_handler(CHECK_SERVICE, {"Check": check})
        server.add_generic_rpc_handlers((handler,))

    def _check(self, message: pb.CheckRequest, _context: grpc.ServicerContext) -> bytes:
        """Serves one HTTP request."""
        with self._metrics.inside(_DOOR):
            attributes = message.attributes
            headers = dict(attributes.request.http.headers)
            request_id, is_given = kept_request_id(headers)
            try:
                request = self._request(request_id, headers, attributes)
                destination, decision = self._picks.pick(request)
            except RequestError as error:
                return denied_answer(error)
        removed = system_owned(headers)
        explained = self._picks.explained(decision)
        routing = decision.routing
        if routing is not None:
            removed += unset_handler_headers(headers, routing)
        if is_given and explained is None and routing is None:
            return ok_answer(destination, None, removed)
        return ok_answer.__wrapped__(
            destination, None if is_given else request_id, removed, explained, routing
        )

    def _request(
        self, request_id: str, headers: dict[str, str], attributes: attribute_context_pb2.AttributeContext
    ) -> RouteRequest:
        http = attributes.request.http
        body = body_of(http)
        if len(body) > self._max_request_bytes:
            raise self._picks.refused(too_large(self._max_request_bytes))
        candidates = subset_hint(attributes.metadata_context)
        partial = is_partial(headers, body)
        if partial:
            self._tell_partial()
        if partial or not body:
            size_bytes = max(http.size, len(body))
            return RouteRequest(
                request_id,
                RequestKind.PASSTHROUGH,
                body_bytes=size_bytes,
                candidates=candidates,
                headers=headers,
            )
        try:
            return http_request(request_id, http.path, body, candidates, headers)
        except RequestError as error:
            raise self._picks.refused(error) from error

    def _tell_partial(self) -> None:
        """A request whose body is not all here is picked for by load alone, and never without a word."""
        self._metrics.dropped(_DOOR, "partial_body")
        if not self._told_partial:
            self._told_partial = True
            _log.warning(
                "Envoy hands on partial bodies, whose requests are picked for by load alone: set "
                "with_request_body with allow_partial_message: false in its ext_authz filter"
            )
