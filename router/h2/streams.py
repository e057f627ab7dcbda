"""State of an HTTP/2 stream, the events that a connection reports, and interfaces of calls and server."""

from __future__ import annotations

import ssl
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec


class Stream(msgspec.Struct, eq=False):
    """HTTP/2 stream with its flow-control windows and queued data."""

    id: int
    head: Any  # decoded request headers
    send_window_bytes: int  # bytes that may be sent now; negative after the peer reduced its window
    receive_window_bytes: int  # bytes that the peer may send now
    unread_bytes: int = 0  # received, but not yet consumed by the call
    consumed_bytes: int = 0  # consumed, but not yet returned to the peer's window
    pending: deque[memoryview] | None = None  # data waiting for the peer's window; None until first needed
    pending_bytes: int = 0
    trailers: bytes | None = None  # block that ends the stream after the pending data
    is_remote_closed: bool = False  # whether the peer has sent END_STREAM
    is_closed: bool = False  # whether both sides have ended the stream, or one has reset it
    call: StreamCall | None = None
    is_served: bool = False  # whether no thread works on the call any more
    holds_slot: bool = False  # whether the stream counts towards the server's limit of calls


@dataclass(slots=True)
class OpenBlock:
    """Header block that is received in part."""

    stream_id: int
    end_stream: bool
    data: bytes
    parts: int = 0


# msgspec structs, because one is created per frame and a frozen dataclass costs five times as much.
class Opened(msgspec.Struct, frozen=True):
    """New stream; `end_stream` as in `Received`."""

    stream: Stream
    end_stream: bool


class Received(msgspec.Struct, frozen=True):
    """Data of a stream; `end_stream` marks the last data."""

    stream: Stream
    data: bytes
    end_stream: bool


class Reset(msgspec.Struct, frozen=True):
    """Stream reset by the peer, or by the connection after a stream error."""

    stream: Stream


class Drained(msgspec.Struct, frozen=True):
    """All pending data of a stream has been sent."""

    stream: Stream


Event = Opened | Received | Reset | Drained


class StreamCall(Protocol):
    """Call on a stream; see `router.h2.calls.Call`."""

    def receive(self, data: bytes, end_stream: bool) -> None: ...
    def drained(self) -> None: ...
    def cancelled(self) -> None: ...


class CallServer(Protocol):
    """Server that connections and calls belong to: its limits, methods and thread pool; see `GrpcServer`."""

    inline: Mapping[str, int]
    receive_bytes_max: int
    send_bytes_max: int
    streams_max: int
    tls: Callable[[], ssl.SSLContext] | None
    plaintext: bool

    def find(self, path: str) -> Callable[[Any, Stream], StreamCall] | None: ...
    def begin_call(self) -> bool: ...
    def end_call(self, stream: Stream) -> None: ...
    def track_exchange(self, stream: Stream) -> None: ...
    def run(self, task: Callable[[], object]) -> None: ...
