"""gRPC's length-prefixed messages: a stream's bytes in, messages out, and the other way round.

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
    """One stream's messages.

    Args:
        encoding: How compressed ones are; "identity": none are.
        bytes_max: Larger messages are refused, as soon as they say so.
    """

    __slots__ = ("_buffer", "_bytes_max", "_encoding")

    def __init__(self, encoding: str, bytes_max: int) -> None:
        self._encoding = encoding
        self._bytes_max = bytes_max
        self._buffer = bytearray()

    @property
    def is_within(self) -> bool:
        """Whether a part of a message has come, and the rest has not."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterable[tuple[bytes, int]]:
        """Messages that are complete with these bytes, each with the size it had on its way.

        Raises:
            MessageError: One is too large or cannot be decompressed.
        """
        if not self._buffer:
            frame_bytes = len(data)
            # Nearly always one message comes as one frame.
            if frame_bytes >= _PREFIX_BYTES:
                flag, size = _PREFIX.unpack_from(data)
                if not flag and size == frame_bytes - _PREFIX_BYTES and size <= self._bytes_max:
                    return ((data[_PREFIX_BYTES:], frame_bytes),)
            elif not data:
                return ()
        return self._buffered(data)

    def _buffered(self, data: bytes) -> Iterator[tuple[bytes, int]]:
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) - at >= _PREFIX_BYTES:
            flag, size = self._prefix(buffer, at)
            end = at + _PREFIX_BYTES + size
            if len(buffer) < end:
                break
            message = bytes(buffer[at + _PREFIX_BYTES : end])
            yield self._plain(message) if flag else message, end - at
            at = end
        del buffer[:at]

    def _prefix(self, data: bytes | bytearray, at: int = 0) -> tuple[int, int]:
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


def prefixed(message: bytes) -> bytes:
    """A message as it is sent."""
    return plain_prefix(0, len(message)) + message
