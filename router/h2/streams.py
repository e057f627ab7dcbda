"""A stream's state within its connection, and what a connection tells of it. Does nothing by itself."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec


class Stream(msgspec.Struct, eq=False):
    """An open stream."""

    id: int
    head: Any  # what its header block said
    send_window_bytes: int  # how much the peer takes now; below 0 after it made its windows smaller
    receive_window_bytes: int  # how much the peer may send now
    unread_bytes: int = 0  # received, and not yet taken by the call
    consumed_bytes: int = 0  # taken by the call, and not yet given back to the peer's window
    pending: deque[memoryview] | None = None  # what waits for the peer's window; None: nothing did yet
    pending_bytes: int = 0
    trailers: bytes | None = None  # the block that ends it, once everything before it is sent
    is_remote_closed: bool = False  # whether the peer has sent its last
    is_closed: bool = False  # whether both sides are done, or either has reset it
    call: Any = None
    is_served: bool = False  # whether the call has done all it will
    holds_place: bool = False  # whether it has one of the server's places for calls


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
