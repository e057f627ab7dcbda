"""Moves blocks on all ranks alike: each has its own part of every block, under the same number.

In: block numbers and slots. Out: the same copies everywhere. A transfer that rank 0 has seen done is done on
the other ranks before anything that is told them later.
"""

import itertools
from collections.abc import Sequence

from model_server.block_copies import BlockCopies, Done, Transfer
from model_server.parallel.messages import Fence, Restore, Settle, Store, pack
from model_server.parallel.workers import Workers


class SharedCopies:
    """Copies of rank 0 and of the others; see `BlockCopies` for the methods.

    Args:
        own: Those of rank 0.
        workers: The other ranks, which have memory for as many host blocks.
        size: How many ranks there are.
    """

    def __init__(self, own: BlockCopies, workers: Workers, size: int) -> None:
        self._own = own
        self._workers = workers
        self._numbers = itertools.count()
        self.block_bytes = own.block_bytes * size

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Transfer:
        """Copy device blocks into host slots."""
        number = next(self._numbers)
        self._workers.tell(Store(number, pack(blocks), pack(slots)))
        return self._shared(number, self._own.store(blocks, slots))

    def restore(self, slots: Sequence[int], blocks: Sequence[int]) -> Transfer:
        """Copy host slots into device blocks."""
        number = next(self._numbers)
        self._workers.tell(Restore(number, pack(slots), pack(blocks)))
        return self._shared(number, self._own.restore(slots, blocks))

    def fence(self) -> None:
        """Let nothing computed next overtake a restore that is under way."""
        self._workers.tell(Fence())
        self._own.fence()

    def _shared(self, number: int, own: Transfer) -> Transfer:
        # Copies that are done when their call returns are so on all ranks.
        return own if isinstance(own, Done) else _SharedTransfer(number, own, self._workers)


class _SharedTransfer:
    def __init__(self, number: int, own: Transfer, workers: Workers) -> None:
        self._number = number
        self._own = own
        self._workers = workers
        self._settled = False

    def done(self) -> bool:
        if not self._settled and self._own.done():
            self._settle()
        return self._settled

    def wait(self) -> None:
        self._own.wait()
        if not self._settled:
            self._settle()

    def _settle(self) -> None:
        self._settled = True
        self._workers.tell(Settle(self._number))
