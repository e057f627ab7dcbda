"""Moves blocks between the device's pool and the host tier, and knows when a move is done.

In: blocks that are evicted, finished or swapped out, and host blocks that a request needs back. Out: batched
copies, and requests told that their blocks are there. The state machine is the same whether copies take
effect at once or behind streams: nothing is found, read or announced before its copy is done.
"""

from collections import deque
from dataclasses import dataclass, field

from model_server.block_copies import BlockCopies, Transfer
from model_server.blocks import BlockPool
from model_server.free_queue import Block
from model_server.host_tier import HostBlock, HostTier


@dataclass(slots=True, eq=False)
class Restore:
    """Blocks on their way back to the device."""

    pairs: list[tuple[HostBlock, Block]]  # from where to where
    done: bool = False  # whether all of them are there


@dataclass(slots=True)
class _Batch:
    """What was asked for since the last flush."""

    stores: list[tuple[int, HostBlock]] = field(default_factory=list)
    restores: list[Restore] = field(default_factory=list)


class Offload:
    """The traffic between two tiers."""

    def __init__(self, pool: BlockPool, host: HostTier, copies: BlockCopies) -> None:
        self.host = host  # the host tier
        self.swapped_in_blocks = 0  # blocks restored since the start
        self.swapped_out_blocks = 0  # blocks stored since the start
        self.restores = 0  # times that a request waited for blocks to be restored
        self.block_bytes = copies.block_bytes  # bytes of one block
        self._copies = copies
        self._batch = _Batch()
        self._storing: deque[tuple[Transfer, list[HostBlock]]] = deque()
        self._restoring: deque[tuple[Transfer, list[Restore]]] = deque()
        pool.on_evict = self.keep

    @property
    def restoring(self) -> bool:
        """Whether a restore is under way."""
        return bool(self._restoring)

    def keep(self, block: Block) -> HostBlock | None:
        """See that the content of a block is in the host tier; returns its place there, None without room."""
        content = block.content
        if content is None or not self.host.num_blocks:
            return None
        kept = self.host.touch(content.key)
        if kept is None and (kept := self.host.add(content)) is not None:
            self._batch.stores.append((block.block_id, kept))
        return kept

    def restore(self, pairs: list[tuple[HostBlock, Block]]) -> Restore:
        """Bring back host blocks, each held by the caller; they are let go when that is done."""
        restore = Restore(pairs)
        self._batch.restores.append(restore)
        self.restores += 1
        return restore

    def abandon(self) -> None:
        """A request went whose restore is under way: its blocks are reused only behind that."""
        self._copies.fence()

    def flush(self) -> None:
        """Begin all that was asked for: first what reads blocks that are to be overwritten."""
        batch, self._batch = self._batch, _Batch()
        stored = [kept for _, kept in batch.stores]
        pairs = [pair for restore in batch.restores for pair in restore.pairs]
        try:
            if stored:
                blocks, slots = [block for block, _ in batch.stores], [kept.slot for kept in stored]
                self._storing.append((self._copies.store(blocks, slots), stored))
                self.swapped_out_blocks += len(stored)
            stored = []
            if pairs:
                slots, blocks = [source.slot for source, _ in pairs], [target.block_id for _, target in pairs]
                self._restoring.append((self._copies.restore(slots, blocks), batch.restores))
                self.swapped_in_blocks += len(pairs)
        except Exception:
            for kept in stored:
                self.host.discard(kept)
            for source, _ in pairs:
                self.host.release(source)
            raise

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

    def finish_stores(self) -> None:
        """Block until all that was to be stored can be found."""
        self.flush()
        for transfer, _ in self._storing:
            transfer.wait()
        self.poll()
