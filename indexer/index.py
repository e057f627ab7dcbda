"""What an index tells: how far pods hold a prompt, and its size; values only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indexer.tiers import Tiers

_ALL_ONE = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest unbroken prefix that one pod holds.

    Attributes:
        blocks: Its length in blocks, whatever the tiers.
        blocks_by_tier: How many of these blocks are best held in which tier; the values add up to `blocks`,
            none of them is 0.
        weighted_blocks: Sum of the best tiers' weights over these blocks; never rounded.
    """

    blocks: int
    blocks_by_tier: Mapping[str, int]
    weighted_blocks: float


class MatchTable(Mapping[str, PrefixMatch]):
    """Matches of many pods, as arrays; read as a mapping it makes one `PrefixMatch` for each pod asked for.

    No dataclass: one is made for each request, and a frozen one costs a microsecond.

    Attributes:
        rows: Pod -> its row in the arrays.
        tiers: Names and weights of the columns of `blocks_by_tier`.
        blocks: int32 [pods], lengths of the longest unbroken prefixes.
        blocks_by_tier: int32 [pods, tiers], see `PrefixMatch.blocks_by_tier`.
        longest: The most of `blocks`; counted where it is not given.
        strides: int32 [pods], index blocks per block of the pod's engine, to which `blocks` is rounded down;
            empty: 1 for all.
    """

    __slots__ = ("blocks", "blocks_by_tier", "longest", "rows", "strides", "tiers")

    def __init__(
        self,
        rows: Mapping[str, int],
        tiers: Tiers,
        blocks: NDArray[np.int32],
        blocks_by_tier: NDArray[np.int32],
        longest: int | None = None,
        *,
        strides: NDArray[np.int32] = _ALL_ONE,
    ) -> None:
        self.rows = rows
        self.tiers = tiers
        self.blocks = blocks
        self.blocks_by_tier = blocks_by_tier
        self.longest = int(blocks.max(initial=0)) if longest is None else longest
        self.strides = strides

    def stride(self, pod: str) -> int:
        """Return the index blocks per block of this pod's engine."""
        return int(self.strides[self.rows[pod]]) if len(self.strides) else 1

    def __getitem__(self, pod: str) -> PrefixMatch:
        row = self.rows[pod]
        counts: list[int] = self.blocks_by_tier[row].tolist()
        by_tier = {name: count for name, count in zip(self.tiers.names, counts, strict=True) if count}
        return PrefixMatch(int(self.blocks[row]), by_tier, self.tiers.weighted(counts))

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Size of an index.

    Attributes:
        blocks: Unique blocks held.
        capacity_blocks: Most that it may hold.
        holdings: Pairs of (block, pod) held.
        evicted_blocks: Blocks dropped so far because the capacity was reached.
        used_bytes: Memory that it takes for them; in bytes.
        capacity_bytes: Most that it may take; in bytes.
    """

    blocks: int
    capacity_blocks: int
    holdings: int
    evicted_blocks: int
    used_bytes: int = 0
    capacity_bytes: int = 0
