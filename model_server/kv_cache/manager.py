"""Which blocks a request holds: prefix lookup, growth, registration of full blocks, release."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Protocol

from model_server.config import EngineConfig
from model_server.errors import ConfigError
from model_server.kv_cache.block_pool import Block, BlockPool
from model_server.kv_cache.coordinator import full_prefix, resumable_prefix
from model_server.kv_cache.host_tier import BlockCopies, HostBlock, HostTier, Offload
from model_server.kv_cache.request import BlockTable, LiveRequest
from model_server.kv_events.events import MEDIUM_CPU, MEDIUM_GPU, Announcer, BlockContent, ContentKey, runs
from model_server.shapes import KvGroupSpec, blocks_behind, blocks_bound


@dataclass(frozen=True, slots=True)
class Prefix:
    """What was found for a request's first tokens."""

    length: int  # in blocks
    # Per group, each block of the prefix: on the device, in the host tier, or not needed.
    entries: Sequence[Sequence[Block | HostBlock | None]]
    full_length: int  # what the groups with full attention hold


@dataclass(eq=False)
class BlockManager:
    """The only one that moves blocks between the pool and requests."""

    pool: BlockPool
    offload: Offload
    groups: Sequence[KvGroupSpec]
    _: KW_ONLY
    block_tokens: int
    chunk_tokens: int  # most tokens of one request in a step
    enable_prefix_caching: bool = True
    swap: bool = False  # whether a preempted request's full blocks are held in the host tier, with room there

    def __post_init__(self) -> None:
        self._needs = [blocks_behind(group.window_tokens, self.block_tokens) for group in self.groups]
        # Without a group that tells where prompts part, what to retain in a window cannot be known: all.
        self._selective = None in self._needs

    @property
    def _host(self) -> HostTier:
        return self.offload.host

    def blocks_bound(self, num_tokens: int) -> int:
        """Return the most blocks that a request of this many tokens holds at any time."""
        return blocks_bound(self._needs, num_tokens, self.chunk_tokens, self.block_tokens)

    def expect(self, live: LiveRequest, most: int) -> int:
        """Look how much of a waiting request is cached; returns the blocks looked up, `most` at most."""
        if not self.enable_prefix_caching:
            return 0
        lead = self._needs.index(None) if self._selective else 0
        limit = (live.num_tokens - 1) // self.block_tokens
        found, looked_up = live.expected_blocks, 1
        if found and self._find((lead, live.digests[found - 1])) is None:
            found = 0
        while found < limit and looked_up < most:
            looked_up += 1
            if self._find((lead, live.digest(found, self.block_tokens))) is None:
                break
            found += 1
        live.expected_blocks, live.expected_tokens = found, found * self.block_tokens
        return looked_up

    def find_prefix(self, live: LiveRequest) -> Prefix:
        """Return the longest run of blocks that hold the request's first tokens already.

        The last token is never taken from the cache: it must be computed to get the next one. So a fully
        cached prompt that ends on a block boundary computes its last block anew.
        """
        if not self.enable_prefix_caching:
            return Prefix(0, [[] for _ in self.groups], 0)
        if not all(block.ready for block in live.swapped):
            self.offload.drain(stores_only=True)  # what is on its way would be computed again

        def find(group: int, index: int) -> Block | HostBlock | None:
            return self._find((group, live.digest(index, self.block_tokens)))

        def is_cached(group: int, index: int) -> bool:
            return find(group, index) is not None

        full = full_prefix((live.num_tokens - 1) // self.block_tokens, self._needs, is_cached)
        length = resumable_prefix(full, self._needs, is_cached)
        entries = [
            [
                None if need is not None and index < length - need else find(group, index)
                for index in range(length)
            ]
            for group, need in enumerate(self._needs)
        ]
        return Prefix(length, entries, full)

    def can_hold(self, live: LiveRequest, prefix: Prefix, reserved: int) -> bool:
        """Tell whether a waiting request fits, `prefix` shared, beside `reserved` blocks for others."""
        found = [entry for entries in prefix.entries for entry in entries if isinstance(entry, Block)]
        revived = sum(block.ref_count == 0 for block in found)
        wanted = self.blocks_bound(live.num_tokens) - len(found) + revived
        return wanted + reserved <= self.pool.num_free

    def still_needed(self, live: LiveRequest) -> int:
        """Return how many blocks a request's known tokens will need beside those that it holds."""
        held = sum(len(table.blocks) - table.rolled for table in live.tables)
        return max(0, self.blocks_bound(live.num_tokens) - held)

    def adopt(self, live: LiveRequest, prefix: Prefix) -> None:
        """Start a request's block tables with what was found for it; host blocks begin their way back."""
        assert not live.tables
        live.tables = [BlockTable() for _ in self.groups]
        live.computed = prefix.length * self.block_tokens
        if self._selective:
            live.retained_ends = {prefix.full_length, (live.num_tokens - 1) // self.block_tokens}
        self._bring_back(live, prefix.entries)
        for table, need in zip(live.tables, self._needs, strict=True):
            table.registered = prefix.length
            table.rolled = 0 if need is None else max(0, prefix.length - need)
        if live.restore is None:
            self.let_go(live)

    def grow(self, live: LiveRequest, num_tokens: int) -> bool:
        """Give the request blocks for its first `num_tokens` tokens. Returns False if too few are free."""
        self._roll(live)
        wanted = -(-num_tokens // self.block_tokens)
        missing = [max(0, wanted - len(table.blocks)) for table in live.tables]
        if not any(missing):
            return True
        if sum(missing) > self.pool.num_free:
            return False
        for table, count in zip(live.tables, missing, strict=True):
            if count:
                table.extend(self.pool.allocate(count))
        return True

    def register(self, live: LiveRequest, num_tokens: int) -> None:
        """Make the blocks findable that will be full once the first `num_tokens` tokens are computed.

        This happens before the forward pass, as in vLLM, so that a request scheduled later in the same step
        can share them: in each layer all KV of a step is written before anything reads it.
        """
        full = num_tokens // self.block_tokens
        if not self.enable_prefix_caching:
            return
        for group, table in enumerate(live.tables):
            if full <= table.registered:
                continue
            start, table.registered = table.registered, full
            need = self._needs[group]
            if need is None or not self._selective:
                self._register(live, group, range(start, full), start, full)
                continue
            ends = [end for end in live.retained_ends if start < end <= full]
            indices = sorted({index for end in ends for index in range(max(0, end - need), end)})
            self._register(live, group, indices, start, full)

    def finish_restore(self, live: LiveRequest) -> None:
        """Make findable what has come back for a request."""
        assert live.restore is not None
        targets = {id(source.content): target for source, target in live.restore.pairs}
        contents = [source.content for source, _ in live.restore.pairs]
        live.restore = None
        for run in runs(contents):
            self.pool.register([targets[id(content)] for content in run], run, computed=True)
        self.let_go(live)

    def preempt(self, live: LiveRequest) -> None:
        """Take all blocks from a request that will run again.

        With swap what it has computed is held in the host tier until it is back, as far as there is room. So
        at most what is in a block that is not full is computed again.
        """
        if self.swap and live.restore is None:
            self._register_tail(live)
            for block in (block for table in live.tables for block in table.held()):
                if (kept := self.offload.keep(block)) is not None:
                    # At once: the next block may need a slot, and would take one that nobody holds.
                    self._host.hold(kept)
                    live.swapped.append(kept)
        self.release(live)

    def release(self, live: LiveRequest) -> None:
        """Take all blocks from a request; registered ones can be found until they are reused."""
        if live.restore is not None:
            self.offload.abandon()
            live.restore = None
        else:
            self._register_tail(live)
        for table in live.tables:
            held = table.held()
            for block in reversed(held):
                self.offload.keep(block)
            self.pool.release(held)
        live.tables = []
        live.computed = 0

    def let_go(self, live: LiveRequest) -> None:
        """Hold nothing more in the host tier for a request that was swapped out."""
        for block in live.swapped:
            self._host.release(block)
        live.swapped.clear()

    def _find(self, key: ContentKey) -> Block | HostBlock | None:
        return self.pool.find(key) or self._host.find(key)

    def _roll(self, live: LiveRequest) -> None:
        """Free what no token from `computed` on sees any more."""
        for need, table in zip(self._needs, live.tables, strict=True):
            if need is None:
                continue
            # The first block needed to go on here, and to resume at the block that this is in.
            first = min(max(0, live.computed // self.block_tokens - need), len(table.blocks))
            gone = [block for block in table.blocks[table.rolled : first] if block is not None]
            for index in range(table.rolled, first):
                table.replace(index, None)
            table.rolled = max(table.rolled, first)
            self.pool.release(gone)

    def _bring_back(self, live: LiveRequest, entries: Sequence[Sequence[Block | HostBlock | None]]) -> None:
        """Fill the tables: device blocks are shared, host blocks restored into new ones."""
        everything = [entry for group in entries for entry in group]
        sources = [entry for entry in everything if isinstance(entry, HostBlock)]
        for source in sources:
            self._host.hold(source)
            self._host.touch(source.content.key)
        for entry in everything:
            if isinstance(entry, Block):
                self.pool.touch(entry)
        targets = self.pool.allocate(len(sources))
        if sources:
            live.restore = self.offload.restore(list(zip(sources, targets, strict=True)))
        rest = iter(targets)
        for table, group in zip(live.tables, entries, strict=True):
            table.extend([next(rest) if isinstance(entry, HostBlock) else entry for entry in group])

    def _register_tail(self, live: LiveRequest) -> None:
        """Keep in windowed groups what the next turn of a conversation needs to resume at the end."""
        full = live.computed // self.block_tokens
        for group, need in enumerate(self._needs):
            if need is not None and self._selective and self.enable_prefix_caching and live.tables:
                self._register(live, group, range(max(0, full - need), full), full, full, computed=True)

    def _register(
        self,
        live: LiveRequest,
        group: int,
        indices: Sequence[int],
        start: int,
        stop: int,
        *,
        computed: bool = False,
    ) -> None:
        """Register those of a request's blocks that are there and are not; tell of [start, stop)."""
        blocks = live.tables[group].blocks
        fresh = [
            (index, block)
            for index in indices
            if (block := blocks[index]) is not None and block.content is None
        ]
        if not fresh:
            return
        start = min(start, fresh[0][0])
        self.pool.register(
            [block for _, block in fresh],
            [self._content(live, group, index) for index, _ in fresh],
            parent=live.digest(start - 1, self.block_tokens) if start else None,
            token_ids=live.token_ids[start * self.block_tokens : stop * self.block_tokens],
            computed=computed,
        )

    def _content(self, live: LiveRequest, group: int, index: int) -> BlockContent:
        start = index * self.block_tokens
        return BlockContent(
            group=group,
            digest=live.digest(index, self.block_tokens),
            parent=live.digest(index - 1, self.block_tokens) if index else None,
            token_ids=tuple(live.token_ids[start : start + self.block_tokens]),
            extra_keys=live.extra_keys(index),
            lora=None if live.adapter is None else (live.adapter.lora_id, live.adapter.name),
        )


class CacheMemory(BlockCopies, Protocol):
    """The memory of both tiers, on all ranks."""

    @property
    def kv_groups(self) -> Sequence[KvGroupSpec]:
        """Layers that share a block table."""

    def allocate(self, host_blocks: int) -> None:
        """Allocate the device's pool and this many host blocks, all empty."""


class KvCache:
    """All parts of the cache; a ConfigError where the longest request allowed does not fit."""

    def __init__(self, config: EngineConfig, memory: CacheMemory, max_model_len: int) -> None:
        self.announcer = announcer = Announcer(memory.kv_groups, config.block_tokens)  # writes the events
        self.pool = BlockPool(config.gpu_blocks, announcer)  # the device's blocks
        self.host = HostTier(_host_blocks(config, memory), announcer, self.pool.announce)  # the host tier's
        self.offload = Offload(self.pool, self.host, memory)  # the traffic between them
        memory.allocate(self.host.num_blocks)
        # Gives blocks to requests.
        self.manager = BlockManager(
            self.pool,
            self.offload,
            memory.kv_groups,
            block_tokens=config.block_tokens,
            chunk_tokens=config.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            swap=config.preemption_mode == "swap",
        )
        if (needed := self.manager.blocks_bound(max_model_len)) > config.gpu_blocks:
            # With this a request that runs alone always fits, so preemption cannot go round in circles.
            raise ConfigError(
                f"max_model_len is {max_model_len}, which takes {needed} blocks of {config.block_tokens} "
                f"tokens, but there are {config.gpu_blocks}; add blocks or lower max_model_len"
            )

    def contents(self) -> dict[str, list[BlockContent]]:
        """Return what can be found in each tier, by medium; a content once for each copy."""
        return {
            MEDIUM_GPU: [block.content for block in self.pool.blocks if block.content is not None],
            MEDIUM_CPU: [block.content for block in self.host.kept.values() if block.ready],
        }

    def reset(self) -> bool:
        """Forget the content of both tiers; returns False, with nothing forgotten, while blocks are held."""
        self.offload.drain()
        if self.host.is_held or not self.pool.reset():  # held: by requests that are swapped out
            return False
        self.host.clear()
        return True


def _host_blocks(config: EngineConfig, memory: CacheMemory) -> int:
    if config.cpu_gib is None:
        return config.cpu_blocks
    return int(config.cpu_gib * 2**30) // memory.block_bytes
