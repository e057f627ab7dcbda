"""A gRPC request's body: the framed message in, its prompt or the HTTP body within out.

Reads only what routing needs. Formats: vllm.grpc.engine.VllmEngine, GenerateRequest {tokenized = 2, text = 3,
stream = 5}, EmbedRequest {tokenized = 2}, TokenizedInput {input_ids = 2}; google.cloud.aiplatform's
ChatCompletionsRequest and (Stream)RawPredictRequest {http_body = 2}, google.api.HttpBody {data = 2}.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from router.errors import RequestError

_TOKENIZED, _TEXT, _STREAM, _INPUT_IDS = 2, 3, 5, 2
_HTTP_BODY, _DATA = 2, 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_VARINT_BYTES_MAX = 10
_INVALID = "invalid or unsupported gRPC payload"


def grpc_prompt(body: bytes) -> tuple[str | list[int], bool]:
    """The prompt's text or token ids, and whether the answer shall be streamed.

    Raises:
        RequestError: 400, when the body is no such message.
    """
    message = _message(body)
    try:
        fields = dict(_fields(message))
        streams = bool(fields.get(_STREAM, 0))
        if isinstance(text := fields.get(_TEXT), bytes):
            return text.decode("utf-8"), streams
        if isinstance(tokenized := fields.get(_TOKENIZED), bytes):
            return list(_ids(tokenized)), streams
    except (IndexError, ValueError) as error:
        raise RequestError(400, _INVALID) from error
    raise RequestError(400, "not supported request inputType")


def wrapped_http_body(body: bytes) -> bytes:
    """The data of the HTTP body that a message carries.

    Raises:
        RequestError: 400, when it carries none.
    """
    message = _message(body)
    try:
        carried = dict(_fields(message)).get(_HTTP_BODY)
        data = dict(_fields(carried)).get(_DATA, b"") if isinstance(carried, bytes) else None
    except (IndexError, ValueError) as error:
        raise RequestError(400, _INVALID) from error
    if not isinstance(data, bytes):
        raise RequestError(400, "the request has no HttpBody")
    return data


def _message(body: bytes) -> bytes:
    """Takes the frame off, of one uncompressed message."""
    if len(body) < 5 or body[0] != 0 or struct.unpack_from(">I", body, 1)[0] != len(body) - 5:
        raise RequestError(400, _INVALID)
    return body[5:]


def _ids(message: bytes) -> Iterator[int]:
    """Packed, as proto3 writes numbers, or one by one."""
    for number, value in _fields(message):
        if number == _INPUT_IDS and isinstance(value, bytes):
            at = 0
            while at < len(value):
                token, at = _varint(value, at)
                yield token
        elif number == _INPUT_IDS and isinstance(value, int):
            yield value


def _fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    """(number, value) of every field.

    Raises:
        IndexError, ValueError: It is no protobuf message.
    """
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if at + size > len(message):
            raise ValueError("cut short")
        yield number, message[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(_VARINT_BYTES_MAX):
        byte = data[at + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError("a number has no end")
