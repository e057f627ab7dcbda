"""ext_proc answers in the form of the reference picker; values in, messages out, no state and no decisions.

Every header that is kept is set again, and what the router owns is not among them; errors are plain text.
"""

from __future__ import annotations

from collections.abc import Mapping

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.type.v3 import http_status_pb2

from router.envoy_headers import DESTINATION_HEADER, system_owned
from router.errors import (
    DROPPED_REASON_HEADER,
    EvictedError,
    NoEndpointError,
    RequestError,
    SaturatedError,
)
from router.ext_proc_messages import set_header

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
        response.headers.set_headers.append(set_header(DROPPED_REASON_HEADER, error.dropped_reason))
    return pb.ProcessingResponse(immediate_response=response)
