"""Actions that a stream's state machine requests, and the buffer of its live batches."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

import msgspec
from xxhash import xxh3_128_digest


class Batch(msgspec.Struct, frozen=True):
    """Published batch, not decoded yet."""

    sequence: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply this batch to the view; `view` is the view's number, so that late results can be discarded."""

    payload: bytes
    view: int


@dataclass(frozen=True, slots=True)
class Clear:
    """Clear the view, because of `reason`."""

    reason: str


@dataclass(frozen=True, slots=True)
class Replay:
    """Request a replay from sequence number `start` on; a running replay is cancelled."""

    start: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Request a snapshot of the engine's cache; a running fetch or replay is cancelled."""

    peers: bool = True  # whether peers may be asked if the engine has none


Action = Apply | Clear | Replay | Fetch


class Purpose(StrEnum):
    """Reason of a running replay or fetch."""

    SNAPSHOT = "snapshot"
    # Snapshot that replaces a STALE view; the view is used until the snapshot arrives.
    REPAIR = "repair"
    HISTORY = "history"
    # Replay from the beginning for a STALE view; the view is used until the first answer arrives.
    RETRY = "retry"
    GAP = "gap"
    IDENTITY = "identity"
    # Identity check of a quiet stream, which may have lost its last batches without showing a gap.
    TAIL = "tail"


CHECKS = (Purpose.IDENTITY, Purpose.TAIL)
FETCHES = (Purpose.SNAPSHOT, Purpose.REPAIR)
# Purposes that run in the background: they do not change the stream's state.
BACKGROUND = (None, Purpose.TAIL, Purpose.REPAIR, Purpose.RETRY)


class ReorderBuffer:
    """Live batches of one stream that wait for missing ones, in order of arrival."""

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
        """Number and payload of the next batch; after a drop only the number, behind the dropped ones."""
        return self._batches[0] if self._batches else (self._dropped_to + 1, None)

    def hold(self, sequence: int, payload: bytes) -> None:
        """Append a batch; beyond the bounds drop it with all others."""
        self._batches.append((sequence, payload))
        self.size_bytes += len(payload)
        if len(self._batches) > self._max_batches or self.size_bytes > self._max_bytes:
            self._drop()
            self._dropped_to = sequence

    def pop(self) -> None:
        self.size_bytes -= len(self._batches.popleft()[1])

    def has(self, sequence: int, digest: bytes) -> bool:
        """Return whether a batch of this number and XXH3-128 digest waits."""
        return any(
            number == sequence and xxh3_128_digest(payload) == digest for number, payload in self._batches
        )

    def forget(self) -> None:
        """Drop all batches without a gap: they are of an earlier process, or will be received again."""
        self._drop()
        self._dropped_to = -1

    def _drop(self) -> None:
        self._batches.clear()
        self.size_bytes = 0
