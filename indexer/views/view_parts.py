"""Value types of a pod's view: its exported content, recorded changes, and the outcome of applying events.

Content and changes name blocks by keys and engine hashes, never by tokens: they may leave the process.
Peers continue a view from its exported content; the wire format is in `indexer.peers.messages`. Tiers are
numbers, see `Tiers.names`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from indexer.errors import PayloadError
from indexer.index.layout import HeldBlocks
from indexer.keys import Keys
from indexer.wire.decode import UNKNOWN_EVENT
from indexer.wire.events import MAX_TOKENS
from indexer.wire.tiers import TIERS_MAX

GROUPS_MAX = 32
# Entries above this size are neither written nor read.
ENTRY_BYTES_MAX = 32 << 20
_CHANGES_MAX = 1 << 20
# Skipping a store for these reasons leaves the view valid.
_HARMLESS = frozenset({"unknown_hash"})


class GroupRule(Struct, frozen=True):
    """Properties of one KV cache group, and the blocks of it that an engine needs to resume after a prefix.

    These are the rules of vLLM's cache managers: full attention needs all blocks, a sliding window those that
    cover `window - 1` tokens before the prefix's end, a linear layer the block with the state at the end,
    chunked attention the blocks of the chunk in which the prefix ends.
    """

    group: Annotated[int, Meta(ge=0, le=65_535)]
    usable: bool  # whether it is indexed: its rule is known, and there are at most GROUPS_MAX groups
    leads: bool  # whether it is the lead group, whose holder in the index is the pod itself
    stride: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 1  # index blocks per block of the group
    # Number of its blocks needed before the prefix's end; -1: all.
    last_blocks: Annotated[int, Meta(ge=-1, lt=1 << 31)] = -1
    # Index blocks per chunk, before which no block is needed; 0: not chunked.
    chunk: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    has_state: bool = False  # whether its layers keep a state instead of each token's keys and values

    def __post_init__(self) -> None:
        if self.leads and not self.usable:
            raise ValueError("groups: the lead group must be usable")


class ViewFacts(Struct, frozen=True):
    """State of a view, besides its blocks, that is needed to interpret the pod's later events."""

    run_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None  # per engine block; None before the first
    zero_is_a_hash: bool  # whether the engine stored a block with the hash 0
    reannounces: bool  # whether an episode of full reports is under way, see `full_reports`
    groups: Annotated[tuple[GroupRule, ...], Meta(max_length=GROUPS_MAX)]  # in the order they were learned
    # Evidence of `TierProof`: tiers that stored many blocks, and tiers with a removal.
    tiers_stored: Annotated[tuple[str, ...], Meta(max_length=TIERS_MAX)] = ()
    tiers_proven: Annotated[tuple[str, ...], Meta(max_length=TIERS_MAX)] = ()

    def __post_init__(self) -> None:
        if len({fact.group for fact in self.groups}) < len(self.groups):
            raise ValueError("groups: numbers must be unique")
        if sum(fact.leads for fact in self.groups) > 1:
            raise ValueError("groups: at most one may lead")


@dataclass(frozen=True, slots=True, eq=False)
class ViewPart:
    """Part of the blocks of one KV cache group; None stands for the lead group."""

    group: int | None
    blocks: HeldBlocks


@dataclass(frozen=True, slots=True, eq=False)
class ViewSnapshot:
    """Complete view as of one batch of its stream."""

    sequence: int  # of the last batch applied
    digest: bytes  # 16 bytes: XXH3-128 of that batch's payload
    facts: ViewFacts
    evicted_blocks: int  # evicted by the index so far, of any pod; the view may lack some of them
    parts: Sequence[ViewPart | Entry] = ()  # blocks, then changes since they were listed


class Kind(IntEnum):
    """Effect of a change on one copy of each block."""

    STORED = 0
    COPIED = 1
    REMOVED = 2
    CLEARED = 3


class Change(Struct, frozen=True, array_like=True):
    """Change of the blocks of one KV cache group."""

    group: int | None  # None for the lead group
    kind: Kind
    tier: int = 0
    names: bytes = b""  # uint64, little-endian: names of the blocks, see `engine_hashes`
    keys: bytes = b""  # uint64, little-endian: keys of the blocks, for STORED only


class Entry(Struct, frozen=True, array_like=True):
    """Entry of the change log: changes of a view by some consecutive batches."""

    sequence: Annotated[int, Meta(ge=0)]  # sequence number of the last batch
    digest: Annotated[bytes, Meta(min_length=16, max_length=16)]  # XXH3-128 of that batch's payload
    facts: ViewFacts | None = None  # None: unchanged
    changes: Annotated[Sequence[Change], Meta(max_length=_CHANGES_MAX)] = ()


class ChangeLog:
    """Recorder of the changes of one view, while it is on. Used on the subscriber's thread."""

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


class StoredRun(Struct, frozen=True):
    """Run of blocks that was stored with its tokens."""

    parent: int  # key of the previous block, or the prompt's root
    keys: Keys
    # uint32: token ids of at least the first index block; valid until the next batch of any pod is applied.
    tokens: NDArray[np.uint32]


@dataclass(slots=True)
class Outcome:
    """Effects of applying events or payloads, and counts of those that could not be used."""

    # Keys of the blocks that were stored with their tokens, run by run, parents first.
    stored: list[Keys] = field(default_factory=list)
    runs: list[StoredRun] | None = None  # the same with parents and tokens; None unless requested
    removals: Counter[str] = field(default_factory=Counter)  # hashes: a tier's "last" copy, or another "copy"
    skipped: Counter[tuple[str, str]] = field(default_factory=Counter)  # events or hashes, by (type, reason)
    events: Counter[str] = field(default_factory=Counter)  # events parsed, by type
    rejected: Counter[str] = field(default_factory=Counter)  # unreadable payloads and events, by reason
    published_s: list[float] = field(default_factory=list)  # timestamps of the batches, by the engine's clock
    emptied: bool = False  # the engine reported that its cache is empty
    stored_before_clear: int = 0  # runs in `stored` before the last such report
    is_complete: bool = False  # the view is proven to hold all that the engine holds, see `late_view`
    damage: str | None = None  # why the view no longer matches the engine's cache; None if it does

    @property
    def ends_empty(self) -> bool:
        return self.emptied and len(self.stored) == self.stored_before_clear

    def clear(self) -> None:
        """Record that the engine's cache is empty, which also repairs earlier damage."""
        self.emptied, self.damage, self.stored_before_clear = True, None, len(self.stored)

    def skip(self, event_type: str, reason: str, number: int = 1) -> None:
        """Count events or hashes that cannot be used. Most skipped stores invalidate the view."""
        if number:
            self.skipped[event_type, reason] += number
            if event_type == "BlockStored" and reason not in _HARMLESS:
                self.invalidate(reason)

    def reject(self, reason: str) -> None:
        """Count an unreadable payload or event. Unknown kinds of events leave the view valid."""
        self.rejected[reason] += 1
        if reason != UNKNOWN_EVENT:
            self.invalidate(reason)

    def invalidate(self, reason: str) -> None:
        """Mark the view as invalid: it no longer matches the engine's cache."""
        self.damage = self.damage or reason


_DECODER = msgspec.msgpack.Decoder(Entry)


def decode_entry(data: bytes, tiers: int) -> Entry:
    """Decode and validate an entry from an untrusted server; `tiers` is the number of tiers.

    Raises:
        PayloadError: The entry is malformed or larger than 32 MiB.
    """
    if len(data) > ENTRY_BYTES_MAX:
        raise PayloadError("oversize", f"entry of {len(data)} bytes, at most {ENTRY_BYTES_MAX}")
    try:
        entry = _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PayloadError("broken_entry", str(error)) from None
    if not all(_is_sound(change, tiers) for change in entry.changes):
        raise PayloadError("broken_entry", "columns of the entry have inconsistent lengths or values")
    return entry


def _is_sound(change: Change, tiers: int) -> bool:
    has_keys = change.kind is Kind.STORED
    return (
        0 <= change.tier < tiers
        and len(change.names) % 8 == 0
        and len(change.keys) == (len(change.names) if has_keys else 0)
        and bool(words(change.names).all())
    )


def words(data: bytes) -> NDArray[np.uint64]:
    """Return a column of little-endian 64-bit numbers as a writable copy, which the kernels need."""
    return np.frombuffer(data, "<u8").astype(np.uint64)


def _bytes(column: NDArray[np.uint64] | None) -> bytes:
    return b"" if column is None else column.astype("<u8").tobytes()
