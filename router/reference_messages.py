"""ext_proc answers in the form of the reference picker; values in, messages out, no state and no decisions.

Every header that is kept is set again, and what the router owns is not among them; errors are plain text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.type.v3 import http_status_pb2
from google.protobuf import struct_pb2

from router.envoy_headers import DESTINATION_HEADER, destination_metadata, system_owned
from router.errors import (
    DROPPED_REASON_HEADER,
    EvictedError,
    NoEndpointError,
    RequestError,
    SaturatedError,
)

SCORES_KEY = "x-gateway-destination-endpoint-scores"

_NAMESPACE = "envoy.lb"
_CODES = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    412: "PreconditionFailed",
    413: "BadRequest",
    429: "ResourceExhausted",
    500: "Internal",
    503: "ServiceUnavailable",
}
_NO_CANDIDATES = "failed to find endpoint candidates for serving the request"
_SATURATED = "system saturated, sheddable request dropped"
# What is not taken over from a request or a response, beside what envoy_headers calls system-owned.
_OWN = frozenset({DESTINATION_HEADER, "content-length"})


def kept_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Those that are handed on."""
    dropped = _OWN.union(system_owned(headers))
    return {name: value for name, value in headers.items() if name not in dropped}


def error_text(error: RequestError) -> str:
    """An error in the reference's words."""
    message = str(error)
    if isinstance(error, EvictedError):
        return message
    if isinstance(error, NoEndpointError):
        message = _NO_CANDIDATES
    elif isinstance(error, SaturatedError):
        message = _SATURATED
    return f"inference error: {_CODES.get(error.status, 'Unknown')} - {message}"


def immediate_answer(error: RequestError) -> pb.ProcessingResponse:
    """The router's own answer to the client."""
    response = pb.ImmediateResponse(
        status=http_status_pb2.HttpStatus(code=error.status), body=error_text(error).encode()
    )
    if error.dropped_reason is not None:
        response.headers.set_headers.append(_set(DROPPED_REASON_HEADER, error.dropped_reason))
    return pb.ProcessingResponse(immediate_response=response)


def request_headers_answer(
    destination: str,
    headers: Mapping[str, str],
    scores: Mapping[str, float] | None,
    removed: Sequence[str] = (),
) -> pb.ProcessingResponse:
    """The routing result on the headers' answer.

    Args:
        headers: To set beside the destination.
        scores: To tell in the metadata; None: not to.
        removed: Names of the client's headers that no pod is to see.
    """
    return pb.ProcessingResponse(
        request_headers=pb.HeadersResponse(response=_routed(destination, headers, removed)),
        dynamic_metadata=routed_metadata(destination, scores),
    )


def request_body_answer(
    destination: str,
    headers: Mapping[str, str],
    body: bytes | None,
    scores: Mapping[str, float] | None,
    removed: Sequence[str] = (),
) -> pb.ProcessingResponse:
    """The routing result on the answer to a buffered body, with another body if there is one."""
    response = _routed(destination, headers, removed)
    if body is not None:
        response.body_mutation.body = body
    return pb.ProcessingResponse(
        request_body=pb.BodyResponse(response=response), dynamic_metadata=routed_metadata(destination, scores)
    )


def response_headers_answer(headers: Mapping[str, str]) -> pb.ProcessingResponse:
    """The answer to response headers, with the mark that they passed here."""
    options = [_set("x-went-into-resp-headers", "true"), *_options(headers)]
    common = pb.CommonResponse(header_mutation=pb.HeaderMutation(set_headers=options))
    return pb.ProcessingResponse(response_headers=pb.HeadersResponse(response=common))


def routed_metadata(destination: str, scores: Mapping[str, float] | None) -> struct_pb2.Struct:
    """The routing result as dynamic metadata."""
    if scores is None:
        return destination_metadata(destination)
    return metadata({_NAMESPACE: {DESTINATION_HEADER: destination, SCORES_KEY: dict(scores)}})


def metadata(values: Mapping[str, Any]) -> struct_pb2.Struct:
    """Dynamic metadata by namespace."""
    struct = struct_pb2.Struct()
    struct.update(values)
    return struct


def _routed(destination: str, headers: Mapping[str, str], removed: Sequence[str]) -> pb.CommonResponse:
    options = [_set(DESTINATION_HEADER, destination), *_options(headers)]
    mutation = pb.HeaderMutation(set_headers=options, remove_headers=removed)
    return pb.CommonResponse(header_mutation=mutation, clear_route_cache=True)


def _options(headers: Mapping[str, str]) -> list[base_pb2.HeaderValueOption]:
    return [_set(name, value) for name, value in headers.items()]


def _set(name: str, value: str) -> base_pb2.HeaderValueOption:
    return base_pb2.HeaderValueOption(
        header=base_pb2.HeaderValue(key=name, raw_value=value.encode("utf-8", "surrogateescape")),
        append_action=base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )
