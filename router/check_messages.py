"""Envoy ext_authz's protobuf messages read and built; values in, serialised answers out, no decisions."""

from __future__ import annotations

from functools import lru_cache

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.service.auth.v3 import attribute_context_pb2, external_auth_pb2
from envoy.type.v3 import http_status_pb2

from router.envoy_headers import DESTINATION_HEADER, REQUEST_ID_HEADER, destination_metadata, error_headers
from router.errors import RequestError
from router.routing import Routing

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
}


def body_of(http: attribute_context_pb2.AttributeContext.HttpRequest) -> bytes:
    """The request's body, whether or not it was packed as bytes."""
    raw: bytes = http.raw_body
    return raw or http.body.encode()


@lru_cache(maxsize=4096)
def ok_answer(
    destination: str,
    made_request_id: str | None,
    removed: tuple[str, ...],
    routing: Routing | None = None,
) -> bytes:
    """The routing result, as header and as metadata; the same for most requests to one pod.

    Args:
        routing: Has further headers for request and response; None: there are none.
    """
    headers = [_set(DESTINATION_HEADER, destination)]
    if made_request_id is not None:
        headers.append(_set(REQUEST_ID_HEADER, made_request_id))
    response_headers = []
    if routing is not None:
        headers += [_set(name, value) for name, value in routing.request_headers.items()]
        response_headers = [_set(name, value) for name, value in routing.response_headers.items()]
    answer: bytes = external_auth_pb2.CheckResponse(
        status={"code": _code(grpc.StatusCode.OK)},
        ok_response=external_auth_pb2.OkHttpResponse(
            headers=headers,
            headers_to_remove=removed,
            response_headers_to_add=response_headers,
        ),
        dynamic_metadata=destination_metadata(destination),
    ).SerializeToString()
    return answer


def denied_answer(error: RequestError) -> bytes:
    """The router's own answer to the client."""
    answer: bytes = external_auth_pb2.CheckResponse(
        status={"code": _code(_CODES.get(error.status, grpc.StatusCode.PERMISSION_DENIED))},
        denied_response=external_auth_pb2.DeniedHttpResponse(
            status=http_status_pb2.HttpStatus(code=error.status),
            headers=[_set(name, value) for name, value in error_headers(error).items()],
            body=error.body().decode(),
        ),
    ).SerializeToString()
    return answer


def _code(code: grpc.StatusCode) -> int:
    number: int = code.value[0]
    return number


def _set(name: str, value: str) -> base_pb2.HeaderValueOption:
    return base_pb2.HeaderValueOption(
        header=base_pb2.HeaderValue(key=name, value=value),
        append_action=base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )
