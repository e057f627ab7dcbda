"""A vLLM gRPC request's body: the framed message in, its prompt out; reads only what routing needs.

Format: vllm.grpc.engine.VllmEngine, GenerateRequest {tokenized = 2, text = 3}, EmbedRequest {tokenized = 2},
TokenizedInput {input_ids = 2}.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from router.errors import RequestError

_TOKENIZED, _TEXT, _INPUT_IDS = 2, 3, 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_VARINT_BYTES_MAX = 10


def grpc_prompt(body: bytes) -> str | list[int]:
    """The prompt's text or token ids.

    Raises:
        RequestError: 400, when the body is no such message.
    """
    if len(body) < 5 or body[0] != 0 or struct.unpack_from(">I", body, 1)[0] != len(body) - 5:
        raise RequestError(400, "invalid or unsupported gRPC payload")
    try:
        fields = dict(_fields(body[5:]))
        if isinstance(text := fields.get(_TEXT), bytes):
            return text.decode("utf-8")
        if isinstance(tokenized := fields.get(_TOKENIZED), bytes):
            return list(_ids(tokenized))
    except (IndexError, ValueError) as error:
        raise RequestError(400, "invalid or unsupported gRPC payload") from error
    raise RequestError(400, "not supported request inputType")


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
