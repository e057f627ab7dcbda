"""HTTP/2 frames (RFC 9113, sections 4 and 6): encoding, and splitting received bytes into frames.

The module checks the preface and frame sizes; `connection` interprets the frames. Violations raise H2Error.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES: Final = 9
# Smallest and largest value of SETTINGS_MAX_FRAME_SIZE.
FRAME_BYTES_LEAST, FRAME_BYTES_MOST = 1 << 14, (1 << 24) - 1
WINDOW_BYTES_DEFAULT, WINDOW_BYTES_MOST = (1 << 16) - 1, (1 << 31) - 1
STREAM_IDS: Final = (1 << 31) - 1

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITY: Final = 0x20

_HEAD = struct.Struct(">BHBBI")
_DATA_HEAD = struct.Struct(">IBI")
_SETTING = struct.Struct(">HI")
# Frame header as (upper 8 bits of the length, lower 16 bits, type, flags, stream id).
read_head: Final = _HEAD.unpack_from
# Header of a DATA frame from (length << 8, flags, stream id); the type of DATA is 0.
data_head: Final = _DATA_HEAD.pack
# (type, flags, stream id, payload)
Frame = tuple[int, int, int, bytes]


class H2Code(IntEnum):
    """Error codes of RFC 9113, section 7."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class H2Error(Exception):
    """Connection error: the peer receives GOAWAY with this code, then the connection is closed."""

    def __init__(self, code: H2Code, message: str) -> None:
        super().__init__(message)
        self.code = code


class FrameType(IntEnum):
    """Frame types of RFC 9113, section 6."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


_HEADERS, _LAST = int(FrameType.HEADERS), END_HEADERS | END_STREAM


class Setting(IntEnum):
    """Setting identifiers of RFC 9113, section 6.5.2."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


def head(size: int, kind: int, flags: int, stream_id: int) -> bytes:
    """Return the 9-byte frame header for a payload of `size` bytes."""
    return _HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream_id)


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return a frame: header and payload."""
    return head(len(payload), kind, flags, stream_id) + payload


def headers_frame(stream_id: int, block: bytes, *, ends: bool) -> bytes:
    """Return a HEADERS frame with a complete block; `ends` sets END_STREAM."""
    return head(len(block), _HEADERS, _LAST if ends else END_HEADERS, stream_id) + block


def number_frame(kind: int, stream_id: int, number: int) -> bytes:
    """Return RST_STREAM with an error code, or WINDOW_UPDATE with an increment."""
    return frame(kind, 0, stream_id, number.to_bytes(4, "big"))


def goaway_frame(last_stream_id: int, code: int, message: str) -> bytes:
    """Return GOAWAY with the last stream id that is served, an error code and a debug message."""
    numbers = last_stream_id.to_bytes(4, "big") + code.to_bytes(4, "big")
    return frame(FrameType.GOAWAY, 0, 0, numbers + message.encode("ascii", "replace"))


def settings_frame(settings: dict[Setting, int]) -> bytes:
    """Return a SETTINGS frame."""
    return frame(FrameType.SETTINGS, 0, 0, b"".join(_SETTING.pack(*pair) for pair in settings.items()))


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """Return the (identifier, value) pairs of a SETTINGS payload, whose size must be a multiple of 6."""
    return list(_SETTING.iter_unpack(payload))


class FrameReader:
    """Splits the bytes of one connection into frames."""

    frame_bytes_max: Final = 1 << 16  # larger frames are a connection error

    def __init__(self) -> None:
        self._rest = b""
        self._is_begun = self._has_settings = False

    @property
    def has_partial_data(self) -> bool:
        """Return whether the preface or a frame has been received only in part."""
        return bool(self._rest) or not self._is_begun

    def feed(self, data: bytes) -> Iterable[Frame]:
        """Return the frames that `data` completes.

        Raises:
            H2Error: A frame is too large, or the bytes are not HTTP/2.
        """
        if not self._rest and self._has_settings and len(data) >= HEAD_BYTES:
            # Fast path: nearly always one read brings exactly one frame.
            upper, lower, kind, flags, stream_id = read_head(data)
            length = upper << 16 | lower
            if length == len(data) - HEAD_BYTES and length <= self.frame_bytes_max:
                return ((kind, flags, stream_id & STREAM_IDS, data[HEAD_BYTES:]),)
        return self._frames(data)

    def _frames(self, data: bytes) -> Iterator[Frame]:
        if self._rest and self._has_settings:
            # Complete only the partial frame: concatenating all of `data` would copy it needlessly.
            first, at = self._completed(data)
            yield from self._split(first, 0)
            if self._rest:
                return
            yield from self._split(data, at)
            return
        data = self._rest + data
        yield from self._split(data, 0 if self._is_begun else self._preface(data))

    def _completed(self, data: bytes) -> tuple[bytes, int]:
        """Return the partial frame received so far, and how many bytes of `data` belong to it."""
        begun, at = self._rest, 0
        if (lacks := HEAD_BYTES - len(begun)) > 0:
            begun, at = begun + data[:lacks], lacks
        if len(begun) >= HEAD_BYTES:
            upper, lower, *_ = read_head(begun)
            lacks = (upper << 16 | lower) + HEAD_BYTES - len(begun)
            begun, at = begun + data[at : at + lacks], at + lacks
        return begun, at

    def _split(self, data: bytes, at: int) -> Iterator[Frame]:
        size = len(data)
        while self._is_begun and size - at >= HEAD_BYTES:
            upper, lower, kind, flags, stream_id = read_head(data, at)
            length = upper << 16 | lower
            if length > self.frame_bytes_max:
                raise H2Error(H2Code.FRAME_SIZE_ERROR, f"a frame above {self.frame_bytes_max} bytes")
            begin = at + HEAD_BYTES
            if size - begin < length:
                break
            at = begin + length
            if not self._has_settings:
                self._first(kind)
            yield kind, flags, stream_id & STREAM_IDS, data[begin:at]
        self._rest = data[at:]

    def _preface(self, data: bytes) -> int:
        expected = PREFACE
        if data[: len(expected)] != expected[: len(data)]:
            raise H2Error(H2Code.PROTOCOL_ERROR, "no HTTP/2 connection preface")
        if len(data) < len(expected):
            return 0
        self._is_begun = True
        return len(expected)

    def _first(self, kind: int) -> None:
        if kind != FrameType.SETTINGS:
            raise H2Error(H2Code.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        self._has_settings = True


def check_unused(kind: int, stream_id: int, payload: bytes) -> None:
    """Check a frame that the server ignores.

    Raises:
        H2Error: The frame is malformed, or a client may not send it.
    """
    if kind == FrameType.PUSH_PROMISE:
        raise H2Error(H2Code.PROTOCOL_ERROR, "a client must not send PUSH_PROMISE")
    if kind == FrameType.GOAWAY and (stream_id or len(payload) < 8):
        raise H2Error(H2Code.PROTOCOL_ERROR, "GOAWAY is too short or not on stream 0")
    if kind == FrameType.PRIORITY:
        expect_size(payload, 5, "PRIORITY")
        if not stream_id:
            raise H2Error(H2Code.PROTOCOL_ERROR, "PRIORITY on stream 0")


def unpadded(payload: bytes) -> bytes:
    """Return a padded frame's payload without its padding.

    Raises:
        H2Error: The padding is as long as the frame or longer.
    """
    if not payload or payload[0] >= len(payload):
        raise H2Error(H2Code.PROTOCOL_ERROR, "the padding is not shorter than its frame")
    return payload[1 : len(payload) - payload[0]]


def expect_size(payload: bytes, size: int, what: str) -> None:
    """Raise H2Error unless the payload has the one size that its frame type allows."""
    if len(payload) != size:
        raise H2Error(H2Code.FRAME_SIZE_ERROR, f"{what} of {len(payload)} bytes instead of {size}")
