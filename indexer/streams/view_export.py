"""Export of one stream's view: as a list of parts to a peer, and as a list with later changes to the relay.

A view is listed one part per turn of the subscriber's thread, so that no other stream waits and the index's
lock is held for one part at a time. Live batches of the stream wait meanwhile, so that the list and its
sequence number belong together. While this router holds an engine's lease on the relay's server, a `Feed`
records the view's changes: an epoch begins with a list of the view, each entry holds the changes of the
batches since the entry before, and the epoch ends as soon as the view is not EXACT.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import msgspec

from indexer.errors import PeerError
from indexer.index.contract import StreamState
from indexer.streams.actions import Batch
from indexer.streams.state_machine import StreamMachine
from indexer.views.view_parts import Entry, ViewFacts, ViewPart, ViewSnapshot

if TYPE_CHECKING:
    from indexer.views.applier import EventApplier

_log = logging.getLogger(__name__)

# Pause between two parts, for readers that wait for the index's lock and threads that wait for the GIL.
_TURN_S = 0.0005
# Bounds of the live batches that wait during an export; beyond them the export is aborted.
_HELD_BATCHES_MAX = 2048
_HELD_BYTES_MAX = 8 << 20
# Bytes of unwritten entries of all engines; an epoch that would exceed them ends.
_WAITING_BYTES_MAX = 64 << 20

# Number of an epoch's first entry, which has no changes.
FIRST = 1


class ViewExports:
    """At most one export of a view at a time, and the live batches that wait for its end."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes  # size above which a view is not exported
        self._future: Future[ViewSnapshot] | None = None
        self._turns: Iterator[ViewSnapshot | None] = iter(())
        self._turn_s = math.inf
        self.held: deque[Batch] = deque()
        self._held_bytes = 0

    @property
    def running(self) -> bool:
        return self._future is not None

    @property
    def holds(self) -> bool:
        """Return whether live batches must wait: an export runs, or earlier batches still wait."""
        return self.running or bool(self.held)

    @property
    def due_s(self) -> float:
        """Return when `turn` must be called next, or the waiting batches be applied (-inf: now)."""
        return self._turn_s if self.running else -math.inf if self.held else math.inf

    def begin(
        self,
        future: Future[ViewSnapshot],
        snapshot: ViewSnapshot,
        parts: Iterator[ViewPart | None],
        now_s: float,
    ) -> None:
        """Start an export, whose snapshot with all parts or PeerError the future receives.

        Raises:
            PeerError: Another export runs.
        """
        if self.holds:
            raise PeerError("busy", "the view is being exported for another peer")
        self._future, self._turns, self._turn_s = future, self._list(snapshot, parts), now_s

    def turn(self, now_s: float) -> None:
        future = self._future
        if future is None or now_s < self._turn_s:
            return
        if future.cancelled():
            self.abort("given_up", "the request was cancelled")
            return
        self._turn_s = now_s + _TURN_S
        try:
            snapshot = next(self._turns)
        except Exception:
            _log.exception("view export failed")
            self.abort("internal_error", "see the log of the exporting process")
        else:
            if snapshot is not None:
                self._future = None
                if future.set_running_or_notify_cancel():
                    future.set_result(snapshot)

    def abort(self, reason: str, message: str) -> None:
        """Abort a running export; batches that waited still wait."""
        future, self._future = self._future, None
        if future is not None and future.set_running_or_notify_cancel():
            future.set_exception(PeerError(reason, message))

    def hold(self, batches: Sequence[Batch]) -> bool:
        """Add live batches that must wait; False: too many wait, and all must be applied now."""
        self.held.extend(batches)
        self._held_bytes += sum(len(batch.payload) for batch in batches)
        if len(self.held) <= _HELD_BATCHES_MAX and self._held_bytes <= _HELD_BYTES_MAX:
            return True
        self.abort("busy", "too many events arrived during the export")
        return False

    def take(self, most: int | None = None) -> list[Batch]:
        """Remove and return the oldest waiting batches, at most `most`."""
        number = len(self.held) if most is None else min(most, len(self.held))
        batches = [self.held.popleft() for _ in range(number)]
        self._held_bytes -= sum(len(batch.payload) for batch in batches)
        return batches

    def _list(
        self, snapshot: ViewSnapshot, parts: Iterator[ViewPart | None]
    ) -> Iterator[ViewSnapshot | None]:
        listed: list[ViewPart] = []
        size_bytes = 0
        for part in parts:
            if part is not None:
                listed.append(part)
                size_bytes += sum(column.nbytes for column in part.blocks)
            if size_bytes > self._max_bytes:
                self.abort("too_large", f"the view exceeds {self._max_bytes} bytes")
            yield None
        yield replace(snapshot, parts=listed)


def exportable_batch(machine: StreamMachine) -> tuple[int, bytes]:
    """Return sequence number and digest of the last batch in a view that may be exported.

    Raises:
        PeerError: The view may not be exported.
    """
    last_batch, state = machine.last_batch, machine.state
    if last_batch is not None:
        return last_batch
    if state is StreamState.EXACT:
        raise PeerError("unproven", "no batch was applied that identifies the engine process")
    raise PeerError(state.lower(), f"the view is {state} ({machine.reason})")


class FeedQueue(Protocol):
    """Unwritten entries of all feeds; see `Relay`."""

    lock: threading.Lock
    waiting_bytes: int
    wake: threading.Event


@dataclass(slots=True, eq=False)
class Feed:
    """Change-log entries of one engine in one epoch, recorded by the subscriber, written by the relay."""

    holder: str
    epoch: str
    token: bytes
    relay: FeedQueue
    # Guarded by the relay's lock.
    has_ended: bool = False
    entries: list[bytes] = field(default_factory=list)  # not written yet
    last_number: int = FIRST - 1
    # Used by the subscriber's thread.
    listed_at: int = FIRST - 1  # number of the last entry before the latest export
    _state: EventApplier | None = None
    _facts: ViewFacts | None = None
    # Used by the relay's thread.
    written_s: float = 0.0
    listing: Future[ViewSnapshot] | None = None
    last_view: int = FIRST - 1  # number of the last entry in the latest written snapshot
    view_bytes: int = 0
    bytes_since: int = 0  # size of the entries written since that snapshot

    def list_from(self, state: EventApplier, machine: StreamMachine, last_batch: tuple[int, bytes]) -> None:
        """Start or continue the epoch at the view's present state; `last_batch`: see `exportable_batch`."""
        if self._state is None:
            state.change_log.begin()
            self._state, self._facts = state, state.facts()
            self._append(Entry(*last_batch))
        else:
            self.flush(machine)
        self.listed_at = self.last_number

    def flush(self, machine: StreamMachine) -> None:
        """Record the changes since the last entry; end the epoch if the view is not EXACT."""
        state = self._state
        if state is None:
            return
        if self.has_ended or machine.state is not StreamState.EXACT or state.view.unexportable == "part_runs":
            self.end()
        elif (last_batch := machine.last_batch) is not None:
            changes, facts = state.change_log.take(), state.facts()
            if changes or facts != self._facts:
                self._append(Entry(*last_batch, facts if facts != self._facts else None, changes))
                self._facts = facts

    def end(self) -> None:
        if self._state is not None:
            self._state.change_log.end()
            self._state = None
        self.has_ended = True
        self.relay.wake.set()

    def _append(self, entry: Entry) -> None:
        data, relay = msgspec.msgpack.encode(entry), self.relay
        with relay.lock:
            self.has_ended |= relay.waiting_bytes + len(data) > _WAITING_BYTES_MAX
            if not self.has_ended:
                self.entries.append(data)
                self.last_number += 1
                relay.waiting_bytes += len(data)
        relay.wake.set()
