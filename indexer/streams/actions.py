"""What a stream's state machine tells and wants done, and the live batches that it lets wait."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

import msgspec
from xxhash import xxh3_128_digest


class Batch(msgspec.Struct, frozen=True):
    """A published batch, not yet decoded."""

    sequence: int
    payload: bytes


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

    peers: bool = True  # whether others may be asked, too, if the engine has none


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


class WaitingBatches:
    """The live batches of one stream that were not applied yet."""

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self.size_bytes = 0
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._batches: deque[tuple[int, bytes]] = deque()
        self._dropped_to = -1

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def first(self) -> tuple[int, bytes | None]:
        """The next one; without a payload where only its number is known, behind those that were dropped."""
        return self._batches[0] if self._batches else (self._dropped_to + 1, None)

    def hold(self, sequence: int, payload: bytes) -> None:
        """Lets one wait; beyond the bounds it is dropped with all others."""
        self._batches.append((sequence, payload))
        self.size_bytes += len(payload)
        if len(self._batches) > self._max_batches or self.size_bytes > self._max_bytes:
            self._drop()
            self._dropped_to = sequence

    def pop(self) -> None:
        self.size_bytes -= len(self._batches.popleft()[1])

    def has(self, sequence: int, digest: bytes) -> bool:
        """Whether a batch of this number and XXH3-128 waits."""
        return any(
            number == sequence and xxh3_128_digest(payload) == digest for number, payload in self._batches
        )

    def forget(self) -> None:
        """Drops all, without a gap: they are of a life that is over, or come again."""
        self._drop()
        self._dropped_to = -1

    def _drop(self) -> None:
        self._batches.clear()
        self.size_bytes = 0
