"""Values of one pod's view: snapshots and recorded changes for other routers, and outcomes of events.

Snapshots and changes name blocks by keys and by engine hashes, never by tokens, so that they may leave the
process. Tiers are numbers, see `Tiers.names`. The wire format of snapshots is in `peers.messages`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
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

GROUPS_MAX = 32
# Entries above this size are neither written nor read.
ENTRY_BYTES_MAX = 32 << 20
_CHANGES_MAX = 1 << 20
# Skipped for these reasons, a store leaves the view as it should be.
_HARMLESS = frozenset({"unknown_hash"})


class GroupFact(Struct, frozen=True):
    """Facts about one KV cache group, and which of its blocks an engine needs to resume behind a prefix.

    These are the rules of vLLM's cache managers: full attention needs all blocks, a sliding window those that
    cover `window - 1` tokens before the prefix's end, a linear layer the one that holds the state at the end,
    chunked attention those of the chunk that the end lies in.
    """

    group: Annotated[int, Meta(ge=0, le=65_535)]
    usable: bool  # whether it is indexed: its rule is known, and there are not too many groups
    leads: bool  # whether its blocks are the pod's own in the index
    stride: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 1  # index blocks of one of the group's blocks
    # How many of its blocks in front of the prefix's end; -1: all.
    last_blocks: Annotated[int, Meta(ge=-1, lt=1 << 31)] = -1
    # Index blocks of a chunk, in front of which nothing is needed; 0: there are no chunks.
    chunk: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0

    def __post_init__(self) -> None:
        if self.leads and not self.usable:
            raise ValueError("a group leads, but is not usable")


class ViewFacts(Struct, frozen=True):
    """Facts that later events of a pod need to be understood, besides its blocks."""

    run_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None  # of an engine block; None before the first
    zero_is_a_hash: bool  # whether the engine told of a block with the hash 0
    reannounces: bool  # whether it announces again what is there, see `reannounce`
    groups: Annotated[tuple[GroupFact, ...], Meta(max_length=GROUPS_MAX)]  # in the order they were learnt

    def __post_init__(self) -> None:
        if len({fact.group for fact in self.groups}) < len(self.groups):
            raise ValueError("a group is told twice")
        if sum(fact.leads for fact in self.groups) > 1:
            raise ValueError("several groups lead")


@dataclass(frozen=True, slots=True, eq=False)
class ViewPart:
    """A part of what one KV cache group holds; None stands for the lead group."""

    group: int | None
    blocks: HeldBlocks


@dataclass(frozen=True, slots=True, eq=False)
class ViewContent:
    """A view that is about to be listed."""

    facts: ViewFacts
    evicted_blocks: int  # lost by the index to its capacity, of whatever pod; some of them may lack
    # Its blocks, part by part; None: a turn's share was looked at, and the list goes on. The view must not
    # change before the last.
    parts: Iterator[ViewPart | None]


@dataclass(frozen=True, slots=True, eq=False)
class ViewSnapshot:
    """A view, all of it, at one place of its stream."""

    sequence: int  # of the last batch in it
    digest: bytes  # 16 bytes: XXH3-128 of that batch's payload
    facts: ViewFacts
    evicted_blocks: int  # see `ViewContent`
    parts: Sequence[ViewPart | Entry]  # its blocks, and what changed since they were listed


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

    @property
    def name_array(self) -> NDArray[np.uint64]:
        return np.frombuffer(self.names, "<u8").astype(np.uint64)

    @property
    def key_array(self) -> NDArray[np.uint64]:
        return np.frombuffer(self.keys, "<u8").astype(np.uint64)


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
    """A run of new blocks."""

    parent: int  # key of the block before it, or the prompt's root
    keys: Keys
    # uint32: token ids of its first index block, at least; valid until the next batch of any pod is applied.
    tokens: NDArray[np.uint32]


@dataclass(slots=True)
class Outcome:
    """Effects of applying events or whole payloads, and which of them could not be used."""

    # Keys of the blocks that were announced with their tokens, run by run, parents first.
    stored: list[Keys] = field(default_factory=list)
    runs: list[StoredRun] | None = None  # the same with parents and tokens; only if somebody asked for them
    removals: Counter[str] = field(default_factory=Counter)  # hashes: a tier's "last", or a "copy" stays
    skipped: Counter[tuple[str, str]] = field(default_factory=Counter)  # events or hashes, by (type, reason)
    events: Counter[str] = field(default_factory=Counter)  # events read, by type
    rejected: Counter[str] = field(default_factory=Counter)  # unreadable payloads and events, by reason
    published_s: list[float] = field(default_factory=list)  # the batches' time stamps, by the engine's clock
    emptied: bool = False  # the engine said that its cache is empty
    stored_before_clear: int = 0  # runs in `stored` that came before it said so the last time
    damage: str | None = None  # why the view is not what the engine holds, after that; None if it is

    @property
    def ends_empty(self) -> bool:
        return self.emptied and len(self.stored) == self.stored_before_clear

    def clear(self) -> None:
        """Record that the engine's cache is empty: what lacked before lacks no more."""
        self.emptied, self.damage, self.stored_before_clear = True, None, len(self.stored)

    def skip(self, event_type: str, reason: str, number: int = 1) -> None:
        """Count events or hashes that cannot be used; a store that is skipped mostly damages the view."""
        if number:
            self.skipped[event_type, reason] += number
            if event_type == "BlockStored" and reason not in _HARMLESS:
                self.doubt(reason)

    def reject(self, reason: str) -> None:
        """Count what could not be read; kinds of events that we do not know harm nothing."""
        self.rejected[reason] += 1
        if reason != UNKNOWN_EVENT:
            self.doubt(reason)

    def doubt(self, reason: str) -> None:
        self.damage = self.damage or reason


_DECODER = msgspec.msgpack.Decoder(Entry)


def decode_entry(data: bytes, tiers: int) -> Entry:
    """Decode and validate an entry.

    Args:
        data: msgpack from an untrusted server.
        tiers: Number of tiers.

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
        and bool(change.name_array.all())
    )


def _bytes(column: NDArray[np.uint64] | None) -> bytes:
    return b"" if column is None else column.astype("<u8").tobytes()
