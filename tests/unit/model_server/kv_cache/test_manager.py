"""The block pool: free queue, reference counts, prefix cache, events."""

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
from model_server.shapes.shape import single_group
from tests.support.model_server.invariants import check_pool


def block_hash(number: int) -> bytes:
    """Return a fake block hash."""
    return number.to_bytes(32, "big")


def new_pool(blocks: int) -> BlockPool:
    """Return a pool with blocks of 2 tokens."""
    return BlockPool(blocks, KVEventBuilder(single_group(1), 2))


def chain(*numbers: int, parent: int | None = None) -> list[BlockContent]:
    """Return the contents of consecutive blocks."""
    contents = []
    for number in numbers:
        before = None if parent is None else block_hash(parent)
        contents.append(BlockContent(0, block_hash(number), before, (2 * number, 2 * number + 1), None, None))
        parent = number
    return contents


def cached_blocks(pool: BlockPool, *numbers: int) -> list[KVCacheBlock]:
    """Allocate blocks and cache them as one chain."""
    blocks = pool.get_new_blocks(len(numbers))
    pool.cache_full_blocks(blocks, chain(*numbers))
    return blocks


def removed_hashes(pool: BlockPool) -> list[int]:
    """Return the hashes removed since the last call, in order, one event each."""
    events = [event for event in pool.take_events() if isinstance(event, BlockRemoved)]
    assert all(len(event.block_hashes) == 1 for event in events)
    return [event.block_hashes[0] for event in events]


def test_cache_hit_keeps_the_order_of_the_free_queue() -> None:
    """A cache hit removes its block from the free queue; once freed, it goes to the end."""
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


def test_freeing_a_block_twice_fails() -> None:
    """Freeing a block twice fails at once."""
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
    """Free blocks without cached content are allocated before cached ones."""
    pool = new_pool(3)
    cached, plain = cached_blocks(pool, 1, 2), pool.get_new_blocks(1)
    pool.free_blocks(cached)
    pool.free_blocks(plain)
    assert pool.get_new_blocks(1) == plain
    pool.take_events()
    assert removed_hashes(pool) == []


def test_a_hit_saves_a_free_block_from_eviction() -> None:
    """A touched block leaves the free queue and is freed once per reference."""
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
    """Two copies of one hash give two events of each kind; a lookup finds either."""
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


def test_evicted_contents_use_no_memory() -> None:
    """The memory of a pool does not grow with the number of evicted contents."""
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
    """The events of a step are in the order of the pool's operations."""
    pool = new_pool(2)
    pool.free_blocks(cached_blocks(pool, 1, 2))
    pool.take_events()
    cached_blocks(pool, 3, 4)
    assert [type(event) for event in pool.take_events()] == [BlockRemoved, BlockRemoved, BlockStored]


def test_a_store_event_carries_what_vllm_sends() -> None:
    """A stored event has the fields of a captured vLLM frame, with untagged extra keys."""
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


def test_uncomputed_blocks_are_removed_from_the_cache() -> None:
    """After a failed step its blocks are not cached, but its evictions remain."""
    pool = new_pool(2)
    pool.free_blocks(cached_blocks(pool, 1))
    pool.take_events()
    pool.get_new_blocks(1)
    blocks = cached_blocks(pool, 2)
    pool.uncache_uncomputed()
    assert pool.get_cached_block((0, block_hash(2))) is None
    assert removed_hashes(pool) == [1]
    assert blocks[0].content is None


def test_reset_fails_while_a_block_is_in_use() -> None:
    """A reset fails while a block is in use; afterwards it clears the cache and adds an event."""
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


def test_check_pool_detects_leaks_and_double_owners() -> None:
    """check_pool fails if a table and the reference counts disagree."""
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
