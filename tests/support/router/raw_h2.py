"""HTTP/2 client that sends any frames, valid or not, and returns the received ones."""

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
from router.h2.calls import plain_prefix
from router.h2.frames import FrameType
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
    """Return a call's header block, which neither uses nor changes the dynamic table."""
    fields = [(name, path(method) if name == ":path" else value) for name, value in (*REQUEST, *more)]
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    return bytes(encoder.encode(fields, huffman=False))


@dataclass
class Frame:
    """Frame sent by the server."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes


class RawClient:
    """Connection to a server.

    Args:
        settings: Settings to send after the preface.
        greets: Whether to send preface and settings.
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
        """Send raw bytes."""
        self.socket.sendall(data)

    def send_until_closed(self, pieces: Iterator[bytes]) -> None:
        """Send pieces until the server closes the connection."""
        try:
            for piece in pieces:
                self.socket.sendall(piece)
        except OSError:
            return

    def open(self, stream_id: int, method: str = "unary", *, ends: bool = False) -> None:
        """Send the HEADERS frame of a call."""
        self.send(open_frame(stream_id, method, ends=ends))

    def say(self, stream_id: int, message: bytes, *, ends: bool = True) -> None:
        """Send a message in one DATA frame."""
        self.send(data_frame(stream_id, prefixed(message), ends=ends))

    def frame(self) -> Frame | None:
        """Return the next frame, or None at the end of the connection."""
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
        """Return whether unread data is waiting and no more arrives within 0.1 s: the server cannot send."""
        before, now = b"", b""
        for at in range(20):
            now = fcntl.ioctl(self.socket, termios.FIONREAD, bytes(4))
            if (at and now != before) or not any(now):
                return False
            before = now
            time.sleep(0.005)
        return True

    def next(self, kind: int, stream_id: int | None = None) -> Frame:
        """Return the next frame of a type and stream; skip the frames before it."""
        while (got := self.frame()) is not None:
            if got.kind == kind and stream_id in (None, got.stream_id):
                return got
        raise AssertionError(f"the connection has ended without a frame of type {kind}")

    def fields(self, frame: Frame) -> dict[str, str]:
        """Return the header fields of a HEADERS frame."""
        return {str(name): str(value) for name, value in self._decoder.decode(frame.payload)}

    def answer(self, stream_id: int) -> tuple[bytes, dict[str, str]]:
        """Return the bytes of a call's response and its trailers."""
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
        """Read to the end of the connection; return the code of GOAWAY, if any, and all frames."""
        seen = []
        while (got := self.frame()) is not None:
            seen.append(got)
        codes = [int.from_bytes(one.payload[4:8], "big") for one in seen if one.kind == FrameType.GOAWAY]
        return (codes[-1] if codes else None), seen

    def _size(self) -> int:
        upper, lower, *_ = frames.read_head(self._rest, 0)
        return int(upper << 16 | lower) + frames.HEAD_BYTES


def open_frame(stream_id: int, method: str = "unary", *, ends: bool = False) -> bytes:
    """Return the HEADERS frame of a call."""
    flags = frames.END_HEADERS | (frames.END_STREAM if ends else 0)
    return frames.frame(FrameType.HEADERS, flags, stream_id, request_block(method))


def data_frame(stream_id: int, data: bytes, *, ends: bool = False) -> bytes:
    """Return a DATA frame."""
    return frames.frame(FrameType.DATA, frames.END_STREAM if ends else 0, stream_id, data)


def prefixed(message: bytes) -> bytes:
    """Return a message with its gRPC prefix."""
    return plain_prefix(0, len(message)) + message
