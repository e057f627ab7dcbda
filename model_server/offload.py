"""Moves blocks between the device's pool and the host tier, and knows when a move is done.

In: blocks that are evicted, finished or swapped out, and host blocks that a request needs back. Out: batched
copies, and requests told that their blocks are there. The state machine is the same whether copies take
effect at once or behind streams: nothing is found, read or announced before its copy is done.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from model_server.block_copies import BlockCopies, Transfer
from model_server.blocks import BlockPool
from model_server.free_queue import Block
from model_server.host_tier import HostBlock, HostTier


@dataclass(slots=True, eq=False)
class Restore:
    """Blocks on their way back to the device.

    Attributes:
        pairs: From where to where.
        done: Whether all of them are there.
    """

    pairs: list[tuple[HostBlock, Block]]
    done: bool = False


@dataclass(slots=True)
class _Batch:
    """What was asked for since the last flush."""

    stores: list[tuple[int, HostBlock]] = field(default_factory=list)
    restores: list[Restore] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


class Offload:
    """The traffic between two tiers.

    Attributes:
        host: The host tier.
        block_bytes: Bytes of one block.
        swapped_in_blocks: Blocks restored since the start.
        swapped_out_blocks: Blocks stored since the start.
        restores: Times that a request waited for blocks to be restored.
    """

    def __init__(self, pool: BlockPool, host: HostTier, copies: BlockCopies) -> None:
        self.host = host
        self.swapped_in_blocks = 0
        self.swapped_out_blocks = 0
        self.restores = 0
        self.block_bytes = copies.block_bytes
        self._attached: BlockCopies | None = copies
        self._batch = _Batch()
        self._storing: deque[tuple[Transfer, list[HostBlock]]] = deque()
        self._restoring: deque[tuple[Transfer, list[Restore]]] = deque()
        pool.on_evict = self.keep

    @property
    def _copies(self) -> BlockCopies:
        assert self._attached is not None, "there is no memory to copy"
        return self._attached

    @property
    def restoring(self) -> bool:
        """Whether a restore is under way."""
        return bool(self._restoring)

    def detach(self) -> None:
        """Let go of both tiers' memory; nothing may be under way."""
        assert not self._storing, "a store is under way"
        assert not self._restoring, "a restore is under way"
        self._attached = None

    def attach(self, copies: BlockCopies) -> None:
        """Use this memory from now on."""
        self._attached = copies

    def keep(self, block: Block) -> None:
        """See that the content of a block is in the host tier, if there is room."""
        content = block.content
        if content is None or not self.host.num_blocks:
            return
        if self.host.keeps(content.key):
            self.host.touch(content.key)
        elif (kept := self.host.add(content)) is not None:
            self._batch.stores.append((block.block_id, kept))

    def swap_out(self, blocks: Sequence[Block]) -> list[HostBlock] | None:
        """Copy a request's blocks, full or not, to slots of its own; None if there is no room."""
        slots = self.host.reserve(len(blocks))
        if slots is not None:
            self._batch.stores.extend(
                (block.block_id, slot) for block, slot in zip(blocks, slots, strict=True)
            )
        return slots

    def restore(self, pairs: list[tuple[HostBlock, Block]]) -> Restore:
        """Bring back host blocks, each held by the caller; they are let go when that is done."""
        restore = Restore(pairs)
        self._batch.restores.append(restore)
        self.restores += 1
        return restore

    def copy(self, source: Block, target: Block) -> None:
        """Give a block the content of another before the next step is computed."""
        self._batch.copies.append((source.block_id, target.block_id))

    def abandon(self) -> None:
        """A request went whose restore is under way: its blocks are reused only behind that."""
        self._copies.fence()

    def flush(self) -> None:
        """Begin all that was asked for: first what reads blocks that are to be overwritten."""
        batch, self._batch = self._batch, _Batch()
        if batch.stores:
            kept = [slot for _, slot in batch.stores]
            transfer = self._copies.store([block for block, _ in batch.stores], [slot.slot for slot in kept])
            self._storing.append((transfer, kept))
            self.swapped_out_blocks += len(kept)
        if batch.restores:
            pairs = [pair for restore in batch.restores for pair in restore.pairs]
            # A swapped block may be wanted back before it has left: one stream must not overtake the other.
            if not all(source.ready for source, _ in pairs):
                self._finish_stores()
            transfer = self._copies.restore(
                [source.slot for source, _ in pairs], [target.block_id for _, target in pairs]
            )
            self._restoring.append((transfer, batch.restores))
            self.swapped_in_blocks += len(pairs)
        if batch.copies:
            sources, targets = zip(*batch.copies, strict=True)
            self._copies.copy(sources, targets)

    def poll(self) -> None:
        """Take note of copies that are done."""
        while self._storing and self._storing[0][0].done():
            self.host.stored(self._storing.popleft()[1])
        while self._restoring and self._restoring[0][0].done():
            for restore in self._restoring.popleft()[1]:
                restore.done = True
                for source, _ in restore.pairs:
                    self.host.release(source)

    def wait(self) -> None:
        """Block until the oldest restore is done."""
        if self._restoring:
            self._restoring[0][0].wait()

    def drain(self) -> None:
        """Block until nothing is under way."""
        self.flush()
        for transfer, _ in (*self._storing, *self._restoring):
            transfer.wait()
        self.poll()

    def _finish_stores(self) -> None:
        for transfer, _ in self._storing:
            transfer.wait()
        self.poll()
