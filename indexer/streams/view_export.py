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
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from indexer.errors import PeerError
from indexer.index.contract import StreamState
from indexer.streams.actions import Batch
from indexer.streams.state_machine import StreamMachine
from indexer.views.view_parts import Entry, ViewContent, ViewFacts, ViewPart, ViewSnapshot

if TYPE_CHECKING:
    from indexer.streams.relay import Relay
    from indexer.views.applier import EventApplier

_log = logging.getLogger(__name__)

# Between two parts, so that readers have the index's lock, and other threads the interpreter.
_TURN_S = 0.0005
# While a view is listed so much may wait of its stream; beyond it the list is given up.
_HELD_BATCHES_MAX = 2048
_HELD_BYTES_MAX = 8 << 20
# Bytes that may wait for the server, of all engines; an epoch of which more comes ends.
_WAITING_BYTES_MAX = 64 << 20

# Number of an epoch's first entry, which changes nothing: no number before it was ever an epoch's.
FIRST = 1


class ViewExports:
    """At most one list of a view at a time, and the live batches that wait for its end."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes  # a view that takes more is not told
        self._told: Future[ViewSnapshot] | None = None
        self._turns: Iterator[ViewSnapshot | None] = iter(())
        self._turn_s = math.inf
        self.held: deque[Batch] = deque()
        self._held_bytes = 0

    @property
    def running(self) -> bool:
        return self._told is not None

    @property
    def holds(self) -> bool:
        """Whether live batches must wait: the view is listed, or others wait since it was."""
        return self.running or bool(self.held)

    @property
    def due_s(self) -> float:
        """When `turn` must be called next, or the batches that waited be taken."""
        return self._turn_s if self.running else -math.inf if self.held else math.inf

    def begin(
        self, told: Future[ViewSnapshot], mark: tuple[int, bytes], content: ViewContent, now_s: float
    ) -> None:
        """Begins to list a view.

        Args:
            told: Gets the snapshot, or a PeerError.
            mark: Number and digest of the last batch in the view.

        Raises:
            PeerError: It is being listed already.
        """
        if self.holds:
            raise PeerError("busy", "the view is being listed for another peer")
        self._told, self._turns, self._turn_s = told, self._list(mark, content), now_s

    def turn(self, now_s: float) -> None:
        told = self._told
        if told is None or now_s < self._turn_s:
            return
        if told.cancelled():
            self.abort("given_up", "nobody waits for it any more")
            return
        self._turn_s = now_s + _TURN_S
        try:
            snapshot = next(self._turns)
        except Exception:
            _log.exception("a view could not be listed for a peer")
            self.abort("internal_error", "see the log")
        else:
            if snapshot is not None:
                self._told = None
                if told.set_running_or_notify_cancel():
                    told.set_result(snapshot)

    def abort(self, reason: str, message: str) -> None:
        """Gives the list up, if one is being made; what waited still waits."""
        told, self._told = self._told, None
        if told is not None and told.set_running_or_notify_cancel():
            told.set_exception(PeerError(reason, message))

    def hold(self, batches: Sequence[Batch]) -> bool:
        """Lets live batches wait; False: too many wait, and all of them must be taken now."""
        self.held.extend(batches)
        self._held_bytes += sum(len(batch.payload) for batch in batches)
        if len(self.held) <= _HELD_BATCHES_MAX and self._held_bytes <= _HELD_BYTES_MAX:
            return True
        self.abort("busy", "the stream says too much for its view to be listed")
        return False

    def take(self, most: int | None = None) -> list[Batch]:
        """The oldest batches that waited; None: all of them."""
        number = len(self.held) if most is None else min(most, len(self.held))
        batches = [self.held.popleft() for _ in range(number)]
        self._held_bytes -= sum(len(batch.payload) for batch in batches)
        return batches

    def _list(self, mark: tuple[int, bytes], content: ViewContent) -> Iterator[ViewSnapshot | None]:
        parts: list[ViewPart] = []
        size_bytes = 0
        for part in content.parts:
            if part is not None:
                parts.append(part)
                size_bytes += sum(column.nbytes for column in part.blocks)
            if size_bytes > self._max_bytes:
                self.abort("too_large", f"the view takes more than {self._max_bytes} bytes")
            yield None
        yield ViewSnapshot(*mark, content.facts, content.evicted_blocks, parts)


def mark_of(machine: StreamMachine) -> tuple[int, bytes]:
    """Number and digest of the last batch in a view that may be told to peers.

    Raises:
        PeerError: It may not.
    """
    mark, state = machine.mark, machine.state
    if mark is not None:
        return mark
    if state is StreamState.EXACT:
        raise PeerError("unproven", "no batch was applied that could show whose view it is")
    raise PeerError(state.lower(), f"its view is {state} ({machine.reason})")


@dataclass(slots=True, eq=False)
class Feed:
    """Entries of one engine in one epoch: the subscriber's thread records them, the relay's writes them."""

    holder: str
    epoch: str
    token: bytes
    relay: Relay
    # Under the relay's lock.
    has_ended: bool = False
    entries: list[bytes] = field(default_factory=list)  # that are not written yet
    last_number: int = FIRST - 1
    # The subscriber's thread's.
    listed_at: int = FIRST - 1  # number of the entry as of which the view was listed last
    _state: EventApplier | None = None
    _facts: ViewFacts | None = None
    # The relay's thread's.
    written_s: float = 0.0
    listing: Future[ViewSnapshot] | None = None
    last_view: int = FIRST - 1  # number of the entry of the view that was written last
    view_bytes: int = 0
    bytes_since: int = 0  # of entries written since that view

    def list_from(self, state: EventApplier, machine: StreamMachine, mark: tuple[int, bytes]) -> None:
        """Begin the epoch with the view as it is, or go on with it; `mark`: see `view_exports.mark_of`."""
        if self._state is None:
            state.journal.begin()
            self._state, self._facts = state, state.view.facts()
            self._tell(Entry(*mark))
        else:
            self.flush(machine)
        self.listed_at = self.last_number

    def flush(self, machine: StreamMachine) -> None:
        """Tell what changed since the last entry, or end the epoch of a view that is not exact."""
        state = self._state
        if state is None:
            return
        if self.has_ended or machine.state is not StreamState.EXACT or state.view.unexportable == "part_runs":
            self.end()
        elif (mark := machine.mark) is not None:
            changes, facts = state.journal.take(), state.view.facts()
            if changes or facts != self._facts:
                self._tell(Entry(*mark, facts if facts != self._facts else None, changes))
                self._facts = facts

    def end(self) -> None:
        if self._state is not None:
            self._state.journal.end()
            self._state = None
        self.has_ended = True
        self.relay.wake.set()

    def _tell(self, entry: Entry) -> None:
        data, relay = msgspec.msgpack.encode(entry), self.relay
        with relay.lock:
            self.has_ended |= relay.waiting_bytes + len(data) > _WAITING_BYTES_MAX
            if not self.has_ended:
                self.entries.append(data)
                self.last_number += 1
                relay.waiting_bytes += len(data)
        relay.wake.set()
