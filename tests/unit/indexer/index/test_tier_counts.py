"""Counts of each pod's blocks by tier."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from indexer.index.index import FlatIndex
from indexer.keys import BlockHasher
from indexer.wire.tiers import Tiers

HASHER = BlockHasher(1, 0)
TIERS = ("gpu", "cpu", "disk")


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(TIERS), st.integers(1, 6)), max_size=40))
def test_counts_are_those_of_all_additions(added: list[tuple[int, str, int]]) -> None:
    """A pod's count in a tier is the number of distinct blocks added there, whatever other pods hold."""
    index = FlatIndex(1 << 20, Tiers())
    held: Counter[tuple[str, str]] = Counter()
    for number, tier, blocks in added:
        pod = f"pod-{number}"
        index.add(pod, tier, HASHER.chain(HASHER.root("m"), list(range(1, blocks + 1))))
        # The chains share their beginning, so the longest one has all blocks.
        held[pod, tier] = max(held[pod, tier], blocks)
    counted = index.blocks_by_tier()
    names = index.tiers.names
    found = {
        (pod, tier): int(n) for pod, row in counted.items() for tier, n in zip(names, row, strict=True) if n
    }
    assert found == dict(held)
    assert all(index.tier_blocks(pod, tier) == blocks for (pod, tier), blocks in held.items())
    assert index.tier_blocks("nobody", "gpu") == 0
