"""Envoy ext_proc's protobuf messages read and built; values in, messages out, no state and no decisions.

The forms are those of the endpoint picker protocol v1.0.0 (Gateway API Inference Extension, proposal 004).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.type.v3 import http_status_pb2
from google.protobuf import struct_pb2

from router.envoy_headers import DESTINATION_HEADER, destination_metadata, error_headers
from router.errors import RequestError

BodyMode = processing_mode_pb2.ProcessingMode

SCORES_KEY = "x-gateway-destination-endpoint-scores"
_NAMESPACE = "envoy.lb"

# Envoy accepts at most 64 KiB in one streamed answer.
CHUNK_BYTES_MAX = 62_000


def header_values(message: base_pb2.HeaderMap) -> dict[str, str]:
    """Headers by lower-cased name; the last of several wins, raw values win over plain ones."""
    return {
        header.key.lower(): header.raw_value.decode("utf-8", "replace") if header.raw_value else header.value
        for header in message.headers
    }


def request_headers_answer(
    destination: str,
    headers: Mapping[str, str],
    removed: Sequence[str] = (),
    scores: Mapping[str, float] | None = None,
) -> pb.ProcessingResponse:
    """The routing result on the headers' answer, as header and as metadata.

    Args:
        headers: To set beside the destination.
        removed: Names of the client's headers that no pod is to see.
        scores: To tell in the metadata; None: not to.
    """
    return pb.ProcessingResponse(
        request_headers=pb.HeadersResponse(response=_routed(destination, headers, removed)),
        dynamic_metadata=_routed_metadata(destination, scores),
    )


def content_length_answer(body_bytes: int) -> pb.ProcessingResponse:
    """Further to the routing result on the headers' answer: how long the body will be."""
    mutation = pb.HeaderMutation(set_headers=[set_header("content-length", str(body_bytes))])
    return pb.ProcessingResponse(
        request_headers=pb.HeadersResponse(response=pb.CommonResponse(header_mutation=mutation))
    )


def request_body_answer(
    destination: str,
    headers: Mapping[str, str],
    removed: Sequence[str] = (),
    *,
    body: bytes | None = None,
    scores: Mapping[str, float] | None = None,
) -> pb.ProcessingResponse:
    """The routing result on the body's answer, where the headers had to be answered before the body came.

    Args:
        headers, removed, scores: As above.
        body: Replaces the request's body; None: it stays.
    """
    response = _routed(destination, headers, removed)
    if body is not None:
        response.body_mutation.body = body
    return pb.ProcessingResponse(
        request_body=pb.BodyResponse(response=response),
        dynamic_metadata=_routed_metadata(destination, scores),
    )


def response_headers_answer(headers: Mapping[str, str] = MappingProxyType({})) -> pb.ProcessingResponse:
    """The answer to response headers, with the mark that they passed here."""
    options = [set_header("x-went-into-resp-headers", "true"), *_options(headers)]
    common = pb.CommonResponse(header_mutation=pb.HeaderMutation(set_headers=options))
    return pb.ProcessingResponse(response_headers=pb.HeadersResponse(response=common))


def metadata(values: Mapping[str, Any]) -> struct_pb2.Struct:
    """Dynamic metadata by namespace."""
    struct = struct_pb2.Struct()
    struct.update(values)
    return struct


def set_header(name: str, value: str) -> base_pb2.HeaderValueOption:
    """A header that takes the place of others of its name."""
    return base_pb2.HeaderValueOption(
        header=base_pb2.HeaderValue(key=name, raw_value=value.encode("utf-8", "surrogateescape")),
        append_action=base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def streamed(body: bytes, *, end_of_stream: bool) -> Iterator[pb.BodyResponse]:
    """A body as streamed answers of at most 62,000 bytes; an empty one is one answer too."""
    for start in range(0, max(1, len(body)), CHUNK_BYTES_MAX):
        last = start + CHUNK_BYTES_MAX >= len(body)
        chunk = pb.StreamedBodyResponse(
            body=body[start : start + CHUNK_BYTES_MAX], end_of_stream=end_of_stream and last
        )
        yield pb.BodyResponse(
            response=pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=chunk))
        )


def immediate_answer(error: RequestError) -> pb.ProcessingResponse:
    """The router's own answer to the client."""
    headers = [set_header(name, value) for name, value in error_headers(error).items()]
    return pb.ProcessingResponse(
        immediate_response=pb.ImmediateResponse(
            status=http_status_pb2.HttpStatus(code=error.status),
            headers=pb.HeaderMutation(set_headers=headers),
            body=error.body(),
            details="kvroute",
        )
    )


def _routed(destination: str, headers: Mapping[str, str], removed: Sequence[str]) -> pb.CommonResponse:
    options = [set_header(DESTINATION_HEADER, destination), *_options(headers)]
    mutation = pb.HeaderMutation(set_headers=options, remove_headers=removed)
    return pb.CommonResponse(header_mutation=mutation, clear_route_cache=True)


def _routed_metadata(destination: str, scores: Mapping[str, float] | None) -> struct_pb2.Struct:
    if scores is None:
        return destination_metadata(destination)
    return metadata({_NAMESPACE: {DESTINATION_HEADER: destination, SCORES_KEY: dict(scores)}})


def _options(headers: Mapping[str, str]) -> list[base_pb2.HeaderValueOption]:
    return [set_header(name, value) for name, value in headers.items()]
