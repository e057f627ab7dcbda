"""What a stream's state machine wants done, in the order in which it says so."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply this batch to the view; `view` tells news of this view from news of one that was dropped."""

    payload: bytes
    view: int


@dataclass(frozen=True, slots=True)
class Clear:
    """Drop all that the view holds, because of `reason`."""

    reason: str


@dataclass(frozen=True, slots=True)
class Replay:
    """Ask the replay socket for everything from this sequence number on; a replay before is given up."""

    start: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Ask for a snapshot of the engine's cache; a fetch or replay before is given up."""


Action = Apply | Clear | Replay | Fetch
