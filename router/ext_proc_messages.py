"""Envoy ext_proc's protobuf messages read and built; values in, messages out, no state and no decisions.

The forms are those of the endpoint picker protocol v1.0.0 (Gateway API Inference Extension, proposal 004).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.type.v3 import http_status_pb2

from router.envoy_headers import DESTINATION_HEADER, destination_metadata, error_headers, system_owned
from router.errors import RequestError

BodyMode = processing_mode_pb2.ProcessingMode

# Envoy accepts at most 64 KiB in one streamed answer.
CHUNK_BYTES_MAX = 62_000


def header_values(message: base_pb2.HeaderMap) -> dict[str, str]:
    """Headers by lower-cased name; the last of several wins, raw values win over plain ones."""
    return {
        header.key.lower(): header.raw_value.decode("utf-8", "replace") if header.raw_value else header.value
        for header in message.headers
    }


def request_headers_answer(
    destination: str, set_headers: Mapping[str, str], incoming: Collection[str]
) -> pb.ProcessingResponse:
    """The routing result on the headers' answer, as header and as metadata."""
    return pb.ProcessingResponse(
        request_headers=pb.HeadersResponse(response=_routed(destination, set_headers, incoming)),
        dynamic_metadata=destination_metadata(destination),
    )


def content_length_answer(body_bytes: int) -> pb.ProcessingResponse:
    """Further to the routing result on the headers' answer: how long the body will be."""
    mutation = pb.HeaderMutation(set_headers=[_set("content-length", str(body_bytes))])
    return pb.ProcessingResponse(
        request_headers=pb.HeadersResponse(response=pb.CommonResponse(header_mutation=mutation))
    )


def request_body_routed_answer(
    destination: str, set_headers: Mapping[str, str], incoming: Collection[str], body: bytes | None = None
) -> pb.ProcessingResponse:
    """The routing result on the body's answer, where the headers had to be answered before the body came.

    Args:
        body: Replaces the request's body; None: it stays.
    """
    if body is not None:
        set_headers = {**set_headers, "content-length": str(len(body))}
    response = _routed(destination, set_headers, incoming)
    if body is not None:
        response.body_mutation.body = body
    return pb.ProcessingResponse(
        request_body=pb.BodyResponse(response=response), dynamic_metadata=destination_metadata(destination)
    )


def response_headers_answer() -> pb.ProcessingResponse:
    """The answer to response headers, with the reference's mark that they passed here."""
    mutation = pb.HeaderMutation(set_headers=[_set("x-went-into-resp-headers", "true")])
    return pb.ProcessingResponse(
        response_headers=pb.HeadersResponse(response=pb.CommonResponse(header_mutation=mutation))
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
    headers = [_set(name, value) for name, value in error_headers(error).items()]
    return pb.ProcessingResponse(
        immediate_response=pb.ImmediateResponse(
            status=http_status_pb2.HttpStatus(code=error.status),
            headers=pb.HeaderMutation(set_headers=headers),
            body=error.body(),
            details="kvroute",
        )
    )


def _routed(destination: str, set_headers: Mapping[str, str], incoming: Collection[str]) -> pb.CommonResponse:
    mutation = pb.HeaderMutation(
        set_headers=[
            _set(DESTINATION_HEADER, destination),
            *(_set(name, value) for name, value in set_headers.items()),
        ],
        remove_headers=system_owned(incoming),
    )
    return pb.CommonResponse(header_mutation=mutation, clear_route_cache=True)


def _set(name: str, value: str) -> base_pb2.HeaderValueOption:
    return base_pb2.HeaderValueOption(
        header=base_pb2.HeaderValue(key=name, raw_value=value.encode()),
        append_action=base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )
