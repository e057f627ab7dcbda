"""Pool of KV blocks: reference counts, the free queue, and the prefix cache's map from hash to block."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from model_server.kv_events.events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockContent,
    BlockStored,
    CacheKey,
    KVEvent,
    KVEventBuilder,
)


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """One physical KV block."""

    block_id: int  # row of the KV tensors
    ref_count: int = 0  # requests that use the block; 0 means free
    # Set while the block is full and in the prefix cache.
    content: BlockContent | None = field(default=None, repr=False)


@dataclass(eq=False)
class BlockPool:
    """All KV blocks of one device, shared by the model's KV cache groups.

    Several blocks may have the same content: requests that compute the same tokens at the same time keep one
    copy each. Each copy is stored and removed by an event of its own, so subscribers must count copies.
    """

    num_blocks: int
    event_builder: KVEventBuilder
    # Called with a block that is about to be evicted, before its content is cleared.
    on_evict: Callable[[KVCacheBlock], object] | None = None

    def __post_init__(self) -> None:
        self.blocks = [KVCacheBlock(block_id) for block_id in range(self.num_blocks)]  # indexed by block id
        # Blocks with ref_count 0 by id, in eviction order. Many are still in the prefix cache; a cache hit
        # removes one from the middle.
        self.free_block_queue = OrderedDict((block.block_id, block) for block in self.blocks)
        self._cached: dict[CacheKey, dict[int, KVCacheBlock]] = {}
        self._events: list[KVEvent] = []
        # Blocks cached since the last take_events whose KV may not be computed yet, by their event.
        self._uncomputed: list[tuple[BlockStored, Sequence[KVCacheBlock]]] = []

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that no request uses; many of them are still in the prefix cache."""
        return len(self.free_block_queue)

    def get_cached_block(self, key: CacheKey) -> KVCacheBlock | None:
        copies = self._cached.get(key)
        return next(iter(copies.values())) if copies else None

    def touch(self, block: KVCacheBlock) -> None:
        """Add a reference to a cached block, whether it is free or in use."""
        if block.ref_count == 0:
            del self.free_block_queue[block.block_id]
        block.ref_count += 1

    def get_new_blocks(self, count: int) -> list[KVCacheBlock]:
        """Allocate the blocks at the head of the free queue and evict their content."""
        free = self.free_block_queue
        assert count <= len(free), f"{count} blocks requested, {len(free)} free"
        taken = [free.popitem(last=False)[1] for _ in range(count)]
        for block in taken:
            self._evict(block)
            block.ref_count = 1
        return taken

    def free_blocks(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Drop one request's reference to each of its blocks, given in chain order.

        The tail is freed first and so evicted first: a chain without its tail is still a usable prefix, a
        chain without its head is not. Blocks without cached content go to the head of the free queue.
        """
        for block in reversed(blocks):
            assert block.ref_count > 0, f"{block} is free already"
            block.ref_count -= 1
            if block.ref_count == 0:
                self.free_block_queue[block.block_id] = block
                if block.content is None:
                    self.free_block_queue.move_to_end(block.block_id, last=False)

    def cache_full_blocks(
        self,
        blocks: Sequence[KVCacheBlock],
        contents: Sequence[BlockContent],
        *,
        parent: bytes | None = None,
        token_ids: Sequence[int] | None = None,
        computed: bool = False,
    ) -> None:
        """Add full blocks of one request and group to the prefix cache and record their event.

        `parent` and `token_ids`: see `KVEventBuilder.stored`. Unless `computed`, this step computes the KV.
        """
        for block, content in zip(blocks, contents, strict=True):
            assert block.content is None, f"{block} is cached already"
            block.content = content
            self._cached.setdefault(content.key, {})[block.block_id] = block
        event = self.event_builder.stored(contents, MEDIUM_GPU, parent=parent, token_ids=token_ids)
        self._events.append(event)
        if not computed:
            self._uncomputed.append((event, blocks))

    def add_event(self, event: KVEvent) -> None:
        self._events.append(event)

    def take_events(self) -> list[KVEvent]:
        """Return the events since the last call. Blocks cached until now count as computed."""
        events, self._events = self._events, []
        self._uncomputed.clear()
        return events

    def uncache_uncomputed(self) -> list[KVCacheBlock]:
        """Remove from the prefix cache, and return, blocks whose step failed before `take_events`.

        Their stored events are dropped. Evictions of the same step did happen, so their events stay.
        """
        uncomputed = [block for _, blocks in self._uncomputed for block in blocks]
        for block in uncomputed:
            self._uncache(block)
        dropped = {id(event) for event, _ in self._uncomputed}
        self._events = [event for event in self._events if id(event) not in dropped]
        self._uncomputed.clear()
        return uncomputed

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache. Return False, and change nothing, while any block is in use."""
        if len(self.free_block_queue) < len(self.blocks):
            return False
        for block in self.blocks:
            block.content = None
        self._cached.clear()
        self._events.append(AllBlocksCleared())
        return True

    def _evict(self, block: KVCacheBlock) -> None:
        content = block.content
        if content is None:
            return
        if self.on_evict is not None:
            self.on_evict(block)
        self._uncache(block)
        self._events.append(self.event_builder.removed(content, MEDIUM_GPU))

    def _uncache(self, block: KVCacheBlock) -> None:
        assert block.content is not None
        key = block.content.key
        copies = self._cached[key]
        del copies[block.block_id]
        if not copies:
            del self._cached[key]
        block.content = None
