"""Invariants of block accounting: owners, reference counts, no leaks.

The checks run on an engine between two steps, or on its parts, and raise an AssertionError.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from model_server.engine.core import EngineCore
from model_server.kv_cache.block_pool import BlockPool, KVCacheBlock
from model_server.kv_cache.host_tier import HostBlock, HostTier
from model_server.kv_cache.request import Request


def check_engine(engine: EngineCore) -> None:
    """Assert that both tiers agree with the requests' block tables."""
    running, waiting = engine.scheduler.running, engine.scheduler.waiting
    check_pool(
        engine.kv_cache.block_pool,
        (table.held_blocks() for request in running for table in request.block_tables),
    )
    restoring = [
        source
        for request in running
        if request.restore is not None and not request.restore.done
        for source, _ in request.restore.pairs
    ]
    swapped = [block for request in (*running, *waiting) for block in request.swapped_blocks]
    check_host(engine.kv_cache.host_tier, [*restoring, *swapped])
    for request in waiting:
        assert not request.block_tables, f"{request.request_id} waits and holds blocks"
        assert request.restore is None, f"{request.request_id} waits for a restore without blocks"
    for request in running:
        assert request.restore is not None or not request.swapped_blocks, (
            f"{request.request_id} is back and still swapped"
        )
        _check_tables(request, engine.block_tokens)


def check_pool(pool: BlockPool, tables: Iterable[Sequence[KVCacheBlock]]) -> None:
    """Assert that every block is free once or referenced as often as its count says.

    Args:
        pool: The block pool.
        tables: The block tables of all requests that have blocks.
    """
    held = Counter(block.block_id for table in tables for block in table)
    free = list(pool.free_block_queue.values())
    assert len(free) == pool.num_free_blocks, "the free queue's length is wrong"
    for block in pool.blocks:
        assert block.ref_count == held[block.block_id], f"{block} is held {held[block.block_id]} times"
        assert (block in free) == (block.ref_count == 0), f"{block} leaked or is free while held"
        if block.content is not None:
            assert pool.get_cached_block(block.content.key) is not None, f"{block} cannot be found"
    for key in {block.content.key for block in pool.blocks if block.content is not None}:
        found = pool.get_cached_block(key)
        assert found is not None, "a content without a block"
        assert found.content is not None, "a content points to a block that lost it"
        assert found.content.key == key, "a content points to a block of another"


def check_host(host: HostTier, holders: Sequence[HostBlock] = ()) -> None:
    """Assert that every slot is used once and that blocks in use are pinned.

    Args:
        host: The host tier.
        holders: Its blocks that running restores or swapped requests use, one entry per use.
    """
    slots = [block.slot for block in host.blocks.values()]
    assert len(set(slots)) == len(slots) == host.num_used, "a slot leaked or is used twice"
    assert all(0 <= slot < host.num_blocks for slot in slots), "a slot beyond the last"
    for key, block in host.blocks.items():
        assert block.content.key == key, "a host block cannot be found"
        assert block.ready or block.pin_count, "a host block waits for a copy that nobody makes"
    for block, count in Counter(holders).items():
        assert host.blocks.get(block.content.key) is block, "a block that is needed is gone"
        assert block.pin_count >= count, "a slot that is needed may be reused"


def _check_tables(request: Request, block_tokens: int) -> None:
    assert request.block_tables, f"{request.request_id} runs without blocks"
    for table in request.block_tables:
        ids = [0 if block is None else block.block_id for block in table.blocks]
        assert ids == list(table.block_ids), "a block table and its numbers differ"
        assert all(block is None for block in table.blocks[: table.num_skipped]), (
            "a block behind the window is held"
        )
        assert None not in table.blocks[table.num_skipped :], "a hole in a block table"
        assert 0 <= request.num_computed_tokens <= len(table.blocks) * block_tokens, "tokens without a block"
