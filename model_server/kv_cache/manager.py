"""KV cache manager: prefix lookup, block allocation, caching of full blocks, and freeing, per request."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Protocol, TypeAlias

from model_server.config import EngineConfig
from model_server.errors import ConfigError
from model_server.kv_cache.block_pool import BlockPool, KVCacheBlock
from model_server.kv_cache.host_tier import BlockCopies, HostBlock, HostTier, OffloadingManager
from model_server.kv_cache.request import BlockTable, Request
from model_server.kv_events.events import MEDIUM_CPU, MEDIUM_GPU, BlockContent, CacheKey, KVEventBuilder, runs
from model_server.shapes.shape import KvGroupSpec, blocks_behind, blocks_bound

# (group, block index) -> whether the block's content is cached.
_IsCached: TypeAlias = Callable[[int, int], bool]


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Cached blocks at the start of a request."""

    num_blocks: int
    # Per group, each block of the prefix: device block, host block, or None if the window does not need it.
    entries: Sequence[Sequence[KVCacheBlock | HostBlock | None]]
    full_attention_blocks: int  # prefix in blocks that the full-attention groups have cached


@dataclass(eq=False)
class KVCacheManager:
    """Sole owner of the assignment of blocks to requests."""

    block_pool: BlockPool
    offloading: OffloadingManager
    groups: Sequence[KvGroupSpec]
    _: KW_ONLY
    block_tokens: int
    chunk_tokens: int  # maximum tokens of one request in a step
    enable_prefix_caching: bool = True
    swap: bool = False  # whether preemption pins the request's full blocks in the host tier, given room

    def __post_init__(self) -> None:
        # Per group, the blocks needed behind a position; None for full attention.
        self._windows = [blocks_behind(group.window_tokens, self.block_tokens) for group in self.groups]
        # Only a full-attention group shows where prompts diverge. Without one, windows retain every block.
        self._selective = None in self._windows
        self._host_tier = self.offloading.host_tier

    def max_blocks(self, num_tokens: int) -> int:
        """Return the most blocks that a request of this many tokens uses at any time."""
        return blocks_bound(self.groups, num_tokens, self.chunk_tokens, self.block_tokens)

    def update_expected_hits(self, request: Request, max_lookups: int) -> int:
        """Update the expected cache hits of a waiting request; return the number of blocks looked up."""
        if not self.enable_prefix_caching:
            return 0
        lead = self._windows.index(None) if self._selective else 0
        limit = (request.num_tokens - 1) // self.block_tokens
        found, lookups = request.expected_hit_tokens // self.block_tokens, 1
        if found and self._get_cached((lead, request.block_hashes[found - 1])) is None:
            found = 0
        while found < limit and lookups < max_lookups:
            lookups += 1
            if self._get_cached((lead, request.block_hash(found, self.block_tokens))) is None:
                break
            found += 1
        request.expected_hit_tokens = found * self.block_tokens
        return lookups

    def get_computed_blocks(self, request: Request) -> CachedPrefix:
        """Return the longest cached prefix of a request, at most all tokens but the last.

        The last token must be computed to sample the next one. So a fully cached prompt that ends on a block
        boundary computes its last block again.
        """
        if not self.enable_prefix_caching:
            return CachedPrefix(0, [[] for _ in self.groups], 0)
        if not all(block.ready for block in request.swapped_blocks):
            # Blocks still being stored would be computed again.
            self.offloading.wait_for_all(stores_only=True)

        def get(group: int, index: int) -> KVCacheBlock | HostBlock | None:
            return self._get_cached((group, request.block_hash(index, self.block_tokens)))

        def is_cached(group: int, index: int) -> bool:
            return get(group, index) is not None

        limit = (request.num_tokens - 1) // self.block_tokens
        full, length = _cached_prefix(limit, self._windows, is_cached)
        entries = [
            [
                None if window is not None and index < length - window else get(group, index)
                for index in range(length)
            ]
            for group, window in enumerate(self._windows)
        ]
        return CachedPrefix(length, entries, full)

    def can_fit(self, request: Request, prefix: CachedPrefix, reserved: int) -> bool:
        """Return whether a waiting request fits if it shares `prefix` and `reserved` blocks stay free."""
        found = [entry for entries in prefix.entries for entry in entries if isinstance(entry, KVCacheBlock)]
        revived = sum(block.ref_count == 0 for block in found)
        wanted = self.max_blocks(request.num_tokens) - len(found) + revived
        return wanted + reserved <= self.block_pool.num_free_blocks

    def num_blocks_to_allocate(self, request: Request) -> int:
        """Return how many more blocks a running request needs for its known tokens."""
        used = sum(len(table.blocks) - table.num_skipped for table in request.block_tables)
        return max(0, self.max_blocks(request.num_tokens) - used)

    def attach_prefix(self, request: Request, prefix: CachedPrefix) -> None:
        """Create a request's block tables from its cached prefix and queue restores of host blocks."""
        assert not request.block_tables
        request.block_tables = [BlockTable() for _ in self.groups]
        request.num_computed_tokens = prefix.num_blocks * self.block_tokens
        if self._selective:
            last = (request.num_tokens - 1) // self.block_tokens
            request.resume_points = {prefix.full_attention_blocks, last}
        self._fill_tables(request, prefix.entries)
        for table, window in zip(request.block_tables, self._windows, strict=True):
            table.num_cached_blocks = prefix.num_blocks
            table.num_skipped = 0 if window is None else max(0, prefix.num_blocks - window)
        if request.restore is None:
            self.unpin_swapped_blocks(request)

    def allocate_slots(self, request: Request, num_tokens: int) -> bool:
        """Allocate blocks for a request's first `num_tokens` tokens; return False if too few are free."""
        self._free_skipped_blocks(request)
        wanted = -(-num_tokens // self.block_tokens)
        missing = [max(0, wanted - len(table.blocks)) for table in request.block_tables]
        if not any(missing):
            return True
        if sum(missing) > self.block_pool.num_free_blocks:
            return False
        for table, count in zip(request.block_tables, missing, strict=True):
            if count:
                table.extend(self.block_pool.get_new_blocks(count))
        return True

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Cache the blocks that are full once the first `num_tokens` tokens are computed.

        As in vLLM, this precedes the forward pass, so that a request scheduled later in the same step can
        share the blocks: each layer writes all KV of a step before it reads any.
        """
        full = num_tokens // self.block_tokens
        if not self.enable_prefix_caching:
            return
        for group, table in enumerate(request.block_tables):
            if full <= table.num_cached_blocks:
                continue
            start, table.num_cached_blocks = table.num_cached_blocks, full
            window = self._windows[group]
            if window is None or not self._selective:
                self._cache_range(request, group, range(start, full), start, full)
                continue
            ends = [end for end in request.resume_points if start < end <= full]
            indices = sorted({index for end in ends for index in range(max(0, end - window), end)})
            self._cache_range(request, group, indices, start, full)

    def finish_restore(self, request: Request) -> None:
        """Add a request's restored blocks to the prefix cache."""
        assert request.restore is not None
        targets = {id(source.content): target for source, target in request.restore.pairs}
        contents = [source.content for source, _ in request.restore.pairs]
        request.restore = None
        for run in runs(contents):
            self.block_pool.cache_full_blocks([targets[id(content)] for content in run], run, computed=True)
        self.unpin_swapped_blocks(request)

    def preempt(self, request: Request) -> None:
        """Free all blocks of a request that will run again.

        With `swap`, its computed full blocks are pinned in the host tier until they are restored, as far as
        there is room. Then at most one partial block is computed again.
        """
        if self.swap and request.restore is None:
            self._cache_tail(request)
            for block in (block for table in request.block_tables for block in table.held_blocks()):
                if (stored := self.offloading.store(block)) is not None:
                    # Pin it at once: storing the next block may evict an unpinned one.
                    stored.pin_count += 1
                    request.swapped_blocks.append(stored)
        self.free(request)

    def free(self, request: Request) -> None:
        """Free all blocks of a request. Cached ones stay in the prefix cache until they are reused."""
        if request.restore is not None:
            self.offloading.abandon(request.restore)
            request.restore = None
        else:
            self._cache_tail(request)
        for table in request.block_tables:
            held = table.held_blocks()
            for block in reversed(held):
                self.offloading.store(block)
            self.block_pool.free_blocks(held)
        request.block_tables = []
        request.num_computed_tokens = 0

    def unpin_swapped_blocks(self, request: Request) -> None:
        for block in request.swapped_blocks:
            self._host_tier.unpin(block)
        request.swapped_blocks.clear()

    def _get_cached(self, key: CacheKey) -> KVCacheBlock | HostBlock | None:
        return self.block_pool.get_cached_block(key) or self._host_tier.get(key)

    def _free_skipped_blocks(self, request: Request) -> None:
        """Free blocks that have left the window of every token still to be computed."""
        for window, table in zip(self._windows, request.block_tables, strict=True):
            if window is None:
                continue
            # Keep what the next token needs, and what resuming at the start of its block needs.
            first = min(max(0, request.num_computed_tokens // self.block_tokens - window), len(table.blocks))
            self.block_pool.free_blocks(table.skip(first))

    def _fill_tables(
        self, request: Request, entries: Sequence[Sequence[KVCacheBlock | HostBlock | None]]
    ) -> None:
        """Fill a request's tables: share device blocks, restore host blocks into new ones."""
        everything = [entry for group in entries for entry in group]
        sources = [entry for entry in everything if isinstance(entry, HostBlock)]
        for source in sources:
            source.pin_count += 1
            self._host_tier.touch(source.content.key)
        for entry in everything:
            if isinstance(entry, KVCacheBlock):
                self.block_pool.touch(entry)
        targets = self.block_pool.get_new_blocks(len(sources))
        if sources:
            request.restore = self.offloading.restore(list(zip(sources, targets, strict=True)))
        rest = iter(targets)
        for table, group in zip(request.block_tables, entries, strict=True):
            table.extend([next(rest) if isinstance(entry, HostBlock) else entry for entry in group])

    def _cache_tail(self, request: Request) -> None:
        """Cache, in sliding-window groups, the last blocks that a conversation's next turn needs."""
        full = request.num_computed_tokens // self.block_tokens
        for group, window in enumerate(self._windows):
            if window is not None and self._selective and self.enable_prefix_caching and request.block_tables:
                indices = range(max(0, full - window), full)
                self._cache_range(request, group, indices, full, full, computed=True)

    def _cache_range(
        self,
        request: Request,
        group: int,
        indices: Sequence[int],
        start: int,
        stop: int,
        *,
        computed: bool = False,
    ) -> None:
        """Cache those of a request's blocks that exist and are not cached; the event covers [start, stop)."""
        blocks = request.block_tables[group].blocks
        fresh = [
            (index, block)
            for index in indices
            if (block := blocks[index]) is not None and block.content is None
        ]
        if not fresh:
            return
        start = min(start, fresh[0][0])
        self.block_pool.cache_full_blocks(
            [block for _, block in fresh],
            [self._content(request, group, index) for index, _ in fresh],
            parent=request.block_hash(start - 1, self.block_tokens) if start else None,
            token_ids=request.token_ids[start * self.block_tokens : stop * self.block_tokens],
            computed=computed,
        )

    def _content(self, request: Request, group: int, index: int) -> BlockContent:
        start, lora = index * self.block_tokens, request.lora_request
        return BlockContent(
            group=group,
            block_hash=request.block_hash(index, self.block_tokens),
            parent=request.block_hash(index - 1, self.block_tokens) if index else None,
            token_ids=tuple(request.token_ids[start : start + self.block_tokens]),
            extra_keys=request.extra_keys(index),
            lora=None if lora is None else (lora.lora_id, lora.name),
        )


def _cached_prefix(limit: int, windows: Sequence[int | None], is_cached: _IsCached) -> tuple[int, int]:
    """Return the longest cached prefixes of at most `limit` blocks, by vLLM's rule for hybrid models.

    Returns:
        Blocks cached without a gap in all full-attention groups, and the blocks of these at whose end every
        sliding window is cached too.
    """
    full = limit
    for group, window in enumerate(windows):
        if window is None:
            full = next((index for index in range(full) if not is_cached(group, index)), full)
    length, checked = full, -1
    while length != checked:
        checked = length
        for group, window in enumerate(windows):
            if window is not None:
                # A missing block is the next end to try: every longer end that needs it fails, too.
                while (hole := _last_hole(group, max(0, length - window), length, is_cached)) is not None:
                    length = hole
    return full, length


def _last_hole(group: int, first: int, end: int, is_cached: _IsCached) -> int | None:
    return next((index for index in range(end - 1, first - 1, -1) if not is_cached(group, index)), None)


class CacheMemory(BlockCopies, Protocol):
    """Memory of both cache tiers, on all ranks."""

    @property
    def kv_groups(self) -> Sequence[KvGroupSpec]:
        """Groups of layers that share a block table."""

    def allocate(self, host_blocks: int) -> None:
        """Allocate the device's pool and `host_blocks` host slots, all empty."""


class KVCache:
    """Both tiers of the KV cache with their manager; a ConfigError if the longest request does not fit."""

    def __init__(self, config: EngineConfig, memory: CacheMemory, max_model_len: int) -> None:
        assert config.gpu_blocks is not None, "the number of blocks is still to be found"
        gib = config.cpu_gib
        host_blocks = config.cpu_blocks if gib is None else int(gib * 2**30) // memory.block_bytes
        memory.allocate(host_blocks)  # first: too many blocks fail at once there
        self.event_builder = KVEventBuilder(memory.kv_groups, config.block_tokens)
        self.block_pool = BlockPool(config.gpu_blocks, self.event_builder)
        self.host_tier = HostTier(host_blocks, self.event_builder, self.block_pool.add_event)
        self.offloading = OffloadingManager(self.block_pool, self.host_tier, memory)
        self.manager = KVCacheManager(
            self.block_pool,
            self.offloading,
            memory.kv_groups,
            block_tokens=config.block_tokens,
            chunk_tokens=config.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            swap=config.preemption_mode == "swap",
        )
        if (needed := self.manager.max_blocks(max_model_len)) > config.gpu_blocks:
            # A request that runs alone must always fit; otherwise preemption would never end.
            raise ConfigError(
                f"max_model_len is {max_model_len}, which takes {needed} blocks of {config.block_tokens} "
                f"tokens, but there are {config.gpu_blocks}; add blocks or lower max_model_len"
            )

    def contents(self) -> dict[str, list[BlockContent]]:
        """Return the cached blocks of each tier, by medium, one entry per copy."""
        return {
            MEDIUM_GPU: [block.content for block in self.block_pool.blocks if block.content is not None],
            MEDIUM_CPU: [block.content for block in self.host_tier.blocks.values() if block.ready],
        }

    def reset(self) -> bool:
        """Clear both tiers. Return False, and change nothing, while any block is in use."""
        self.offloading.wait_for_all()
        # Swapped-out requests pin host blocks although they use no device block.
        if self.host_tier.is_pinned or not self.block_pool.reset_prefix_cache():
            return False
        self.host_tier.clear()
        return True
