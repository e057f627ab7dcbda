"""What one pod's view holds at one moment, as values: what a peer is told so that it can go on from there.

Knows neither the form on the wire (see `peer_wire`) nor sockets. Tiers are numbers, see `Tiers.names`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from indexer.events import MAX_TOKENS
from indexer.flat_layout import HeldBlocks

if TYPE_CHECKING:
    from indexer.journal import Entry

GROUPS_MAX = 32


class GroupFact(Struct, frozen=True):
    """What is known of one KV cache group, and which of its blocks an engine needs to resume behind a prefix.

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
    """What later events of a pod need to be understood, besides its blocks."""

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
