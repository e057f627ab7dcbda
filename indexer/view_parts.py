"""What one pod's view holds at one moment, as values: what a peer is told so that it can go on from there.

Knows neither the form on the wire (see `peer_wire`) nor sockets. Tiers are numbers, see `Tiers.names`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from indexer.events import MAX_TOKENS
from indexer.keys import Keys

if TYPE_CHECKING:
    from indexer.journal import Entry

_GROUPS_MAX = 32
# Most index blocks of one part: applying or listing them takes less than a millisecond.
PART_BLOCKS = 2048


class GroupFact(Struct, frozen=True):
    """What is known of one KV cache group, see `cache_groups`.

    Attributes:
        usable: Whether it is indexed.
        leads: Whether it is the lead; only of such a one the rest says nothing.
        stride: See `hybrid.GroupRule`, as the rest.
    """

    group: Annotated[int, Meta(ge=0, le=65_535)]
    usable: bool
    leads: bool
    stride: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 1
    last_blocks: Annotated[int, Meta(ge=-1, lt=1 << 31)] = 0
    chunk: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0

    def __post_init__(self) -> None:
        if self.leads and not self.usable:
            raise ValueError("a group leads, but is not usable")


class ViewFacts(Struct, frozen=True):
    """What later events of a pod need to be understood, besides its blocks.

    Attributes:
        run_tokens: Tokens of an engine block; None while no run was stored.
        zero_is_a_hash: Whether the engine told of a block with the hash 0.
        reannounces: Whether it announces again what is there, see `reannounce`.
        lead_stride: Index blocks of a block of the lead group.
        groups: Its KV cache groups, in the order in which they were learnt.
    """

    run_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None
    zero_is_a_hash: bool
    reannounces: bool
    lead_stride: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    groups: Annotated[tuple[GroupFact, ...], Meta(max_length=_GROUPS_MAX)]

    def __post_init__(self) -> None:
        if len({fact.group for fact in self.groups}) < len(self.groups):
            raise ValueError("a group is told twice")
        if sum(fact.leads for fact in self.groups) > 1:
            raise ValueError("several groups lead")


@dataclass(frozen=True, slots=True, eq=False)
class Splits:
    """Numbers of index blocks that one engine block may have."""

    splits: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class HeldBlocks:
    """Blocks in a flat index; see `flat_export.Listed` for the columns."""

    keys: Keys
    tiers: NDArray[np.uint8]
    name_counts: NDArray[np.uint8]
    names: NDArray[np.uint64]
    copies: NDArray[np.int64]


CachePart = Splits | HeldBlocks


@dataclass(frozen=True, slots=True, eq=False)
class ViewPart:
    """A part of what one KV cache group holds; None stands for the lead group."""

    group: int | None
    part: CachePart


@dataclass(frozen=True, slots=True, eq=False)
class ViewContent:
    """A view that is about to be listed.

    Attributes:
        facts: What its events told.
        evicted_blocks: Blocks that the index lost to its capacity, of whatever pod; some of them may lack.
        parts: Its blocks, part by part; None: a turn's share was looked at, and the list goes on. The view
            must not change before the last.
    """

    facts: ViewFacts
    evicted_blocks: int
    parts: Iterator[ViewPart | None]


@dataclass(frozen=True, slots=True, eq=False)
class ViewSnapshot:
    """A view, all of it, at one place of its stream.

    Attributes:
        sequence: Number of the last batch in it.
        digest: 16 bytes: XXH3-128 of that batch's payload.
        facts: What its events told.
        evicted_blocks: See `ViewContent`.
        parts: Its blocks, and what changed since they were listed.
    """

    sequence: int
    digest: bytes
    facts: ViewFacts
    evicted_blocks: int
    parts: Sequence[ViewPart | Entry]
