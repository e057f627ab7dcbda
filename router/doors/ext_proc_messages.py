"""Stateless reading and building of ext_proc's protobuf messages.

Responses follow the endpoint picker protocol v1.0.0 (Gateway API Inference Extension, proposal 004). They are
filled in place: nested keyword arguments would copy a body once for each of the five enclosing messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from router.doors.boundary import DESTINATION_HEADER, destination_metadata

BodyMode = processing_mode_pb2.ProcessingMode

SCORES_KEY = "x-gateway-destination-endpoint-scores"
_NAMESPACE = "envoy.lb"
_OVERWRITE = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
# Envoy accepts at most 64 KiB in one streamed response.
CHUNK_BYTES_MAX = 62_000


def header_values(message: base_pb2.HeaderMap) -> dict[str, str]:
    """Return header values by lower-case name.

    The last of repeated headers wins; `raw_value` takes precedence over `value`.
    """
    return {
        header.key.lower(): header.raw_value.decode("utf-8", "replace") if header.raw_value else header.value
        for header in message.headers
    }


def routing_response(
    phase: Literal["request_headers", "request_body"],
    destination: str,
    headers: Mapping[str, str],
    removed: Sequence[str] = (),
    scores: Mapping[str, float] | None = None,
    body: bytes | None = None,
) -> pb.ProcessingResponse:
    """Return the picked endpoint as a header and as metadata.

    Args:
        phase: Message to respond to: the body in BUFFERED mode, where the headers are answered first.
        destination: Picked endpoint.
        headers: Further headers to set.
        removed: Headers to remove.
        scores: Scores of all candidates by endpoint, for the metadata.
        body: Replaces the request's body; None: unchanged.
    """
    answer = pb.ProcessingResponse()
    response = getattr(answer, phase).response
    response.clear_route_cache = True
    mutation = response.header_mutation
    set_headers(mutation, {DESTINATION_HEADER: destination})
    set_headers(mutation, headers)
    mutation.remove_headers.extend(removed)
    if body is not None:
        response.body_mutation.body = body
    if scores is None:
        answer.dynamic_metadata.CopyFrom(destination_metadata(destination))
    else:
        values = {DESTINATION_HEADER: destination, SCORES_KEY: dict(scores)}
        answer.dynamic_metadata.update({_NAMESPACE: values})
    return answer


def response_headers_reply(headers: Mapping[str, str]) -> pb.ProcessingResponse:
    """Return a reply to response headers that sets `headers` and the reference picker's marker header."""
    answer = pb.ProcessingResponse()
    mutation = answer.response_headers.response.header_mutation
    set_headers(mutation, {"x-went-into-resp-headers": "true"})
    set_headers(mutation, headers)
    return answer


def streamed_body_responses(
    phase: Literal["request_body", "response_body"], body: bytes, *, end_of_stream: bool
) -> Iterator[pb.ProcessingResponse]:
    """Yield a body in streamed responses of at most 62,000 bytes each; an empty body takes one response."""
    for start in range(0, max(1, len(body)), CHUNK_BYTES_MAX):
        end = start + CHUNK_BYTES_MAX
        answer = pb.ProcessingResponse()
        chunk = getattr(answer, phase).response.body_mutation.streamed_response
        chunk.body = body[start:end]
        chunk.end_of_stream = end_of_stream and end >= len(body)
        yield answer


def immediate_response(status: int, headers: Mapping[str, str], body: bytes) -> pb.ProcessingResponse:
    """Return a response that ends the request: Envoy sends it to the client."""
    answer = pb.ProcessingResponse()
    immediate: Any = answer.immediate_response
    immediate.status.code = status
    immediate.body = body
    # Marks the entry in the access log: no pod received the request.
    immediate.details = "kvroute"
    set_headers(immediate.headers, headers)
    return answer


def set_headers(mutation: pb.HeaderMutation, headers: Mapping[str, str]) -> None:
    """Add headers to a mutation, replacing existing values."""
    for name, value in headers.items():
        option = mutation.set_headers.add()
        option.append_action = _OVERWRITE
        option.header.key = name
        option.header.raw_value = value.encode("utf-8", "surrogateescape")
