"""A stream's state within its connection, and what a connection tells of it. Does nothing by itself."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec


class Stream(msgspec.Struct, eq=False):
    """An open stream.

    Attributes:
        head: What its header block said.
        send_window_bytes: How much the peer takes now; below 0 after it made its windows smaller.
        receive_window_bytes: How much the peer may send now.
        unread_bytes: Received, and not yet taken by the call.
        consumed_bytes: Taken by the call, and not yet given back to the peer's window.
        pending: What waits for the peer's window, in order; None: nothing did yet.
        trailers: The block that ends it, once everything before it is sent.
        is_remote_closed: Whether the peer has sent its last.
        is_closed: Whether both sides are done, or either has reset it.
        is_served: Whether the call has done all it will.
        holds_place: Whether the stream has one of the server's places for calls.
    """

    id: int
    head: Any
    send_window_bytes: int
    receive_window_bytes: int
    unread_bytes: int = 0
    consumed_bytes: int = 0
    pending: deque[memoryview] | None = None
    pending_bytes: int = 0
    trailers: bytes | None = None
    is_remote_closed: bool = False
    is_closed: bool = False
    call: Any = None
    is_served: bool = False
    holds_place: bool = False


@dataclass(slots=True)
class OpenBlock:
    """A header block that is not complete yet."""

    stream_id: int
    is_over: bool
    data: bytes
    parts: int = 0


# Made for every frame: these cost a fifth of frozen dataclasses.
class Opened(msgspec.Struct, frozen=True):
    """A new stream; `is_over` as in `Received`."""

    stream: Stream
    is_over: bool


class Received(msgspec.Struct, frozen=True):
    """More of a stream's bytes; `is_over`: the last of them."""

    stream: Stream
    data: bytes
    is_over: bool


class Reset(msgspec.Struct, frozen=True):
    """The peer gave a stream up."""

    stream: Stream


class Drained(msgspec.Struct, frozen=True):
    """What waited for the peer's window is sent."""

    stream: Stream


Event = Opened | Received | Reset | Drained
