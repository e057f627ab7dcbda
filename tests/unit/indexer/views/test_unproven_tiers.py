"""Tiers whose removals are not published: recognized by their events, and aged."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from indexer.config import IndexerConfig, PodStream
from indexer.index.index import FlatIndex
from indexer.keys import BlockHasher
from indexer.views.applier import ApplierContext, EventApplier
from indexer.wire.tiers import CPU_TIER, GPU_TIER, Tiers

POD = "10.0.0.1:8000"
MANY = 1000
ALL = list(range(1, MANY + 1))


class Applied:
    """One pod's events in an index with blocks of one token.

    Attributes:
        state: Applier of the events.
    """

    def __init__(self) -> None:
        config, hasher = IndexerConfig(block_tokens=1, hash_seed=1), BlockHasher(1, 1)
        self._index = FlatIndex(1 << 22, Tiers())
        self.state = EventApplier(
            ApplierContext(config, self._index, hasher), PodStream(POD, "m", "tcp://127.0.0.1:1")
        )

    def store(self, hashes: list[int], medium: str, **fields: Any) -> None:
        """Apply a store from the start of a prompt."""
        event = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": None,
            "token_ids": hashes,
        }
        self.apply({**event, "block_size": 1, "lora_id": None, "medium": medium, **fields})

    def remove(self, hashes: list[int], medium: str) -> None:
        """Apply a removal."""
        self.apply({"type": "BlockRemoved", "block_hashes": hashes, "medium": medium})

    def apply(self, *events: dict[str, Any]) -> None:
        """Apply a batch."""
        self.state.apply([msgspec.msgpack.encode([1.0, events, None])])

    def age(self) -> None:
        """Let the period of the unproven tiers end."""
        for _ in self.state.age_tiers():
            pass

    def blocks(self, tier: str) -> int:
        """Return the number of blocks in a tier."""
        return self._index.tier_blocks(POD, tier)

    @property
    def unproven(self) -> tuple[str, ...]:
        """Return the tiers that are not proven."""
        return self.state.tier_proof.unproven


@pytest.fixture
def applied() -> Applied:
    """Return the state after many stores in device and host memory, and a removal from device memory."""
    applied = Applied()
    applied.store(ALL, "GPU")
    applied.store(ALL, "CPU")
    applied.remove([MANY], "GPU")
    return applied


def test_a_tier_that_only_grows_is_not_proven(applied: Applied) -> None:
    """Many stores in host memory without any removal there are doubtful once device memory evicts."""
    assert applied.unproven == (CPU_TIER,)


def test_one_removal_proves_a_tier(applied: Applied) -> None:
    """A connector that published one removal publishes all of them."""
    applied.remove([1], "CPU")
    assert applied.unproven == ()


def test_a_connector_that_is_known_is_trusted(applied: Applied) -> None:
    """Host memory needs no proof if the metrics show a connector that publishes removals."""
    applied.state.tier_proof.reports_evictions = True
    assert applied.unproven == ()


def test_unusual_events_count_too() -> None:
    """Events that only the view can apply, such as salted ones in an unknown medium, are counted."""
    applied = Applied()
    applied.store(ALL, "lmcache", cache_salt="s")
    applied.store([MANY + 1], "GPU")
    assert applied.unproven == ()
    applied.remove([MANY + 1], "GPU")
    assert applied.unproven == ("other",)


def test_blocks_of_an_unproven_tier_expire(applied: Applied) -> None:
    """All copies that were there at the last call leave with the next one; other tiers are untouched."""
    applied.store(ALL[:10], "CPU")
    applied.age()
    assert applied.blocks(CPU_TIER) == MANY
    applied.age()
    assert (applied.blocks(CPU_TIER), applied.blocks(GPU_TIER)) == (0, MANY - 1)


def test_blocks_that_are_stored_again_stay(applied: Applied) -> None:
    """A store since the last call keeps its block for one more period."""
    applied.age()
    applied.store(ALL[:10], "CPU")
    applied.age()
    assert applied.blocks(CPU_TIER) == 10


def test_a_tier_that_was_proven_meanwhile_keeps_its_blocks(applied: Applied) -> None:
    """Nothing expires in a tier whose first removal was published after the last call."""
    applied.age()
    applied.remove([1], "CPU")
    applied.age()
    assert applied.blocks(CPU_TIER) == MANY - 1


def test_a_refill_returns_blocks_to_device_memory() -> None:
    """Blocks that are loaded back are in both tiers until one of them removes them."""
    applied = Applied()
    applied.store([1, 2], "GPU")
    applied.store([1, 2], "CPU_PINNED")
    applied.remove([1, 2], "GPU")
    assert (applied.blocks(GPU_TIER), applied.blocks(CPU_TIER)) == (0, 2)
    applied.store([1, 2], "GPU")
    assert (applied.blocks(GPU_TIER), applied.blocks(CPU_TIER)) == (2, 2)
    applied.remove([1, 2], "GPU")
    assert (applied.blocks(GPU_TIER), applied.blocks(CPU_TIER)) == (0, 2)


def test_inactive_blocks_stay() -> None:
    """A notice that no request uses a block changes nothing."""
    applied = Applied()
    applied.store([1], "GPU")
    applied.apply({"type": "BlockInactive", "block_hashes": [1], "medium": "GPU"})
    assert applied.blocks(GPU_TIER) == 1
