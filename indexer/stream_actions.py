"""What a stream's state machine tells: its state, what it wants done, in that order, and what for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class StreamState(StrEnum):
    """How far the index's view of one pod can be trusted."""

    EXACT = "EXACT"
    RECOVERING = "RECOVERING"
    STALE = "STALE"


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
    """Ask for a snapshot of the engine's cache; a fetch or replay before is given up.

    Attributes:
        peers: Whether others may be asked, too, if the engine has none.
    """

    peers: bool = True


Action = Apply | Clear | Replay | Fetch


class Purpose(StrEnum):
    """Why a replay or a fetch runs."""

    SNAPSHOT = "snapshot"
    # As SNAPSHOT, for a view that lacks something but is of use until a better one comes.
    HEALING = "healing"
    HISTORY = "history"
    # As HISTORY, for a view that lacks something but is of use: until the first answer comes.
    RETRY = "retry"
    GAP = "gap"
    IDENTITY = "identity"
    # As IDENTITY, though nothing is in doubt: a stream that fell quiet may have lost its last batches
    # unnoticed.
    TAIL = "tail"


CHECKS = (Purpose.IDENTITY, Purpose.TAIL)
FETCHES = (Purpose.SNAPSHOT, Purpose.HEALING)
# While these run the view is as good as if nothing did.
UNSEEN = (None, Purpose.TAIL, Purpose.HEALING, Purpose.RETRY)
