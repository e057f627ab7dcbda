"""The contract of an index: which pod holds which block, in which tier, how often.

Block keys come in (see `keys`), longest unbroken prefixes per pod go out. An index knows no tokens, no engine
hashes, no sockets and no clock. Every backend passes tests/contract.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from indexer.keys import Keys
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
class Holding:
    """Blocks that one pod holds in one tier.

    Attributes:
        pod: The pod.
        tier: The tier.
        keys: uint64 [blocks], each once.
        references: int32 [blocks], copies of each, at least 1.
    """

    pod: str
    tier: str
    keys: Keys
    references: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Size of an index.

    Attributes:
        blocks: Unique blocks held.
        capacity_blocks: Most that it may hold.
        holdings: Pairs of (block, pod) held.
        evicted_blocks: Blocks dropped so far because the capacity was reached.
        used_bytes: Memory that it takes for them; 0 where the backend cannot tell.
        capacity_bytes: Most that it may take; 0 for a backend that counts blocks only.
    """

    blocks: int
    capacity_blocks: int
    holdings: int
    evicted_blocks: int
    used_bytes: int = 0
    capacity_bytes: int = 0


class Index(Protocol):
    """Who holds which block. Thread-safe; a method returns when its effect is visible to `match`.

    References are counted per (key, pod, tier): an engine may keep several physical copies of one block,
    announces each, and removes each. A holding ends when as many were removed as were added.

    When the capacity is reached, the least recently used block leaves with all its holders; removing it
    afterwards is a no-op. Blocks are used by `add` and by `match`, and within one call the earlier keys count
    as the more recent ones: a chain is of use only from its start, so it must lose its tail first. Blocks of
    one call never evict one another: of a call longer than the capacity only the first blocks are kept.

    A pod is any text that names one holder; a KV cache group that is indexed apart is a holder of its own.
    Keys are given as `keys.Keys` arrays; a tier that `tiers` does not name is taken for "other".
    """

    tiers: Tiers

    def add(self, pod: str, tier: str, keys: Keys) -> None:
        """Adds one reference for each key; a key named twice counts twice."""
        ...

    def remove(self, pod: str, tier: str, keys: Keys) -> int:
        """Takes one reference away for each key; what is not held is passed over.

        Returns:
            How many holdings (key, pod, tier) ended with it.
        """
        ...

    def remove_all(self, tier: str, pods: Sequence[str], runs: Sequence[Keys]) -> int:
        """As `remove` for one pod and its keys after the other; many at once are cheaper."""
        ...

    def clear_pod(self, pod: str) -> int:
        """Drops everything that the pod holds, in all tiers.

        Returns:
            How many blocks the pod held.
        """
        ...

    def match(self, keys: Keys, pods: Collection[str]) -> MatchTable:
        """Finds how far each pod holds the chain `keys`, from its start, without a hole.

        Args:
            keys: Chained keys of a prompt, first block first.
            pods: The pods asked for; each is in the answer. A frozenset that is asked again is fastest.

        Returns:
            One match for each pod. The blocks of the longest match become the most recently used ones.
        """
        ...

    def held(self, keys: Keys, pod: str) -> NDArray[np.uint8]:
        """Tells which of `keys` the pod holds, holes or not, without using them.

        Returns:
            uint8 [keys], a bit for each tier that holds it: 1 << its place in `tiers.names`; 0: not held.
        """
        ...

    def evict(self, blocks: int) -> int:
        """Drops the least recently used blocks, at most so many; tells how many."""
        ...

    def snapshot(self, pods: Collection[str]) -> Sequence[Holding]:
        """All that these pods hold; none of it speculative. Consistent for each pod."""
        ...

    def restore(self, holdings: Sequence[Holding]) -> None:
        """Adds all references of a snapshot."""
        ...

    def stats(self) -> IndexStats:
        """Tells the index's size."""
        ...


@runtime_checkable
class SharedIndex(Protocol):
    """What an index is besides that lies outside the process."""

    @property
    def up(self) -> bool:
        """Whether it answers; while it does not, nothing is cached."""
        ...

    def take_lost(self) -> tuple[str, ...]:
        """Pods whose view in it was lost since the last call, and must be built anew."""
        ...

    def close(self) -> None:
        """Gives back what it holds; idempotent."""
        ...
