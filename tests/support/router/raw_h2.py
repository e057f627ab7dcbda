"""An HTTP/2 client that sends what it is told to, frame by frame, right or wrong."""

from __future__ import annotations

import fcntl
import socket
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import hpack

from router.h2 import frames
from router.h2.frames import FrameType
from router.h2.messages import plain_prefix
from tests.support.router.doors import TIMEOUT_S
from tests.support.router.h2 import path

REQUEST = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", path("unary")),
    (":authority", "test"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
)


def request_block(method: str = "unary", *more: tuple[str, str]) -> bytes:
    """A call's header block, which needs no table and leaves none."""
    fields = [(name, path(method) if name == ":path" else value) for name, value in (*REQUEST, *more)]
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    return bytes(encoder.encode(fields, huffman=False))


@dataclass
class Frame:
    """A frame that the server sent."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes


class RawClient:
    """One connection, frame by frame.

    Attributes:
        settings: Sent behind the preface.
    """

    def __init__(self, port: int, settings: dict[Any, int] | None = None, *, greets: bool = True) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        self._rest = b""
        self._decoder = hpack.Decoder()
        if greets:
            self.send(frames.PREFACE + frames.settings_frame(settings or {}))

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Sends bytes as they are."""
        self.socket.sendall(data)

    def send_until_closed(self, pieces: Iterator[bytes]) -> None:
        """Sends until the server has had enough."""
        try:
            for piece in pieces:
                self.socket.sendall(piece)
        except OSError:
            return

    def open(self, stream_id: int, method: str = "unary", *, ends: bool = False) -> None:
        """Begins a call."""
        self.send(open_frame(stream_id, method, ends=ends))

    def say(self, stream_id: int, message: bytes, *, ends: bool = True) -> None:
        """Sends a message in one frame."""
        self.send(data_frame(stream_id, prefixed(message), ends=ends))

    def frame(self) -> Frame | None:
        """The next frame; None: the connection has ended."""
        while len(self._rest) < frames.HEAD_BYTES or len(self._rest) < self._size():
            try:
                data = self.socket.recv(1 << 18)
            except ConnectionError:
                return None
            if not data:
                return None
            self._rest += data
        size = self._size()
        _, _, kind, flags, stream_id = frames.read_head(self._rest, 0)
        payload, self._rest = self._rest[frames.HEAD_BYTES : size], self._rest[size:]
        return Frame(kind, flags, stream_id, payload)

    def is_full(self) -> bool:
        """Whether data waits to be read, and for a tenth of a second no more came: the server cannot send."""
        before, now = b"", b""
        for at in range(20):
            now = fcntl.ioctl(self.socket, termios.FIONREAD, bytes(4))
            if (at and now != before) or not any(now):
                return False
            before = now
            time.sleep(0.005)
        return True

    def next(self, kind: int, stream_id: int | None = None) -> Frame:
        """The next frame of this type, and of this stream; those before it are dropped."""
        while (got := self.frame()) is not None:
            if got.kind == kind and stream_id in (None, got.stream_id):
                return got
        raise AssertionError(f"the connection has ended without a frame of type {kind}")

    def fields(self, frame: Frame) -> dict[str, str]:
        """What a HEADERS frame says."""
        return {str(name): str(value) for name, value in self._decoder.decode(frame.payload)}

    def answer(self, stream_id: int) -> tuple[bytes, dict[str, str]]:
        """A call's bytes and its trailers."""
        data = b""
        while (got := self.frame()) is not None:
            if got.stream_id != stream_id:
                continue
            if got.kind == FrameType.DATA:
                data += got.payload
            elif got.kind == FrameType.HEADERS:
                fields = self.fields(got)
                if got.flags & frames.END_STREAM:
                    return data, fields
            elif got.kind == FrameType.RST_STREAM:
                raise AssertionError(f"reset: {got.payload.hex()}")
        raise AssertionError("the connection has ended without the answer")

    def end(self) -> tuple[int | None, list[Frame]]:
        """Reads to the connection's end: GOAWAY's code, if one came, and all frames."""
        seen = []
        while (got := self.frame()) is not None:
            seen.append(got)
        codes = [int.from_bytes(one.payload[4:8], "big") for one in seen if one.kind == FrameType.GOAWAY]
        return (codes[-1] if codes else None), seen

    def _size(self) -> int:
        upper, lower, *_ = frames.read_head(self._rest, 0)
        return int(upper << 16 | lower) + frames.HEAD_BYTES


def open_frame(stream_id: int, method: str = "unary", *, ends: bool = False) -> bytes:
    """HEADERS that begin a call."""
    flags = frames.END_HEADERS | (frames.END_STREAM if ends else 0)
    return frames.frame(FrameType.HEADERS, flags, stream_id, request_block(method))


def data_frame(stream_id: int, data: bytes, *, ends: bool = False) -> bytes:
    """DATA."""
    return frames.frame(FrameType.DATA, frames.END_STREAM if ends else 0, stream_id, data)


def prefixed(message: bytes) -> bytes:
    """A message as it is sent."""
    return plain_prefix(0, len(message)) + message
