"""Changes of one engine's view in the index, as values: recorded by one router, applied by others.

They name blocks by keys and names, never by tokens, so that they may lie on a server. Tiers are numbers, see
`Tiers.names`. What is recorded is told the relay while this router holds the engine's lease: an epoch begins
with a list of the view, each entry is what the batches since the last one did, and it ends as soon as the
view is not exact any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from indexer.errors import PayloadError
from indexer.streams.state_machine import StreamMachine, StreamState
from indexer.views.view_parts import ViewFacts, ViewSnapshot

if TYPE_CHECKING:
    from indexer.streams.relay import Relay
    from indexer.views.applier import EventApplier

# A longer entry is neither written nor read.
ENTRY_BYTES_MAX = 32 << 20
_CHANGES_MAX = 1 << 20
# Bytes that may wait for the server, of all engines; an epoch of which more comes ends.
_WAITING_BYTES_MAX = 64 << 20

# Number of an epoch's first entry, which changes nothing: no number before it was ever an epoch's.
FIRST = 1


class Kind(IntEnum):
    """What a change does with one copy of each block."""

    STORED = 0
    COPIED = 1
    REMOVED = 2
    CLEARED = 3


class Change(Struct, frozen=True, array_like=True):
    """One change of what a KV cache group holds."""

    group: int | None  # None for the lead group
    kind: Kind
    tier: int = 0
    names: bytes = b""  # uint64, little-endian: names of blocks, see `flat_names`
    keys: bytes = b""  # uint64, little-endian: their keys, of a store only

    @property
    def name_array(self) -> NDArray[np.uint64]:
        return np.frombuffer(self.names, "<u8").astype(np.uint64)

    @property
    def key_array(self) -> NDArray[np.uint64]:
        return np.frombuffer(self.keys, "<u8").astype(np.uint64)


class Entry(Struct, frozen=True, array_like=True):
    """Changes that some batches of an engine's stream made to a view."""

    sequence: Annotated[int, Meta(ge=0)]  # of the last of these batches
    digest: Annotated[bytes, Meta(min_length=16, max_length=16)]  # XXH3-128 of that batch's payload
    facts: ViewFacts | None = None  # what the events told, where that has changed
    changes: Annotated[Sequence[Change], Meta(max_length=_CHANGES_MAX)] = ()


class Journal:
    """Records the changes of one view while somebody wants them; on the subscriber's thread."""

    def __init__(self) -> None:
        self._changes: list[Change] | None = None

    @property
    def is_on(self) -> bool:
        return self._changes is not None

    def begin(self) -> None:
        self._changes = []

    def end(self) -> None:
        self._changes = None

    def add(
        self,
        group: int | None,
        kind: Kind,
        tier: int = 0,
        names: NDArray[np.uint64] | None = None,
        keys: NDArray[np.uint64] | None = None,
    ) -> None:
        if self._changes is not None:
            self._changes.append(Change(group, kind, tier, _bytes(names), _bytes(keys)))

    def take(self) -> list[Change]:
        taken = self._changes or []
        if taken:
            self._changes = []
        return taken


_DECODER = msgspec.msgpack.Decoder(Entry)


def decode_entry(data: bytes, tiers: int) -> Entry:
    """Read an entry.

    Args:
        data: Its msgpack, from a server to which anybody may write.
        tiers: How many tiers there are.

    Raises:
        PayloadError: It is none, or too long.
    """
    if len(data) > ENTRY_BYTES_MAX:
        raise PayloadError("oversize", f"an entry of {len(data)} bytes, at most {ENTRY_BYTES_MAX}")
    try:
        entry = _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PayloadError("broken_entry", str(error)) from None
    if not all(_is_sound(change, tiers) for change in entry.changes):
        raise PayloadError("broken_entry", "columns of an entry do not belong together")
    return entry


def _is_sound(change: Change, tiers: int) -> bool:
    has_keys = change.kind is Kind.STORED
    return (
        0 <= change.tier < tiers
        and len(change.names) % 8 == 0
        and len(change.keys) == (len(change.names) if has_keys else 0)
        and bool(change.name_array.all())
    )


def _bytes(column: NDArray[np.uint64] | None) -> bytes:
    return b"" if column is None else column.astype("<u8").tobytes()


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
