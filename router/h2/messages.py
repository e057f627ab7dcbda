"""Decoder of gRPC's length-prefixed messages (PROTOCOL-HTTP2.md, Length-Prefixed-Message)."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import Final

import grpc

_PREFIX = struct.Struct(">BI")
_PREFIX_BYTES = 5
# Smaller pieces of a message are appended to one buffer.
_PIECE_BYTES = 4096
# Prefix from (0 = not compressed, message size in bytes).
plain_prefix: Final = _PREFIX.pack
# wbits of zlib.decompressobj for a gzip and a zlib header.
_WINDOW_BITS = {"gzip": 31, "deflate": 15}


class MessageError(Exception):
    """Invalid message; the call ends with `status`."""

    def __init__(self, status: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.status = status


class MessageReader:
    """Splits one stream's bytes into messages.

    Args:
        encoding: Compression by `grpc-encoding`.
        bytes_max: Limit of a message's size; larger ones are rejected when their prefix arrives.
    """

    __slots__ = ("_bytes_max", "_encoding", "_flag", "_head", "_missing", "_parts")

    def __init__(self, encoding: str, bytes_max: int) -> None:
        self._encoding = encoding
        self._bytes_max = bytes_max
        self._head = b""
        # Missing bytes of the partly received message; None between messages.
        self._missing: int | None = None
        self._flag = 0
        self._parts: list[bytes | bytearray] = []

    @property
    def has_partial_data(self) -> bool:
        """Return whether a message has been received only in part."""
        return bool(self._head) or self._missing is not None

    def feed(self, data: bytes) -> Iterable[tuple[bytes, int]]:
        """Return the messages that `data` completes, each with its size on the wire in bytes.

        Raises:
            MessageError: A message is too large or cannot be decompressed.
        """
        if self._missing is None and not self._head:
            frame_bytes = len(data)
            # Fast path: nearly always one frame is exactly one message.
            if frame_bytes >= _PREFIX_BYTES:
                flag, size = _PREFIX.unpack_from(data)
                if not flag and size == frame_bytes - _PREFIX_BYTES and size <= self._bytes_max:
                    return ((data[_PREFIX_BYTES:], frame_bytes),)
            elif not data:
                return ()
        return self._joined(data)

    def _joined(self, data: bytes) -> Iterator[tuple[bytes, int]]:
        """Yield messages that arrive in pieces; each is copied once, when complete."""
        data, self._head, at = self._head + data, b"", 0
        while True:
            if self._missing is None:
                if len(data) - at < _PREFIX_BYTES:
                    self._head = data[at:]
                    return
                self._flag, self._missing = self._prefix(data, at)
                at += _PREFIX_BYTES
            piece = data[at : at + self._missing]
            at += len(piece)
            self._missing -= len(piece)
            self._keep(piece)
            if self._missing:
                return
            message, self._parts, self._missing = b"".join(self._parts), [], None
            yield self._plain(message) if self._flag else message, len(message) + _PREFIX_BYTES

    def _keep(self, piece: bytes) -> None:
        # Separate objects for many small pieces would take many times their size.
        parts = self._parts
        if len(piece) >= _PIECE_BYTES:
            parts.append(piece)
        elif parts and isinstance(parts[-1], bytearray):
            parts[-1] += piece
        else:
            parts.append(bytearray(piece))

    def _prefix(self, data: bytes, at: int) -> tuple[int, int]:
        flag, size = _PREFIX.unpack_from(data, at)
        if size > self._bytes_max:
            raise self._too_large(size)
        if flag > 1:
            raise MessageError(grpc.StatusCode.INTERNAL, "a message's compressed flag is neither 0 nor 1")
        return flag, size

    def _plain(self, message: bytes) -> bytes:
        window_bits = _WINDOW_BITS.get(self._encoding)
        if window_bits is None:
            raise MessageError(grpc.StatusCode.INTERNAL, "a compressed message without grpc-encoding")
        decompressor = zlib.decompressobj(window_bits)
        try:
            # One byte above the limit: with the exact limit zlib may not report the end of the stream.
            plain = decompressor.decompress(message, self._bytes_max + 1)
        except zlib.error as error:
            raise MessageError(grpc.StatusCode.INTERNAL, f"invalid {self._encoding} data: {error}") from error
        if len(plain) > self._bytes_max:
            raise self._too_large(len(plain))
        if not decompressor.eof:
            raise MessageError(grpc.StatusCode.INTERNAL, f"truncated {self._encoding} data")
        return plain

    def _too_large(self, size: int) -> MessageError:
        return MessageError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"Received message larger than max ({size} vs. {self._bytes_max})",
        )
