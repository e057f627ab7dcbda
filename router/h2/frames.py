"""HTTP/2 frames: a frame's parts in, its bytes out (RFC 9113, sections 4 and 6). Knows no state."""

from __future__ import annotations

import struct
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


def answer_frames(
    stream_id: int, headers: bytes, data: bytes, trailers: bytes
) -> tuple[bytes, bytes, bytes, bytes]:
    """HEADERS, the two parts of DATA, and the HEADERS that end the stream."""
    return (
        headers_frame(stream_id, headers, ends=False),
        _DATA_HEAD.pack(len(data) << 8, 0, stream_id),
        data,
        headers_frame(stream_id, trailers, ends=True),
    )


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
