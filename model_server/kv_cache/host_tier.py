"""The second tier of the KV cache, in host memory, and the traffic between it and the device's pool.

It is the same whether copies take effect at once or behind streams: nothing is found, read or announced
before its copy is done.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from model_server.kv_cache.block_pool import Block, BlockPool
from model_server.kv_events.events import MEDIUM_CPU, Announcer, BlockContent, ContentKey, KVEvent, runs


@dataclass(slots=True, eq=False, repr=False)
class HostBlock:
    """One slot of host memory."""

    slot: int  # row of the host tensors
    content: BlockContent  # what can be found in it
    # Copies under way into or out of it, and requests that are swapped out; it stays while there are any.
    holders: int = 1
    ready: bool = False  # whether the copy into it is done


@dataclass(eq=False)
class HostTier:
    """A fixed number of slots, least recently used first out."""

    num_blocks: int  # slots
    announcer: Announcer
    announce: Callable[[KVEvent], None]
    # Blocks that are here or on their way here, least recently used first.
    kept: OrderedDict[ContentKey, HostBlock] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self._free = list(range(self.num_blocks - 1, -1, -1))

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def is_held(self) -> bool:
        """Whether a block is being copied or held for a request."""
        return any(block.holders for block in self.kept.values())

    def find(self, key: ContentKey) -> HostBlock | None:
        """Return the block with this content if it can be fetched."""
        block = self.kept.get(key)
        return block if block is not None and block.ready else None

    def touch(self, key: ContentKey) -> HostBlock | None:
        """Mark a content as just used; returns its block, which may be on its way here yet."""
        if key in self.kept:
            self.kept.move_to_end(key)
        return self.kept.get(key)

    def add(self, content: BlockContent) -> HostBlock | None:
        """Hold a slot for a content that cannot be found before `stored`; None when all are held."""
        slot = self._take_slot()
        if slot is None:
            return None
        block = self.kept[content.key] = HostBlock(slot, content)
        return block

    def stored(self, blocks: Sequence[HostBlock]) -> None:
        """Copies into these blocks, children of a chain first, are done: announce them, parents first."""
        contents = []
        for block in reversed(blocks):
            block.ready = True
            block.holders -= 1
            if self.kept.get(block.content.key) is block:
                contents.append(block.content)
        for run in runs(contents):
            self.announce(self.announcer.stored(run, MEDIUM_CPU))

    def hold(self, block: HostBlock) -> None:
        block.holders += 1

    def release(self, block: HostBlock) -> None:
        assert block.holders > 0, "released more often than held"
        block.holders -= 1

    def discard(self, block: HostBlock) -> None:
        """Free the slot of a block whose copy failed."""
        if self.kept.get(block.content.key) is block:
            del self.kept[block.content.key]
            self._free.append(block.slot)

    def clear(self) -> None:
        """Forget all contents; no copy may be under way. Announced by whoever clears the pool."""
        assert not self.is_held, "a block is held"
        self._free.extend(block.slot for block in self.kept.values())
        self.kept.clear()

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        for key, block in self.kept.items():
            if not block.holders:
                del self.kept[key]
                self.announce(self.announcer.removed(block.content, MEDIUM_CPU))
                return block.slot
        return None


class Transfer(Protocol):
    """A copy under way."""

    def done(self) -> bool: ...

    def wait(self) -> None: ...


class BlockCopies(Protocol):
    """Moves blocks; each call takes effect in the order of the calls and of the model's steps."""

    block_bytes: int  # of one block

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Transfer:
        """Copy device blocks into host slots; the blocks may be overwritten by whatever is computed next."""

    def restore(self, slots: Sequence[int], blocks: Sequence[int]) -> Transfer:
        """Copy host slots into device blocks."""

    def fence(self) -> None:
        """Let nothing computed next overtake a restore that is under way."""


@dataclass(slots=True, eq=False)
class Restore:
    """Blocks on their way back to the device."""

    pairs: list[tuple[HostBlock, Block]]  # from where to where
    done: bool = False  # whether all of them are there


@dataclass(eq=False)
class Offload:
    """The traffic between two tiers."""

    pool: BlockPool
    host: HostTier
    copies: BlockCopies
    swapped_in_blocks: int = 0  # blocks restored since the start
    swapped_out_blocks: int = 0  # blocks stored since the start
    restores: int = 0  # times that a request waited for blocks to be restored

    def __post_init__(self) -> None:
        # Requests since the last flush: blocks to store, with their places, and restores.
        self._stores: list[tuple[int, HostBlock]] = []
        self._restores: list[Restore] = []
        self._storing: deque[tuple[Transfer, list[HostBlock]]] = deque()
        self._restoring: deque[tuple[Transfer, list[Restore]]] = deque()
        self.pool.on_evict = self.keep

    @property
    def restoring(self) -> bool:
        return bool(self._restoring)

    def keep(self, block: Block) -> HostBlock | None:
        """See that the content of a block is in the host tier; returns its place there, None without room."""
        content = block.content
        if content is None or not self.host.num_blocks:
            return None
        kept = self.host.touch(content.key)
        if kept is None and (kept := self.host.add(content)) is not None:
            self._stores.append((block.block_id, kept))
        return kept

    def restore(self, pairs: list[tuple[HostBlock, Block]]) -> Restore:
        """Bring back host blocks, each held by the caller; they are let go when that is done."""
        restore = Restore(pairs)
        self._restores.append(restore)
        self.restores += 1
        return restore

    def abandon(self) -> None:
        """A request went whose restore is under way: its blocks are reused only behind that."""
        self.copies.fence()

    def flush(self) -> None:
        """Begin all that was asked for: first what reads blocks that are to be overwritten."""
        stores, self._stores = self._stores, []
        restores, self._restores = self._restores, []
        stored = [kept for _, kept in stores]
        pairs = [pair for restore in restores for pair in restore.pairs]
        try:
            if stored:
                blocks, slots = [block for block, _ in stores], [kept.slot for kept in stored]
                self._storing.append((self.copies.store(blocks, slots), stored))
                self.swapped_out_blocks += len(stored)
            stored = []
            if pairs:
                slots, blocks = [source.slot for source, _ in pairs], [target.block_id for _, target in pairs]
                self._restoring.append((self.copies.restore(slots, blocks), restores))
                self.swapped_in_blocks += len(pairs)
        except Exception:
            for kept in stored:
                self.host.discard(kept)
            for source, _ in pairs:
                self.host.release(source)
            raise

    def poll(self) -> None:
        while self._storing and self._storing[0][0].done():
            self.host.stored(self._storing.popleft()[1])
        while self._restoring and self._restoring[0][0].done():
            for restore in self._restoring.popleft()[1]:
                restore.done = True
                for source, _ in restore.pairs:
                    self.host.release(source)

    def wait(self) -> None:
        if self._restoring:
            self._restoring[0][0].wait()

    def drain(self, *, stores_only: bool = False) -> None:
        """Block until nothing is under way, or until all that was to be stored can be found."""
        self.flush()
        for transfer, _ in (*self._storing, *(() if stores_only else self._restoring)):
            transfer.wait()
        self.poll()
