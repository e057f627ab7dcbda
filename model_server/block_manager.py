"""Which blocks a request holds: prefix lookup, growth, registration of full blocks, release.

In: a live request and a number of tokens. Out: its block table changed, or the answer that the pool
cannot do it. Knows the pool, not the scheduler.
"""

from collections.abc import Sequence

from model_server.blocks import Block, BlockPool
from model_server.live_request import LiveRequest


class BlockManager:
    """The only one that moves blocks between the pool and requests."""

    def __init__(self, pool: BlockPool, *, enable_prefix_caching: bool = True) -> None:
        self.pool = pool
        self._block_tokens = pool.block_tokens
        self._enable_prefix_caching = enable_prefix_caching

    def find_prefix(self, live: LiveRequest) -> list[Block]:
        """Return the longest run of blocks that hold the request's first tokens already.

        The last token is never taken from the cache: it must be computed to get the next one. So a fully
        cached prompt that ends on a block boundary computes its last block anew.
        """
        if not self._enable_prefix_caching:
            return []
        found: list[Block] = []
        for digest in live.digests_of((live.num_tokens - 1) // self._block_tokens, self._block_tokens):
            block = self.pool.find(digest)
            if block is None:
                break
            found.append(block)
        return found

    def can_hold(self, live: LiveRequest, prefix: Sequence[Block]) -> bool:
        """Tell whether all known tokens of a waiting request fit, `prefix` being shared."""
        wanted = self._blocks_for(live.num_tokens) - len(prefix)
        revived = sum(block.ref_count == 0 for block in prefix)
        return wanted + revived <= self.pool.num_free

    def adopt(self, live: LiveRequest, prefix: Sequence[Block]) -> None:
        """Start a request's block table with the blocks that were found for it."""
        assert not live.blocks
        self.pool.touch(prefix)
        self._extend(live, prefix)
        live.computed = len(prefix) * self._block_tokens
        live.registered = len(prefix)

    def grow(self, live: LiveRequest, num_tokens: int) -> bool:
        """Give the request blocks for its first `num_tokens` tokens. Returns False if too few are free."""
        missing = self._blocks_for(num_tokens) - len(live.blocks)
        if missing > self.pool.num_free:
            return False
        if missing > 0:
            self._extend(live, self.pool.allocate(missing))
        return True

    def register(self, live: LiveRequest, num_tokens: int) -> None:
        """Make the blocks findable that will be full once the first `num_tokens` tokens are computed.

        This happens before the forward pass, as in vLLM, so that a request scheduled later in the same step
        can share them: in each layer all KV of a step is written before anything reads it.
        """
        full = num_tokens // self._block_tokens
        if not self._enable_prefix_caching or full <= live.registered:
            return
        start, live.registered = live.registered, full
        digests = live.digests_of(full, self._block_tokens)
        self.pool.register(
            blocks=live.blocks[start:full],
            digests=digests[start:],
            parent=digests[start - 1] if start else None,
            token_ids=live.token_ids[start * self._block_tokens : full * self._block_tokens],
            extra_keys=[live.extra_keys(index) for index in range(start, full)],
        )

    def release(self, live: LiveRequest) -> None:
        """Take all blocks from a request; registered ones can be found until they are reused."""
        self.pool.release(live.blocks)
        live.blocks.clear()
        del live.block_ids[:]
        live.computed = live.registered = 0

    def _extend(self, live: LiveRequest, blocks: Sequence[Block]) -> None:
        live.blocks.extend(blocks)
        live.block_ids.extend(block.block_id for block in blocks)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)
