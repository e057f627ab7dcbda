"""Changes of one engine's view in the index, as values: recorded by one router, applied by others.

They name blocks by keys and names, never by tokens, so that they may lie on a server. Tiers are numbers, see
`Tiers.names`. What is recorded is told the relay while this router holds the engine's lease: an epoch begins
with a list of the view, each entry is what the batches since the last one did, and it ends as soon as the
view is not exact any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from indexer.errors import PayloadError
from indexer.stream import StreamMachine, StreamState
from indexer.view_parts import ViewFacts

if TYPE_CHECKING:
    from indexer.ingest import Ingest
    from indexer.relay import Relay

# A longer entry is neither written nor read.
ENTRY_BYTES_MAX = 32 << 20
_CHANGES_MAX = 1 << 20

# Number of an epoch's first entry, which changes nothing: no number before it was ever an epoch's.
FIRST = 1


class Kind(IntEnum):
    """What a change does with one copy of each block."""

    STORED = 0
    COPIED = 1
    REMOVED = 2
    CLEARED = 3


class Change(Struct, frozen=True, array_like=True):
    """One change of what a KV cache group holds.

    Attributes:
        group: The group; None for the lead group.
        names: uint64, little-endian: names of blocks, see `flat_names`.
        keys: uint64, little-endian: their keys, of a store only.
    """

    group: int | None
    kind: Kind
    tier: int = 0
    names: bytes = b""
    keys: bytes = b""

    @property
    def name_array(self) -> NDArray[np.uint64]:
        """The names, in memory of their own."""
        return np.frombuffer(self.names, "<u8").astype(np.uint64)

    @property
    def key_array(self) -> NDArray[np.uint64]:
        """The keys, in memory of their own."""
        return np.frombuffer(self.keys, "<u8").astype(np.uint64)


class Entry(Struct, frozen=True, array_like=True):
    """What some batches of an engine's stream did to a view.

    Attributes:
        sequence: Number of the last of these batches.
        digest: 16 bytes: XXH3-128 of its payload.
        facts: What the events told, where that has changed.
        changes: In order.
    """

    sequence: int
    digest: bytes
    facts: ViewFacts | None = None
    changes: Sequence[Change] = ()


class Journal:
    """Records the changes of one view while somebody wants them; on the subscriber's thread."""

    def __init__(self) -> None:
        self._changes: list[Change] | None = None

    @property
    def is_on(self) -> bool:
        return self._changes is not None

    def begin(self) -> None:
        """Record from now on; what was recorded before is forgotten."""
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


def encode_entry(entry: Entry) -> bytes:
    """Return the entry as it lies on the server."""
    return msgspec.msgpack.encode(entry)


def decode_entry(data: bytes, tiers: int) -> Entry:
    """Read an entry.

    Args:
        data: As `encode_entry` made it; anybody may write to a server.
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
    sound = entry.sequence >= 0 and len(entry.digest) == 16 and len(entry.changes) <= _CHANGES_MAX
    if not sound or not all(_is_sound(change, tiers) for change in entry.changes):
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


class Position(NamedTuple):
    """A place in an epoch: number and XXH3-128 of the entry there."""

    number: int
    digest: bytes


class Feed:
    """Entries of one engine."""

    def __init__(self, holder: str, sink: Ingest, relay: Relay) -> None:
        self._holder = holder
        self._sink = sink
        self._relay = relay
        self._epoch: str | None = None
        self._last = Position(0, b"")
        self._facts: ViewFacts | None = None

    @property
    def epoch(self) -> str | None:
        return self._epoch

    def begin(self, epoch: str, mark: tuple[int, bytes]) -> None:
        """Begin an epoch with the view as it is, or go on with it; tell where in it that is.

        Args:
            mark: Number and digest of the last batch in the view.
        """
        if epoch != self._epoch:
            state = self._sink.state_of(self._holder)
            state.journal.begin()
            self._epoch, self._last, self._facts = epoch, Position(FIRST - 1, b""), state.view.facts()
            self._tell(epoch, Entry(*mark))
        self._relay.leave(self._holder, epoch, self._last)

    def flush(self, machine: StreamMachine) -> None:
        """Tell what changed since the last entry, or end the epoch of a view that is not exact."""
        if self._epoch is None:
            return
        state = self._sink.state_of(self._holder)
        if machine.state is not StreamState.EXACT or state.view.unlisted == "part_runs":
            self.end()
        elif (mark := machine.mark) is not None:
            changes, facts = state.journal.take(), state.view.facts()
            if changes or facts != self._facts:
                self._tell(self._epoch, Entry(*mark, facts if facts != self._facts else None, changes))
                self._facts = facts

    def end(self) -> None:
        if self._epoch is not None:
            self._relay.leave(self._holder, self._epoch, None)
            self._epoch = None
            self._sink.state_of(self._holder).journal.end()

    def _tell(self, epoch: str, entry: Entry) -> None:
        data = encode_entry(entry)
        self._last = Position(self._last.number + 1, xxh3_128_digest(data))
        self._relay.leave(self._holder, epoch, (self._last.number, data))
