"""Envoy ext_proc's protobuf messages read and built; values in, messages out, no state and no decisions.

The forms are those of the endpoint picker protocol v1.0.0 (Gateway API Inference Extension, proposal 004).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.type.v3 import http_status_pb2
from google.protobuf import struct_pb2

from router.errors import DROPPED_REASON_HEADER, RequestError

BodyMode = processing_mode_pb2.ProcessingMode
DESTINATION_HEADER = "x-gateway-destination-endpoint"
REQUEST_ID_HEADER = "x-request-id"

# Envoy accepts at most 64 KiB in one streamed answer.
CHUNK_BYTES_MAX = 62_000

_SUBSET_NAMESPACE, _SUBSET_KEY = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
_DESTINATION_NAMESPACE = "envoy.lb"

# Headers that only gateway and picker may set: a client's are taken off. (The destination is overwritten.)
_SYSTEM_OWNED = frozenset(
    {
        _SUBSET_KEY,
        DROPPED_REASON_HEADER,
        "x-gateway-destination-endpoint-served",
        "x-llm-d-inference-fairness-id",
        "x-gateway-inference-fairness-id",
        "x-llm-d-inference-objective",
        "x-gateway-inference-objective",
        "x-llm-d-model-name-rewrite",
        "x-gateway-model-name-rewrite",
        "x-llm-d-slo-ttft-ms",
        "x-slo-ttft-ms",
        "x-llm-d-slo-tpot-ms",
        "x-slo-tpot-ms",
        "x-llm-d-video-fps",
        "x-llm-d-video-duration-seconds",
        "x-llm-d-video-resolution",
    }
)


def header_values(message: pb.HttpHeaders) -> dict[str, str]:
    """Headers by lower-cased name; the last of several wins, raw values win over plain ones."""
    return {
        header.key.lower(): header.raw_value.decode("utf-8", "replace") if header.raw_value else header.value
        for header in message.headers.headers
    }


def subset_hint(message: pb.ProcessingRequest) -> frozenset[str] | None:
    """The endpoints that the gateway allows, from a message's metadata; None when it says nothing."""
    hint = message.metadata_context.filter_metadata.get(_SUBSET_NAMESPACE)
    if hint is None or _SUBSET_KEY not in hint.fields:
        return None
    value = hint.fields[_SUBSET_KEY]
    texts = [item.string_value for item in value.list_value.values] or [value.string_value]
    return frozenset(part.strip() for text in texts for part in text.split(",") if part.strip())


def request_headers_answer(
    destination: str, set_headers: Mapping[str, str], incoming: Iterable[str]
) -> pb.ProcessingResponse:
    """The routing result on the headers' answer, as header and as metadata."""
    return pb.ProcessingResponse(
        request_headers=pb.HeadersResponse(response=_routed(destination, set_headers, incoming)),
        dynamic_metadata=_destination_metadata(destination),
    )


def request_body_routed_answer(
    destination: str, set_headers: Mapping[str, str], incoming: Iterable[str]
) -> pb.ProcessingResponse:
    """The routing result on the body's answer, where the headers had to be answered before the body came."""
    return pb.ProcessingResponse(
        request_body=pb.BodyResponse(response=_routed(destination, set_headers, incoming)),
        dynamic_metadata=_destination_metadata(destination),
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
    headers = [_set("content-type", "application/json")]
    if error.dropped_reason is not None:
        headers.append(_set(DROPPED_REASON_HEADER, error.dropped_reason))
    return pb.ProcessingResponse(
        immediate_response=pb.ImmediateResponse(
            status=http_status_pb2.HttpStatus(code=error.status),
            headers=pb.HeaderMutation(set_headers=headers),
            body=error.body(),
            details="kvroute",
        )
    )


def _routed(destination: str, set_headers: Mapping[str, str], incoming: Iterable[str]) -> pb.CommonResponse:
    mutation = pb.HeaderMutation(
        set_headers=[
            _set(DESTINATION_HEADER, destination),
            *(_set(name, value) for name, value in set_headers.items()),
        ],
        remove_headers=[name for name in incoming if name in _SYSTEM_OWNED],
    )
    return pb.CommonResponse(header_mutation=mutation, clear_route_cache=True)


def _set(name: str, value: str) -> base_pb2.HeaderValueOption:
    return base_pb2.HeaderValueOption(
        header=base_pb2.HeaderValue(key=name, raw_value=value.encode()),
        append_action=base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )


@lru_cache(maxsize=4096)
def _destination_metadata(destination: str) -> struct_pb2.Struct:
    metadata = struct_pb2.Struct()
    metadata.update({_DESTINATION_NAMESPACE: {DESTINATION_HEADER: destination}})
    return metadata
