"""The contract of an index: which pod holds which block, in which tier, how often.

Block keys come in (see `keys`), longest unbroken prefixes per pod go out. An index knows no tokens, no engine
hashes, no sockets and no clock. Every backend passes tests/contract.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

NOTHING_ASSUMED: Mapping[str, AbstractSet[int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest unbroken prefix that one pod holds.

    Attributes:
        blocks: Its length in blocks, whatever the tiers.
        blocks_by_tier: How many of these blocks are best held in which tier; the values add up to `blocks`.
        weighted_blocks: Sum of the best tiers' weights over these blocks; never rounded.
    """

    blocks: int
    blocks_by_tier: Mapping[str, int]
    weighted_blocks: float


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Size of an index.

    Attributes:
        blocks: Unique blocks held.
        capacity_blocks: Most that it may hold.
        holdings: Pairs of (block, pod) held.
        evicted_blocks: Blocks dropped so far because the capacity was reached.
    """

    blocks: int
    capacity_blocks: int
    holdings: int
    evicted_blocks: int


class Index(Protocol):
    """Who holds which block. Thread-safe; a method returns when its effect is visible to `match`.

    References are counted per (key, pod, tier): an engine may keep several physical copies of one block,
    announces each, and removes each. A holding ends when as many were removed as were added.

    When the capacity is reached, the least recently used block leaves with all its holders; removing it
    afterwards is a no-op. Blocks are used by `add` and by `match`, and within one call the earlier keys count
    as the more recent ones: a chain is of use only from its start, so it must lose its tail first.
    """

    def add(self, pod: str, tier: str, keys: Sequence[int]) -> None:
        """Adds one reference for each key; a key named twice counts twice."""
        ...

    def remove(self, pod: str, tier: str, keys: Sequence[int]) -> int:
        """Takes one reference away for each key; what is not held is passed over.

        Returns:
            How many holdings (key, pod, tier) ended with it.
        """
        ...

    def clear_pod(self, pod: str) -> int:
        """Drops everything that the pod holds, in all tiers.

        Returns:
            How many blocks the pod held.
        """
        ...

    def match(
        self,
        keys: Sequence[int],
        pods: Collection[str],
        assumed: Mapping[str, AbstractSet[int]] = NOTHING_ASSUMED,
    ) -> dict[str, PrefixMatch]:
        """Finds how far each pod holds the chain `keys`, from its start, without a hole.

        Args:
            keys: Chained keys of a prompt, first block first.
            pods: The pods asked for; each is in the answer.
            assumed: For some pods, positions in `keys` to count as held in the GPU tier, index or not.

        Returns:
            One match for each pod. The blocks of the longest match become the most recently used ones.
        """
        ...

    def stats(self) -> IndexStats:
        """Tells the index's size."""
        ...
