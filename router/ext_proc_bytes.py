"""ext_proc's most frequent messages as bytes, and a service that sends bytes as they are.

A routing result or an echoed chunk goes in, a serialised ProcessingResponse comes out, in protobuf's encoding
(protobuf.dev/programming-guides/encoding): written here, a chunk is copied once and not once for each of the
five messages around it. Chunks of a response are read here, too, whatever is not of their plain form by
protobuf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import msgspec
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from router.envoy_headers import REQUEST_ID_HEADER
from router.ext_proc_messages import CHUNK_BYTES_MAX, content_length_answer, request_headers_answer
from router.h2 import GrpcServer
from router.h2.methods import ExchangeMethod
from router.health import EXT_PROC_SERVICE
from router.protobuf_bytes import read_varint, tag, varint


class ResponseChunk(msgspec.Struct, frozen=True):
    """A part of a response's body; `body` and `end_of_stream` are HttpBody's.

    Attributes:
        echo: The answer that lets it pass as it is.
    """

    body: bytes
    end_of_stream: bool
    echo: bytes


Message: TypeAlias = pb.ProcessingRequest | ResponseChunk
Answer: TypeAlias = pb.ProcessingResponse | bytes


def _tag(message: str, name: str) -> bytes:
    return tag(pb.DESCRIPTOR.message_types_by_name[message].fields_by_name[name].number)


# HttpBody, what comes, and StreamedBodyResponse, what goes, have the same fields.
_BODY = _tag("StreamedBodyResponse", "body")
_END_OF_STREAM: bytes = pb.StreamedBodyResponse(end_of_stream=True).SerializeToString()
_RESPONSE_CHUNK = _tag("ProcessingRequest", "response_body")
# Envoy says of every message that it has no metadata for it.
_NO_METADATA: bytes = pb.ProcessingRequest(metadata_context={}).SerializeToString()
# Two tags, each with a length.
_FRONT_BYTES = 8
# From the inside out, behind them what is answered.
_AROUND = (
    _tag("BodyMutation", "streamed_response"),
    _tag("CommonResponse", "body_mutation"),
    _tag("BodyResponse", "response"),
)
REQUEST_BODY = (*_AROUND, _tag("ProcessingResponse", "request_body"))
RESPONSE_BODY = (*_AROUND, _tag("ProcessingResponse", "response_body"))


def routed_bytes(
    destination: str, made_request_id: str | None, removed: tuple[str, ...], body_bytes: int
) -> bytes:
    """The routing result on the headers' answer.

    Args:
        removed: Names of the request's headers that no pod is to see.
        body_bytes: Size of the body that follows; 0: nothing is said of it.
    """
    routed = (
        _routed(destination, removed)
        if made_request_id is None
        else _routed.__wrapped__(destination, removed, made_request_id)
    )
    # Two messages in a row are read as one.
    return routed + _content_length(body_bytes) if body_bytes else routed


def read_message(data: bytes) -> Message:
    """Reads what Envoy sends.

    Raises:
        google.protobuf.message.DecodeError: It is no message.
    """
    if data.startswith(_RESPONSE_CHUNK):
        form = _chunk_form(data[:_FRONT_BYTES], len(data))
        if form is not None:
            begin, body_begin, body_end, end, is_last, endings, opening = form
            if data[body_end:] in endings:
                return ResponseChunk(data[body_begin:body_end], is_last, opening + data[begin:end])
    message: pb.ProcessingRequest = pb.ProcessingRequest.FromString(data)
    return message


def streamed_bytes(around: tuple[bytes, ...], body: bytes, *, end_of_stream: bool) -> Iterator[bytes]:
    """A body as answers of at most 62,000 bytes; an empty one is one answer too.

    Args:
        around: REQUEST_BODY or RESPONSE_BODY.
    """
    for start in range(0, max(1, len(body)), CHUNK_BYTES_MAX):
        is_last = start + CHUNK_BYTES_MAX >= len(body)
        chunk = body if is_last and not start else body[start : start + CHUNK_BYTES_MAX]
        behind = _END_OF_STREAM if end_of_stream and is_last else b""
        front = _BODY + varint(len(chunk)) if chunk else b""
        opening = _opening(around, len(front) + len(chunk) + len(behind))
        yield b"".join((opening, front, chunk, behind))


def add_ext_proc(
    door: Any,
    server: GrpcServer,
    cut: Callable[[], object] = bool,
    opened: Callable[[], Callable[[str], object]] | None = None,
) -> None:
    """Registers a door by its exchanges; answers are messages or their bytes.

    Args:
        cut, opened: See ExchangeMethod.
    """
    method = ExchangeMethod(door.exchange, read_message, _serialized, cut, opened)
    server.add_exchange(f"/{EXT_PROC_SERVICE}/Process", method)


class _ChunkForm(NamedTuple):
    """Where the parts of a chunk's message are."""

    begin: int
    body_begin: int
    body_end: int
    end: int
    is_last: bool
    endings: tuple[bytes, bytes]
    opening: bytes


# Chunks of one size have one form; most are of few sizes.
@lru_cache(maxsize=4096)
def _chunk_form(front: bytes, message_bytes: int) -> _ChunkForm | None:
    """The form of a message of this size that begins so; None: it is not plain, or too long for an answer."""
    try:
        size, begin = read_varint(front, len(_RESPONSE_CHUNK))
        body_at = begin + len(_BODY)
        body_bytes, body_begin = read_varint(front, body_at)
    except IndexError:
        return None
    end, body_end = begin + size, body_begin + body_bytes
    if front[begin:body_at] != _BODY or body_bytes > CHUNK_BYTES_MAX or end > message_bytes:
        return None
    is_last = end != body_end
    ending = _END_OF_STREAM if is_last else b""
    if end != body_end + len(ending):
        return None
    opening = _opening(RESPONSE_BODY, size)
    return _ChunkForm(begin, body_begin, body_end, end, is_last, (ending, ending + _NO_METADATA), opening)


def _opening(around: tuple[bytes, ...], size: int) -> bytes:
    """What stands in front of a payload of this size."""
    opening = b""
    for tag_around in around:
        opening = tag_around + varint(size + len(opening)) + opening
    return opening


def _serialized(answer: Answer) -> bytes:
    if isinstance(answer, bytes):
        return answer
    data: bytes = answer.SerializeToString()
    return data


@lru_cache(maxsize=4096)
def _routed(destination: str, removed: tuple[str, ...], made_request_id: str | None = None) -> bytes:
    made = {} if made_request_id is None else {REQUEST_ID_HEADER: made_request_id}
    return _serialized(request_headers_answer(destination, made, removed))


@lru_cache(maxsize=4096)
def _content_length(body_bytes: int) -> bytes:
    return _serialized(content_length_answer(body_bytes))
