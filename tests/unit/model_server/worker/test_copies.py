"""Transfers on several ranks: a transfer done on rank 0 is done on all ranks before later calls."""

from functools import partial

from model_server.worker.executor import MultiRankTransfer
from tests.support.model_server.engine import LateTransfer


def test_other_ranks_complete_a_transfer_done_on_rank_0() -> None:
    """The other ranks complete a transfer once, when rank 0 first sees it done or waits for it."""
    settled: list[int] = []
    effects: list[str] = []
    polled = MultiRankTransfer(LateTransfer(lambda: effects.append("polled"), 1), partial(settled.append, 3))
    assert [polled.done() for _ in range(3)] == [False, True, True]
    waited = MultiRankTransfer(LateTransfer(lambda: effects.append("waited"), 9), partial(settled.append, 4))
    waited.wait()
    waited.wait()
    assert waited.done()
    assert (settled, effects) == ([3, 4], ["polled", "waited"])
