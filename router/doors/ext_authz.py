"""Envoy's ext_authz service: one Check call with the whole body in, the picked pod's header out.

Needs Envoy's with_request_body without partial bodies. Envoy does not send responses to ext_authz, so the
access log reports their ends. `Router.route` picks the pod.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.service.auth.v3 import external_auth_pb2 as pb
from envoy.type.v3 import http_status_pb2

from common.repeated_log import RepeatedLog
from router.doors.boundary import (
    DESTINATION_HEADER,
    REQUEST_ID_HEADER,
    BodyGuard,
    TenantSalt,
    accepted_request_id,
    destination_metadata,
    error_headers,
    refusal,
    subset_hint,
    system_owned,
)
from router.doors.health import CHECK_SERVICE
from router.errors import RequestError
from router.observe.metrics import RouterMetrics
from router.observe.requests import ObservedRouter
from router.prompts.parsers import OWN_PARSERS
from router.prompts.request import RouteRequest, too_large, unread_request

_SERVICE = "check"  # in metrics
_PARTIAL_BODY_HEADER = "x-envoy-auth-partial-body"
# Methods whose requests may lack a body.
_BODILESS = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
_log = logging.getLogger(__name__)
_PARTIAL_BODY = (
    "ext_authz partial body: such requests are routed by load alone; set with_request_body with "
    "allow_partial_message: false in Envoy's ext_authz filter"
)


@dataclass(eq=False)
class ExtAuthzService:
    """gRPC service envoy.service.auth.v3.Authorization."""

    router: ObservedRouter
    guard: BodyGuard
    metrics: RouterMetrics
    max_request_bytes: int = 8 << 20  # larger bodies are rejected with 413
    salt: TenantSalt | None = None

    def __post_init__(self) -> None:
        self._inside = self.metrics.inside(_SERVICE)
        self._repeated = RepeatedLog(_log)

    def add_to(self, server: grpc.Server) -> None:
        """Register the service. `_check` serializes its responses itself, so that equal ones are cached."""
        check: Any = grpc.unary_unary_rpc_method_handler(
            self._check, request_deserializer=pb.CheckRequest.FromString
        )
        server.add_registered_method_handlers(CHECK_SERVICE, {"Check": check})

    def _check(self, message: pb.CheckRequest, context: grpc.ServicerContext) -> bytes:
        with self._inside:
            headers = dict(message.attributes.request.http.headers)
            request_id, is_given = accepted_request_id(headers)
            try:
                request = self._request(message, request_id, headers)
                decision = self.router.route(request, time.monotonic(), context.is_active)
            except RequestError as error:
                self.metrics.refused(error)
                return denied_response(error)
        added, pipeline = decision.request_headers, decision.pipeline
        removed = system_owned(headers, added)
        if is_given and pipeline is None:
            return ok_response(decision.destination, removed, tuple(added.items()))
        if not is_given:
            added = {REQUEST_ID_HEADER: request_id, **added}
        response_headers = pipeline.response_headers if pipeline is not None else {}
        return ok_response.__wrapped__(
            decision.destination, removed, tuple(added.items()), tuple(response_headers.items())
        )

    def _request(self, message: pb.CheckRequest, request_id: str, headers: Mapping[str, str]) -> RouteRequest:
        """Parse a Check call into a request; raises RequestError for a body that must not pass."""
        http = message.attributes.request.http
        candidates = subset_hint(message.attributes.metadata_context)
        # Envoy sets raw_body with pack_as_bytes, else body.
        body: bytes = http.raw_body or http.body.encode()
        if len(body) > self.max_request_bytes:
            raise too_large(self.max_request_bytes)
        partial = _is_partial(headers, body)
        if self.salt is not None and (body or http.method not in _BODILESS):
            raise self.salt.refusal("ext_authz")
        if partial:
            self.metrics.count("dropped_messages", _SERVICE, "partial_body")
            self._repeated.event("partial_body", _SERVICE, _PARTIAL_BODY)
        if partial or not body:
            if partial or http.method not in _BODILESS:
                self.guard.unchecked()
            return unread_request(request_id, max(http.size, len(body)), candidates, headers)
        request = OWN_PARSERS.parse(request_id, http.path, body, candidates, headers)[0]
        if (field := self.guard.forbidden(request, body)) is not None:
            raise refusal(field)
        return request


@lru_cache(maxsize=4096)
def ok_response(
    destination: str,
    removed: tuple[str, ...] = (),
    added: tuple[tuple[str, str], ...] = (),
    response_headers: tuple[tuple[str, str], ...] = (),
) -> bytes:
    """Return a serialized response that sets the picked pod; cached, because most to one pod are equal."""
    answer: bytes = pb.CheckResponse(
        status={"code": grpc.StatusCode.OK.value[0]},
        ok_response=pb.OkHttpResponse(
            headers=[_set(name, value) for name, value in ((DESTINATION_HEADER, destination), *added)],
            headers_to_remove=removed,
            response_headers_to_add=[_set(name, value) for name, value in response_headers],
        ),
        dynamic_metadata=destination_metadata(destination),
    ).SerializeToString()
    return answer


def denied_response(error: RequestError) -> bytes:
    """Return a serialized response that rejects the request with `error`."""
    answer: bytes = pb.CheckResponse(
        status={"code": grpc_code(error).value[0]},
        denied_response=pb.DeniedHttpResponse(
            status=http_status_pb2.HttpStatus(code=error.status),
            headers=[_set(name, value) for name, value in error_headers(error).items()],
            body=error.body().decode(),
        ),
    ).SerializeToString()
    return answer


def grpc_code(error: RequestError) -> grpc.StatusCode:
    """Return the gRPC status code of an error, by its HTTP status."""
    return _CODES.get(error.status, grpc.StatusCode.INTERNAL)


def _is_partial(headers: Mapping[str, str], body: bytes) -> bool:
    """Return whether Envoy sent less of the body than the client does."""
    length = headers.get("content-length", "")
    announced = int(length) if length.isdecimal() and len(length) <= 18 else len(body)
    return announced > len(body) or headers.get(_PARTIAL_BODY_HEADER) == "true"


def _set(name: str, value: str) -> base_pb2.HeaderValueOption:
    return base_pb2.HeaderValueOption(
        header=base_pb2.HeaderValue(key=name, value=value),
        append_action=base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )
