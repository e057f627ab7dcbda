"""Copies on all ranks: what rank 0 takes as done is done everywhere before anything that follows."""

from multiprocessing import Pipe

from model_server.config import EngineConfig
from model_server.parallel.copies import SharedCopies
from model_server.parallel.messages import Fence, Order, Restore, Settle, Start, Store, pack
from model_server.parallel.worker import Worker
from model_server.shapes import Division
from tests.integration.engine_support import SlowCopies


class Told:
    """Keeps the orders that other ranks would get."""

    def __init__(self) -> None:
        self.orders: list[Order] = []

    def tell(self, order: Order) -> None:
        """Take one."""
        self.orders.append(order)


def test_other_ranks_settle_what_rank_0_has_seen_done() -> None:
    """Every move is told before it begins here; that it is done is told once, when it was first seen."""
    blocks = {block: {0: (block,)} for block in range(4)}
    told = Told()
    copies = SharedCopies(SlowCopies(blocks, host_blocks=4, polls=2), told, 2)  # type: ignore[arg-type]
    assert copies.block_bytes == 2 * SlowCopies.block_bytes
    stored = copies.store([1, 2], [0, 3])
    assert not stored.done()
    assert not stored.done()
    assert told.orders == [Store(0, pack([1, 2]), pack([0, 3]))]
    assert stored.done()
    assert stored.done()
    restored = copies.restore([3], [0])
    restored.wait()
    restored.wait()
    copies.fence()
    assert told.orders[1:] == [
        Settle(0),
        Restore(1, pack([3]), pack([0])),
        Settle(1),
        Fence(),
    ]
    assert (blocks[0], blocks[1]) == ({0: (2,)}, {0: (1,)})


def test_a_rank_waits_where_it_is_told_to_settle() -> None:
    """A transfer that is under way is done once the rank has settled it, and not forgotten before."""
    own, other = Pipe()
    with own, other:
        worker = Worker(other, Start(EngineConfig(gpu_blocks=4, torch_threads=1), Division(), 30))
        blocks = {block: {0: (block,)} for block in range(4)}
        worker._copies = SlowCopies(blocks, host_blocks=4, polls=9)
        worker.carry_out(Store(0, pack([1]), pack([2])))
        worker.carry_out(Settle(0))
        worker.carry_out(Restore(1, pack([2]), pack([3])))
        assert blocks[3] == {0: (3,)}
        worker.carry_out(Settle(1))
        assert blocks[3] == {0: (1,)}
