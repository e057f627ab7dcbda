"""Memory limit of the flat index: what counts towards it, and that it is enforced."""

from __future__ import annotations

import numpy as np
import pytest

from indexer.index.index import FlatIndex
from indexer.index.layout import ALIAS_BYTES, BLOCK_BYTES, EXTRA_BYTES
from indexer.keys import Keys
from indexer.views.block_cache import BlockCache
from indexer.wire.tiers import Tiers

TIERS = Tiers()
PODS = tuple(f"10.0.0.{number}:8000" for number in range(60))


def chain(number: int, blocks: int) -> Keys:
    """Return keys that are unique to this number."""
    return np.arange(number * 10_000 + 1, number * 10_000 + 1 + blocks, dtype=np.uint64)


def test_each_kind_of_entry_counts() -> None:
    """Blocks, rows of the tiers in use, aliases and extra copies count by their sizes."""
    index = FlatIndex(1 << 22, TIERS)
    index.add(PODS[0], "gpu", chain(0, 10))
    expected = 10 * BLOCK_BYTES
    assert index.stats().used_bytes == expected
    index.add(PODS[0], "gpu", chain(0, 3))
    expected += 3 * EXTRA_BYTES
    assert index.stats().used_bytes == expected
    for pod in PODS[1:5]:
        index.add(pod, "gpu", chain(0, 2))
    expected += 2 * 8
    assert index.stats().used_bytes == expected
    for model in ("a", "b"):
        BlockCache(index, PODS[0], model).store([1, 2], chain(0, 2), "gpu")
    # Two copies more of blocks that had further ones already, under two names.
    assert index.stats().used_bytes == expected + 2 * ALIAS_BYTES


@pytest.mark.parametrize("kind", ["names", "copies", "holders"])
def test_the_ceiling_holds_for_what_known_blocks_gain(kind: str) -> None:
    """If known blocks gain hashes, copies or holders, the oldest blocks are evicted."""
    capacity_bytes, blocks = 400_000, 1000
    index = FlatIndex(capacity_bytes, TIERS)
    for number in range(5):
        index.add(PODS[0], "gpu", chain(number, blocks))
    for turn in range(len(PODS)):
        for number in range(5):
            keys = chain(number, blocks)
            pod = PODS[0] if kind == "names" else PODS[turn if kind == "holders" else turn % 9]
            if kind == "names":
                BlockCache(index, pod, f"model-{turn}").store(keys.tolist(), keys, "gpu")
            else:
                index.add(pod, "gpu", keys)
            assert index.match(keys, [pod])[pod].cached_blocks == blocks
            # A call may go beyond it with what it brings itself: the next one begins with making room.
            assert index.stats().used_bytes <= capacity_bytes + blocks * ALIAS_BYTES
    assert index.stats().evicted_blocks > 0
    index.add(PODS[0], "gpu", chain(9, 1))
    assert index.stats().used_bytes <= capacity_bytes
