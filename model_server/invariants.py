"""The check that every block has its right owners, counts are right and nothing leaks.

In: a scheduler with its requests, the pool and the host tier, between two steps. Out: nothing, or an
AssertionError that says which book is wrong.
"""

from model_server.blocks import BlockPool
from model_server.host_tier import HostTier
from model_server.live_request import LiveRequest
from model_server.scheduler import Scheduler


def check_invariants(scheduler: Scheduler, pool: BlockPool, host: HostTier, block_tokens: int) -> None:
    """Assert that the books of both tiers agree with the requests'.

    Args:
        scheduler: Knows all requests.
        pool: The device's blocks.
        host: The host tier.
        block_tokens: Tokens in one block.
    """
    pool.check_invariants(table.held() for live in scheduler.running for table in live.tables)
    swapped = [
        entry
        for live in scheduler.waiting
        for entries in live.swapped or ()
        for entry in entries
        if entry is not None
    ]
    restoring = [
        source
        for live in scheduler.running
        if live.restore is not None and not live.restore.done
        for source, _ in live.restore.pairs
    ]
    host.check_invariants(swapped, restoring)
    for live in scheduler.waiting:
        assert not live.tables, f"{live.request_id} waits and holds blocks"
        assert live.restore is None, f"{live.request_id} waits for a restore without blocks"
    for live in scheduler.running:
        assert live.swapped is None, f"{live.request_id} runs and is swapped out"
        _check_tables(live, block_tokens)


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
