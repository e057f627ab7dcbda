"""gRPC's length-prefixed messages: a stream's bytes in, messages out.

The format is gRPC's own (PROTOCOL-HTTP2.md, Length-Prefixed-Message). Knows nothing of calls.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import Final

import grpc

_PREFIX = struct.Struct(">BI")
_PREFIX_BYTES = 5
# Smaller pieces of a message are gathered.
_PIECE_BYTES = 4096
# Of 0, not compressed, and the message's size.
plain_prefix: Final = _PREFIX.pack
# zlib's marks for what it reads: gzip's header, zlib's own.
_WINDOW_BITS = {"gzip": 31, "deflate": 15}


class MessageError(Exception):
    """What came is no message; `status` is what the call ends with."""

    def __init__(self, status: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.status = status


class MessageReader:
    """One stream's messages; larger ones than `bytes_max` are refused as soon as they say so."""

    __slots__ = ("_bytes_max", "_encoding", "_flag", "_head", "_missing", "_parts")

    def __init__(self, encoding: str, bytes_max: int) -> None:
        self._encoding = encoding
        self._bytes_max = bytes_max
        self._head = b""
        # Of the message that has begun: bytes that have not come yet; None: none has begun.
        self._missing: int | None = None
        self._flag = 0
        self._parts: list[bytes | bytearray] = []

    @property
    def is_within(self) -> bool:
        """Whether a part of a message has come, and the rest has not."""
        return bool(self._head) or self._missing is not None

    def feed(self, data: bytes) -> Iterable[tuple[bytes, int]]:
        """Messages that are complete with these bytes, each with the size it had on its way.

        Raises:
            MessageError: One is too large or cannot be decompressed.
        """
        if self._missing is None and not self._head:
            frame_bytes = len(data)
            # Nearly always one message comes as one frame.
            if frame_bytes >= _PREFIX_BYTES:
                flag, size = _PREFIX.unpack_from(data)
                if not flag and size == frame_bytes - _PREFIX_BYTES and size <= self._bytes_max:
                    return ((data[_PREFIX_BYTES:], frame_bytes),)
            elif not data:
                return ()
        return self._joined(data)

    def _joined(self, data: bytes) -> Iterator[tuple[bytes, int]]:
        """Messages that come in pieces; each is copied once, when all of it is there."""
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
        # Many tiny pieces as objects of their own would take many times their bytes.
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
            raise MessageError(grpc.StatusCode.INTERNAL, "a message's first byte is neither 0 nor 1")
        return flag, size

    def _plain(self, message: bytes) -> bytes:
        window_bits = _WINDOW_BITS.get(self._encoding)
        if window_bits is None:
            raise MessageError(grpc.StatusCode.INTERNAL, "a compressed message without grpc-encoding")
        decompressor = zlib.decompressobj(window_bits)
        try:
            # One more than allowed: at the limit itself zlib would keep the stream's end to itself.
            plain = decompressor.decompress(message, self._bytes_max + 1)
        except zlib.error as error:
            raise MessageError(grpc.StatusCode.INTERNAL, f"no {self._encoding}: {error}") from error
        if len(plain) > self._bytes_max:
            raise self._too_large(len(plain))
        if not decompressor.eof:
            raise MessageError(grpc.StatusCode.INTERNAL, f"{self._encoding} ends too early")
        return plain

    def _too_large(self, size: int) -> MessageError:
        return MessageError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"Received message larger than max ({size} vs. {self._bytes_max})",
        )
