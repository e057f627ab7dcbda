"""The cost-aware index besides the contract: its budget, and who gets into it."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from indexer.cost_index import BLOCK_BYTES, HOLDER_BYTES, CostIndex
from indexer.errors import ConfigError
from indexer.frequency import FrequencySketch
from indexer.keys import Keys
from indexer.tiers import Tiers

A = "10.0.0.1:8000"
_RNG_SEED = 7


def fresh_keys(blocks: int, seed: int = _RNG_SEED) -> Keys:
    """Keys as hashes are."""
    return np.random.default_rng(seed).integers(0, 1 << 64, blocks, np.uint64)


@pytest.mark.parametrize(("blocks", "pods"), [(500, 43), (1000, 1), (5500, 1), (5500, 22), (22_000, 2)])
def test_the_counted_bytes_are_no_less_than_the_taken_ones(blocks: int, pods: int) -> None:
    """What the index tells of itself is an upper bound of what Python allocated, and no wild guess."""
    keys = fresh_keys(blocks)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        index = CostIndex(500_000_000, Tiers())
        for pod in range(pods):
            for start in range(0, blocks, 100):
                for tier in ("gpu", "cpu"):
                    index.add(f"10.0.0.{pod}:8000", tier, keys[start : start + 100])
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    counted = index.stats().used_bytes
    assert index.stats().holdings == blocks * pods
    assert taken <= counted <= 2 * taken


def test_the_budget_holds_whatever_comes() -> None:
    """Blocks with many holders take the room of several; never is more counted than the budget."""
    index = CostIndex(300_000, Tiers())
    keys = fresh_keys(2000)
    for pod in range(60):
        for start in range(0, 2000, 200):
            index.add(f"pod{pod}", "gpu", keys[start + pod : start + pod + 40])
            stats = index.stats()
            assert stats.used_bytes <= stats.capacity_bytes == 300_000
    assert stats.evicted_blocks > 0
    assert stats.holdings * HOLDER_BYTES + stats.blocks * BLOCK_BYTES <= 300_000
    for pod in range(60):
        index.clear_pod(f"pod{pod}")
    assert index.stats().used_bytes == FrequencySketch(300_000 // BLOCK_BYTES).used_bytes


def test_what_is_used_often_outlives_a_flood() -> None:
    """Prompts that come once do not push out a prefix that many use, even when it rests meanwhile."""
    index = CostIndex(200 * (BLOCK_BYTES + HOLDER_BYTES), Tiers())
    prefix = fresh_keys(50)
    for _ in range(10):
        index.match(prefix, [A])
        index.add(A, "gpu", prefix)
    flood = fresh_keys(1000, seed=8)
    for start in range(0, 1000, 20):
        index.match(flood[start : start + 20], [A])
        index.add(A, "gpu", flood[start : start + 20])
    assert index.match(prefix, [A])[A].blocks == 50
    assert index.stats().evicted_blocks > 0


def test_what_was_popular_yesterday_makes_room() -> None:
    """Frequencies age: a new favourite gets in although an old one was used more often."""
    index = CostIndex(100 * (BLOCK_BYTES + HOLDER_BYTES), Tiers())
    old, new = fresh_keys(80), fresh_keys(80, seed=8)
    for _ in range(15):
        index.match(old, [A])
    index.add(A, "gpu", old)
    for _ in range(200):
        index.match(new, [A])
        index.add(A, "gpu", new)
    assert index.match(new, [A])[A].blocks == 80


def test_a_budget_for_no_block_is_refused() -> None:
    """The error names what fits at least."""
    with pytest.raises(ConfigError, match=r"no block fits into 500 bytes, must be at least \d+"):
        CostIndex(500, Tiers())
