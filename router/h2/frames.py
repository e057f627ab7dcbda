"""HTTP/2 frames (RFC 9113, sections 4 and 6): parts in, bytes out, and received bytes in, whole frames out.

Knows the preface and the frames' size, not what they mean. What breaks the rules raises an H2Error.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES: Final = 9
# The least that a peer must take, and the most that can be said.
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
# Length's upper byte, length, type, flags, stream.
read_head: Final = _HEAD.unpack_from
# DATA's first nine bytes: length << 8 (its type is 0), flags, stream.
data_head: Final = _DATA_HEAD.pack
# Type, flags, stream, payload.
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
    """The connection cannot go on: it is told why, and closed."""

    def __init__(self, code: H2Code, message: str) -> None:
        super().__init__(message)
        self.code = code


class FrameType(IntEnum):
    """Types of frames."""

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
    """Names of settings."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


def head(size: int, kind: int, flags: int, stream_id: int) -> bytes:
    """A frame's first nine bytes, for a payload of `size` bytes."""
    return _HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream_id)


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """A whole frame."""
    return head(len(payload), kind, flags, stream_id) + payload


def headers_frame(stream_id: int, block: bytes, *, ends: bool) -> bytes:
    """HEADERS with a whole block; `ends`: nothing follows it."""
    return head(len(block), _HEADERS, _LAST if ends else END_HEADERS, stream_id) + block


def number_frame(kind: int, stream_id: int, number: int) -> bytes:
    """RST_STREAM with a code, or WINDOW_UPDATE with an increment."""
    return frame(kind, 0, stream_id, number.to_bytes(4, "big"))


def goaway_frame(last_stream_id: int, code: int, message: str) -> bytes:
    """GOAWAY: the last stream that was or will be served, and why."""
    numbers = last_stream_id.to_bytes(4, "big") + code.to_bytes(4, "big")
    return frame(FrameType.GOAWAY, 0, 0, numbers + message.encode("ascii", "replace"))


def settings_frame(settings: dict[Setting, int]) -> bytes:
    """SETTINGS with these values."""
    return frame(FrameType.SETTINGS, 0, 0, b"".join(_SETTING.pack(*pair) for pair in settings.items()))


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """A SETTINGS frame's pairs; its size must be a multiple of six."""
    return list(_SETTING.iter_unpack(payload))


class FrameReader:
    """One connection's bytes."""

    frame_bytes_max: Final = 1 << 16  # larger frames end the connection

    def __init__(self) -> None:
        self._rest = b""
        self._is_begun = self._has_settings = False

    @property
    def is_within(self) -> bool:
        """Whether a part of a frame, or of the preface, has come, and the rest has not."""
        return bool(self._rest) or not self._is_begun

    def feed(self, data: bytes) -> Iterable[Frame]:
        """Return the frames that are complete with these bytes; an H2Error for one too large or no HTTP/2."""
        if not self._rest and self._has_settings and len(data) >= HEAD_BYTES:
            # Nearly always one frame comes by itself.
            upper, lower, kind, flags, stream_id = read_head(data)
            length = upper << 16 | lower
            if length == len(data) - HEAD_BYTES and length <= self.frame_bytes_max:
                return ((kind, flags, stream_id & STREAM_IDS, data[HEAD_BYTES:]),)
        return self._frames(data)

    def _frames(self, data: bytes) -> Iterator[Frame]:
        if self._rest and self._has_settings:
            # Joined to its own frame's bytes alone: all that came with them would be copied for nothing.
            first, at = self._completed(data)
            yield from self._split(first, 0)
            if self._rest:
                return
            yield from self._split(data, at)
            return
        data = self._rest + data
        yield from self._split(data, 0 if self._is_begun else self._preface(data))

    def _completed(self, data: bytes) -> tuple[bytes, int]:
        """Return the frame that has begun, as far as it has come, and how much of `data` belongs to it."""
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
    """Check a frame from which nothing follows here; an H2Error if no client may send it."""
    if kind == FrameType.PUSH_PROMISE:
        raise H2Error(H2Code.PROTOCOL_ERROR, "a client does not push")
    if kind == FrameType.GOAWAY and (stream_id or len(payload) < 8):
        raise H2Error(H2Code.PROTOCOL_ERROR, "GOAWAY without its numbers, or of a stream")
    if kind == FrameType.PRIORITY:
        expect_size(payload, 5, "PRIORITY")
        if not stream_id:
            raise H2Error(H2Code.PROTOCOL_ERROR, "PRIORITY of no stream")


def unpadded(payload: bytes) -> bytes:
    """Return a padded frame's payload without its padding; an H2Error if that is as long as the frame."""
    if not payload or payload[0] >= len(payload):
        raise H2Error(H2Code.PROTOCOL_ERROR, "padding as long as its frame")
    return payload[1 : len(payload) - payload[0]]


def expect_size(payload: bytes, size: int, what: str) -> None:
    """Check a payload that has but one size; an H2Error if it has another."""
    if len(payload) != size:
        raise H2Error(H2Code.FRAME_SIZE_ERROR, f"{what} of {len(payload)} bytes instead of {size}")
