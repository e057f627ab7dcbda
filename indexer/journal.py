"""Changes of one engine's view in the index, as values: recorded by one router, applied by others.

They name blocks by keys and names, never by tokens, so that they may lie on a server. Tiers are numbers, see
`Tiers.names`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from indexer.errors import PayloadError
from indexer.view_parts import ViewFacts

# A longer entry is neither written nor read.
ENTRY_BYTES_MAX = 32 << 20
_CHANGES_MAX = 1 << 20


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
        kind: What is done.
        tier: The tier's number.
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
        """Whether changes are recorded."""
        return self._changes is not None

    def begin(self) -> None:
        """Record from now on; what was recorded before is forgotten."""
        self._changes = []

    def end(self) -> None:
        """Record nothing any more."""
        self._changes = None

    def add(
        self,
        group: int | None,
        kind: Kind,
        tier: int = 0,
        names: NDArray[np.uint64] | None = None,
        keys: NDArray[np.uint64] | None = None,
    ) -> None:
        """Record a change, if changes are recorded."""
        if self._changes is not None:
            self._changes.append(Change(group, kind, tier, _bytes(names), _bytes(keys)))

    def take(self) -> list[Change]:
        """Return what was recorded since the last call."""
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
