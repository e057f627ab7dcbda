"""The block pool: free queue, counts, hashes, and the events that follow from them."""

import gc
import tracemalloc
from dataclasses import replace

import pytest

from model_server.kv_cache.block_pool import BlockPool, KVCacheBlock
from model_server.kv_events.events import (
    AllBlocksCleared,
    BlockContent,
    BlockRemoved,
    BlockStored,
    KVEventBuilder,
)
from model_server.shapes import single_group
from tests.support.engine_invariants import check_pool


def block_hash(number: int) -> bytes:
    """Return a stand-in for a block's hash."""
    return number.to_bytes(32, "big")


def new_pool(blocks: int) -> BlockPool:
    """Make a pool with blocks of 2 tokens."""
    return BlockPool(blocks, KVEventBuilder(single_group(1), 2))


def chain(*numbers: int, parent: int | None = None) -> list[BlockContent]:
    """Return the contents of blocks that follow one another."""
    contents = []
    for number in numbers:
        before = None if parent is None else block_hash(parent)
        contents.append(BlockContent(0, block_hash(number), before, (2 * number, 2 * number + 1), None, None))
        parent = number
    return contents


def cached_blocks(pool: BlockPool, *numbers: int) -> list[KVCacheBlock]:
    """Allocate blocks and register them as one chain."""
    blocks = pool.get_new_blocks(len(numbers))
    pool.cache_full_blocks(blocks, chain(*numbers))
    return blocks


def removed_hashes(pool: BlockPool) -> list[int]:
    """Return the hashes removed since the last look, in order, each from an event of its own."""
    events = [event for event in pool.take_events() if isinstance(event, BlockRemoved)]
    assert all(len(event.block_hashes) == 1 for event in events)
    return [event.block_hashes[0] for event in events]


def test_a_block_found_in_the_middle_of_the_free_ones_leaves_their_order_as_it_is() -> None:
    """A cache hit takes its block out of the queue; let go, that is reused after all others."""
    pool = new_pool(4)
    blocks = cached_blocks(pool, 1, 2, 3, 4)
    pool.free_blocks(blocks)
    found = pool.get_cached_block((0, block_hash(3)))
    assert found is blocks[2]
    pool.touch(found)
    assert pool.num_free_blocks == 3
    pool.free_blocks([found])
    pool.take_events()
    pool.get_new_blocks(4)
    assert removed_hashes(pool) == [4, 2, 1, 3]


def test_a_block_is_not_given_back_twice() -> None:
    """Wrong use of the pool fails at once instead of corrupting it."""
    pool = new_pool(1)
    blocks = pool.get_new_blocks(1)
    pool.free_blocks(blocks)
    with pytest.raises(AssertionError):
        pool.free_blocks(blocks)


def test_the_tail_of_a_chain_is_evicted_first() -> None:
    """Chains are evicted in the order of their release, each from its tail."""
    pool = new_pool(5)
    first, second = cached_blocks(pool, 1, 2, 3), cached_blocks(pool, 8, 9)
    pool.free_blocks(second)
    pool.free_blocks(first)
    pool.take_events()
    pool.get_new_blocks(5)
    assert removed_hashes(pool) == [9, 8, 3, 2, 1]


def test_blocks_without_a_hash_are_reused_before_cached_ones() -> None:
    """A released block that nobody can find is taken before any that somebody could use."""
    pool = new_pool(3)
    cached, plain = cached_blocks(pool, 1, 2), pool.get_new_blocks(1)
    pool.free_blocks(cached)
    pool.free_blocks(plain)
    assert pool.get_new_blocks(1) == plain
    pool.take_events()
    assert removed_hashes(pool) == []


def test_a_hit_saves_a_free_block_from_eviction() -> None:
    """A touched block leaves the free queue and needs as many releases as it has holders."""
    pool = new_pool(2)
    blocks = cached_blocks(pool, 1, 2)
    pool.free_blocks(blocks)
    found = pool.get_cached_block((0, block_hash(1)))
    assert found is blocks[0]
    pool.touch(found)
    pool.touch(found)
    check_pool(pool, [[found], [found]])
    pool.take_events()
    pool.get_new_blocks(1)
    assert removed_hashes(pool) == [2]
    pool.free_blocks([found])
    assert pool.num_free_blocks == 0
    pool.free_blocks([found])
    assert pool.num_free_blocks == 1


def test_copies_of_one_hash_are_stored_and_removed_one_by_one() -> None:
    """Two blocks of one hash give two events of each kind, and either copy is found while it is there."""
    pool = new_pool(2)
    first, second = cached_blocks(pool, 7), cached_blocks(pool, 7)
    assert [block.content is not None for block in pool.blocks].count(True) == 2
    assert sum(isinstance(event, BlockStored) for event in pool.take_events()) == 2
    pool.free_blocks(first)
    pool.get_new_blocks(1)
    assert removed_hashes(pool) == [7]
    assert pool.get_cached_block((0, block_hash(7))) is second[0]
    pool.free_blocks(second)
    pool.get_new_blocks(1)
    assert removed_hashes(pool) == [7]
    assert pool.get_cached_block((0, block_hash(7))) is None


def test_an_evicted_content_leaves_nothing_behind() -> None:
    """A pool that has held many contents takes as much memory as one that has held few."""
    pool = new_pool(2)

    def hold(numbers: range) -> int:
        for number in numbers:
            pool.free_blocks(cached_blocks(pool, number))
            pool.take_events()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        few = hold(range(1, 101))
        assert hold(range(101, 2101)) < few + 100_000
    finally:
        tracemalloc.stop()


def test_removals_come_before_the_store_that_caused_them() -> None:
    """One step's events are in the order of the pool's operations."""
    pool = new_pool(2)
    pool.free_blocks(cached_blocks(pool, 1, 2))
    pool.take_events()
    cached_blocks(pool, 3, 4)
    assert [type(event) for event in pool.take_events()] == [BlockRemoved, BlockRemoved, BlockStored]


def test_a_store_event_carries_what_vllm_sends() -> None:
    """The fields of BlockStored are those of a captured vLLM frame, with untagged extra keys."""
    pool = new_pool(2)
    blocks = pool.get_new_blocks(2)
    first, second = chain(5, 6, parent=4)
    pool.cache_full_blocks(blocks, [replace(first, extra_keys=(("cache_salt", "tenant-42"),)), second])
    assert pool.take_events() == [
        BlockStored(
            block_hashes=[5, 6],
            parent_block_hash=4,
            token_ids=[10, 11, 12, 13],
            block_size=2,
            lora_id=None,
            medium="GPU",
            lora_name=None,
            extra_keys=[["tenant-42"], None],
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )
    ]


def test_blocks_that_were_never_computed_are_forgotten() -> None:
    """After a failed step nothing that it registered can be found, but what it evicted stays evicted."""
    pool = new_pool(2)
    pool.free_blocks(cached_blocks(pool, 1))
    pool.take_events()
    pool.get_new_blocks(1)
    blocks = cached_blocks(pool, 2)
    pool.uncache_uncomputed()
    assert pool.get_cached_block((0, block_hash(2))) is None
    assert removed_hashes(pool) == [1]
    assert blocks[0].content is None


def test_reset_waits_until_no_block_is_held() -> None:
    """A reset does nothing while a block is held; afterwards it clears and says so."""
    pool = new_pool(2)
    blocks = cached_blocks(pool, 1)
    pool.take_events()
    assert not pool.reset_prefix_cache()
    assert pool.get_cached_block((0, block_hash(1))) is not None
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert pool.take_events() == [AllBlocksCleared()]
    assert pool.get_cached_block((0, block_hash(1))) is None
    check_pool(pool, [])


def test_the_checker_sees_a_leak_and_a_double_owner() -> None:
    """check_invariants fails when a table and the counts disagree, so it can be trusted when it passes."""
    pool = new_pool(2)
    blocks = pool.get_new_blocks(1)
    check_pool(pool, [blocks])
    with pytest.raises(AssertionError):
        check_pool(pool, [])
    with pytest.raises(AssertionError):
        check_pool(pool, [blocks, blocks])
    blocks[0].content = chain(1)[0]
    with pytest.raises(AssertionError):
        check_pool(pool, [blocks])
