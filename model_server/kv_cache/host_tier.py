"""Host-memory tier of the KV cache, and block transfers between it and the device's pool.

Works with synchronous and asynchronous copies alike: a block can be found, read or announced only after its
copy has completed.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from model_server.kv_cache.block_pool import BlockPool, KVCacheBlock
from model_server.kv_events.events import MEDIUM_CPU, BlockContent, CacheKey, KVEvent, KVEventBuilder, runs

TRANSFER_BYTES = 64 * 2**20  # most bytes of one store, and of one chunk of a copy on a device
_RUNNING_STORES_MAX = 2  # as many as a device has buffers for


@dataclass(slots=True, eq=False, repr=False)
class HostBlock:
    """One slot of host memory with its content."""

    slot: int  # row of the host tensors
    content: BlockContent
    pin_count: int = 1  # running copies and swapped-out requests that use it; evictable at 0
    ready: bool = False  # whether the copy into the slot has completed


@dataclass(eq=False)
class HostTier:
    """LRU cache of KV blocks in a fixed number of host memory slots."""

    num_blocks: int  # slots
    event_builder: KVEventBuilder
    add_event: Callable[[KVEvent], None]
    # Blocks present or being stored, least recently used first.
    blocks: OrderedDict[CacheKey, HostBlock] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self._free_slots = list(range(self.num_blocks - 1, -1, -1))

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free_slots)

    @property
    def is_pinned(self) -> bool:
        """True if any block is being copied or is pinned for a request."""
        return any(block.pin_count for block in self.blocks.values())

    def get(self, key: CacheKey) -> HostBlock | None:
        """Return the block with this hash if its content can be restored."""
        block = self.blocks.get(key)
        return block if block is not None and block.ready else None

    def touch(self, key: CacheKey) -> HostBlock | None:
        """Mark a block as just used and return it; its content may still be being stored."""
        if key in self.blocks:
            self.blocks.move_to_end(key)
        return self.blocks.get(key)

    def reserve(self, content: BlockContent) -> HostBlock | None:
        """Pin a slot for a content until `complete_store`; return None when all slots are pinned."""
        slot = self._take_slot()
        if slot is None:
            return None
        block = self.blocks[content.key] = HostBlock(slot, content)
        return block

    def complete_store(self, blocks: Sequence[HostBlock]) -> None:
        """Unpin and announce blocks whose copy is done, given children first; events list parents first."""
        contents = []
        for block in reversed(blocks):
            block.ready = True
            block.pin_count -= 1
            if self.blocks.get(block.content.key) is block:
                contents.append(block.content)
        for run in runs(contents):
            self.add_event(self.event_builder.stored(run, MEDIUM_CPU))

    def unpin(self, block: HostBlock) -> None:
        """Drop one pin. The last pin of a block whose store failed frees its slot."""
        assert block.pin_count > 0, "unpinned more often than pinned"
        block.pin_count -= 1
        if not block.ready and not block.pin_count:
            del self.blocks[block.content.key]
            self._free_slots.append(block.slot)

    def clear(self) -> None:
        """Drop all blocks, none of which may be pinned. The pool's reset announces it for both tiers."""
        assert not self.is_pinned, "a block is pinned"
        self._free_slots.extend(block.slot for block in self.blocks.values())
        self.blocks.clear()

    def _take_slot(self) -> int | None:
        if self._free_slots:
            return self._free_slots.pop()
        for key, block in self.blocks.items():
            if not block.pin_count:
                del self.blocks[key]
                self.add_event(self.event_builder.removed(block.content, MEDIUM_CPU))
                return block.slot
        return None


class Transfer(Protocol):
    """A block copy that may still be running."""

    def done(self) -> bool: ...

    def wait(self) -> None: ...


class BlockCopies(Protocol):
    """Copies of blocks between device and host, ordered with one another and with the model's steps."""

    block_bytes: int  # bytes of one block

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Transfer:
        """Copy device blocks into host slots. Later steps may overwrite the blocks."""

    def restore(self, slots: Sequence[int], blocks: Sequence[int]) -> Transfer:
        """Copy host slots into device blocks."""

    def fence(self) -> None:
        """Make later steps wait, on the device, for the running restores."""

    def close(self) -> None:
        """Release the memory. The object cannot be used again."""


@dataclass(slots=True, eq=False)
class Restore:
    """A request's blocks that are copied from the host tier to the device."""

    pairs: list[tuple[HostBlock, KVCacheBlock]]  # source and target of each copy
    done: bool = False  # whether all copies have completed


@dataclass(eq=False)
class OffloadingManager:
    """Stores evicted and freed blocks in the host tier, and restores them to the device's pool."""

    block_pool: BlockPool
    host_tier: HostTier
    copies: BlockCopies
    swapped_in_blocks: int = 0  # blocks restored since start
    swapped_out_blocks: int = 0  # blocks stored since start
    restores: int = 0  # times that a request waited for a restore

    def __post_init__(self) -> None:
        # Queued until `start_transfers`: (device block, host block) to store, and restores.
        self._queued_stores: list[tuple[KVCacheBlock, HostBlock]] = []
        self._queued_restores: list[Restore] = []
        self._stores: deque[tuple[Transfer, list[HostBlock]]] = deque()
        self._restores: deque[tuple[Transfer, list[Restore]]] = deque()
        self.block_pool.on_evict = self.store

    def store(self, block: KVCacheBlock) -> HostBlock | None:
        """Queue a store unless the host tier has the content; return the host block, None without a slot."""
        content = block.content
        if content is None or not self.host_tier.num_blocks:
            return None
        stored = self.host_tier.touch(content.key)
        if stored is None and (stored := self.host_tier.reserve(content)) is not None:
            self._queued_stores.append((block, stored))
        return stored

    def restore(self, pairs: list[tuple[HostBlock, KVCacheBlock]]) -> Restore:
        """Queue copies to the device. The caller has pinned the host blocks; completion unpins them."""
        restore = Restore(pairs)
        self._queued_restores.append(restore)
        return restore

    def abandon(self, restore: Restore) -> None:
        """Give up a restore before its targets are freed, so that it never overwrites a later owner's KV."""
        if restore in self._queued_restores:
            self._queued_restores.remove(restore)
            self._unpin_sources([restore])
        else:
            self.copies.fence()

    def start_transfers(self, *, all_stores: bool = False) -> None:
        """Start queued copies: stores first, because they read blocks that the next step may overwrite.

        Stores of evicted blocks start now. The other blocks keep their content, so their stores start only
        while fewer than two stores are running. Otherwise the next step would wait for host memory.

        Raises:
            Exception: A copy could not be started. Its store or restores are dropped, with no block left
                pinned; the copies behind it stay queued.
        """
        queued = self._queued_stores
        queued.sort(key=lambda store: store[0].content is store[1].content)  # stable; evicted blocks first
        urgent = sum(all_stores or block.content is not stored.content for block, stored in queued)
        most = max(1, TRANSFER_BYTES // self.copies.block_bytes)
        while queued and (urgent > 0 or len(self._stores) < _RUNNING_STORES_MAX):
            batch = queued[:most]
            del queued[:most]
            urgent -= len(batch)
            self._start_store([block.block_id for block, _ in batch], [stored for _, stored in batch])
        restores, self._queued_restores = self._queued_restores, []
        if restores:
            self._start_restores(restores)

    def poll_transfers(self) -> None:
        """Complete the transfers whose copies are done, in the order of their start."""
        while self._stores and self._stores[0][0].done():
            self.host_tier.complete_store(self._stores.popleft()[1])
        while self._restores and self._restores[0][0].done():
            restores = self._restores.popleft()[1]
            for restore in restores:
                restore.done = True
            self._unpin_sources(restores)

    def wait_for_restore(self) -> bool:
        """Wait for the oldest running restore, else for a store if others are queued behind it.

        Returns:
            Whether there was one; then the engine has something to do although no request can run.
        """
        running = self._restores or (self._stores if self._queued_stores else None)
        if not running:
            return False
        running[0][0].wait()
        return True

    def wait_for_all(self, *, stores_only: bool = False) -> None:
        """Start queued copies and block until all of them, or all stores, have completed."""
        self.start_transfers(all_stores=True)
        for transfer, _ in (*self._stores, *(() if stores_only else self._restores)):
            transfer.wait()
        self.poll_transfers()

    def _start_store(self, block_ids: list[int], targets: list[HostBlock]) -> None:
        try:
            transfer = self.copies.store(block_ids, [target.slot for target in targets])
        except Exception:
            for target in targets:
                self.host_tier.unpin(target)
            raise
        self._stores.append((transfer, targets))
        self.swapped_out_blocks += len(targets)

    def _start_restores(self, restores: list[Restore]) -> None:
        pairs = [pair for restore in restores for pair in restore.pairs]
        slots, blocks = [source.slot for source, _ in pairs], [target.block_id for _, target in pairs]
        try:
            transfer = self.copies.restore(slots, blocks)
        except Exception:
            self._unpin_sources(restores)
            self.copies.fence()  # a part of the copies may be running
            raise
        self._restores.append((transfer, restores))
        self.swapped_in_blocks += len(pairs)
        self.restores += len(restores)

    def _unpin_sources(self, restores: list[Restore]) -> None:
        for restore in restores:
            for source, _ in restore.pairs:
                self.host_tier.unpin(source)
