"""Received bytes in, whole HTTP/2 frames out. Knows the preface and the frames' size, not what they mean."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from router.h2 import frames
from router.h2.errors import H2Code, H2Error
from router.h2.frames import FrameType

# Type, flags, stream, payload.
Frame = tuple[int, int, int, bytes]


class FrameReader:
    """One connection's bytes.

    Attributes:
        frame_bytes_max: Larger frames end the connection.
    """

    frame_bytes_max: Final = 1 << 16

    def __init__(self) -> None:
        self._rest = b""
        self._is_begun = self._has_settings = False

    @property
    def is_within(self) -> bool:
        """Whether a part of a frame, or of the preface, has come, and the rest has not."""
        return bool(self._rest) or not self._is_begun

    def feed(self, data: bytes) -> Iterable[Frame]:
        """Frames that are complete with these bytes; to be read to the end.

        Raises:
            H2Error: A frame is too large, or the connection does not begin as HTTP/2 does.
        """
        if not self._rest and self._has_settings and len(data) >= frames.HEAD_BYTES:
            # Nearly always one frame comes by itself.
            upper, lower, kind, flags, stream_id = frames.read_head(data)
            length = upper << 16 | lower
            if length == len(data) - frames.HEAD_BYTES and length <= self.frame_bytes_max:
                return ((kind, flags, stream_id & frames.STREAM_IDS, data[frames.HEAD_BYTES :]),)
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
        if (lacks := frames.HEAD_BYTES - len(begun)) > 0:
            begun, at = begun + data[:lacks], lacks
        if len(begun) >= frames.HEAD_BYTES:
            upper, lower, *_ = frames.read_head(begun)
            lacks = (upper << 16 | lower) + frames.HEAD_BYTES - len(begun)
            begun, at = begun + data[at : at + lacks], at + lacks
        return begun, at

    def _split(self, data: bytes, at: int) -> Iterator[Frame]:
        size = len(data)
        while self._is_begun and size - at >= frames.HEAD_BYTES:
            upper, lower, kind, flags, stream_id = frames.read_head(data, at)
            length = upper << 16 | lower
            if length > self.frame_bytes_max:
                raise H2Error(H2Code.FRAME_SIZE_ERROR, f"a frame above {self.frame_bytes_max} bytes")
            begin = at + frames.HEAD_BYTES
            if size - begin < length:
                break
            at = begin + length
            if not self._has_settings:
                self._first(kind)
            yield kind, flags, stream_id & frames.STREAM_IDS, data[begin:at]
        self._rest = data[at:]

    def _preface(self, data: bytes) -> int:
        expected = frames.PREFACE
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
    """Checks a frame from which nothing follows here.

    Raises:
        H2Error: It is not as it must be, or none that a client may send.
    """
    if kind == FrameType.PUSH_PROMISE:
        raise H2Error(H2Code.PROTOCOL_ERROR, "a client does not push")
    if kind == FrameType.GOAWAY and (stream_id or len(payload) < 8):
        raise H2Error(H2Code.PROTOCOL_ERROR, "GOAWAY without its numbers, or of a stream")
    if kind == FrameType.PRIORITY:
        expect_size(payload, 5, "PRIORITY")
        if not stream_id:
            raise H2Error(H2Code.PROTOCOL_ERROR, "PRIORITY of no stream")


def unpadded(payload: bytes) -> bytes:
    """A padded frame's payload.

    Raises:
        H2Error: The padding is as long as its frame.
    """
    if not payload or payload[0] >= len(payload):
        raise H2Error(H2Code.PROTOCOL_ERROR, "padding as long as its frame")
    return payload[1 : len(payload) - payload[0]]


def expect_size(payload: bytes, size: int, what: str) -> None:
    """Checks a payload that has but one size.

    Raises:
        H2Error: It has another.
    """
    if len(payload) != size:
        raise H2Error(H2Code.FRAME_SIZE_ERROR, f"{what} of {len(payload)} bytes instead of {size}")
