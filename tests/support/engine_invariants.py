"""Invariants of the engine's KV cache: owners, reference counts and free blocks agree.

The checks take an engine between two steps, or its parts, and raise an AssertionError that names the problem.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from model_server.engine.core import Engine
from model_server.kv_cache.block_pool import Block, BlockPool
from model_server.kv_cache.host_tier import HostBlock, HostTier
from model_server.requests import LiveRequest


def check_engine(engine: Engine) -> None:
    """Assert that both tiers agree with the requests' block tables."""
    running, waiting = engine.scheduler.running, engine.scheduler.waiting
    check_pool(engine.cache.pool, (table.held() for live in running for table in live.tables))
    restoring = [
        source
        for live in running
        if live.restore is not None and not live.restore.done
        for source, _ in live.restore.pairs
    ]
    swapped = [block for live in (*running, *waiting) for block in live.swapped]
    check_host(engine.cache.host, [*restoring, *swapped])
    for live in waiting:
        assert not live.tables, f"{live.request_id} waits and holds blocks"
        assert live.restore is None, f"{live.request_id} waits for a restore without blocks"
    for live in running:
        assert live.restore is not None or not live.swapped, f"{live.request_id} is back and still swapped"
        _check_tables(live, engine.block_tokens)


def check_pool(pool: BlockPool, tables: Iterable[Sequence[Block]]) -> None:
    """Assert that every block is either free once or held as often as its reference count.

    Args:
        pool: All blocks.
        tables: The block tables of all requests that hold blocks.
    """
    held = Counter(block.block_id for table in tables for block in table)
    free = list(pool.free.values())
    assert len(free) == pool.num_free, "the free queue's length is wrong"
    for block in pool.blocks:
        assert block.ref_count == held[block.block_id], f"{block} is held {held[block.block_id]} times"
        assert (block in free) == (block.ref_count == 0), f"{block} leaked or is free while held"
        if block.content is not None:
            assert pool.find(block.content.key) is not None, f"{block} cannot be found"
    for key in {block.content.key for block in pool.blocks if block.content is not None}:
        found = pool.find(key)
        assert found is not None, "a content without a block"
        assert found.content is not None, "a content points to a block that lost it"
        assert found.content.key == key, "a content points to a block of another"


def check_host(host: HostTier, holders: Sequence[HostBlock] = ()) -> None:
    """Assert that every slot is used once and that needed blocks are kept.

    Args:
        host: The host tier.
        holders: Its blocks that running requests read or swapped ones hold, once per request.
    """
    slots = [block.slot for block in host.kept.values()]
    assert len(set(slots)) == len(slots) == host.num_used, "a slot leaked or is used twice"
    assert all(0 <= slot < host.num_blocks for slot in slots), "a slot beyond the last"
    for key, block in host.kept.items():
        assert block.content.key == key, "a host block cannot be found"
        assert block.ready or block.holders, "a host block waits for a copy that is not under way"
    for block, count in Counter(holders).items():
        assert host.kept.get(block.content.key) is block, "a block that is needed is gone"
        assert block.holders >= count, "a slot that is needed may be reused"


def _check_tables(live: LiveRequest, block_tokens: int) -> None:
    assert live.tables, f"{live.request_id} runs without blocks"
    for table in live.tables:
        ids = [0 if block is None else block.block_id for block in table.blocks]
        assert ids == list(table.block_ids), "a block table and its numbers differ"
        assert all(block is None for block in table.blocks[: table.rolled]), (
            "a block behind the window is held"
        )
        assert None not in table.blocks[table.rolled :], "a hole in a block table"
        assert 0 <= live.computed <= len(table.blocks) * block_tokens, "tokens without a block"
