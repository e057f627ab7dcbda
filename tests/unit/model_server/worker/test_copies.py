"""Transfers on several ranks: a transfer done on rank 0 is done on all ranks before later calls."""

from model_server.worker.executor import MultiRankTransfer
from tests.support.model_server.engine import LateTransfer


class RecordingExecutor:
    """Executor stub that records the transfers that other ranks must complete."""

    def __init__(self) -> None:
        self.settled: list[int] = []

    def wait_transfer(self, number: int) -> None:
        """Record one transfer."""
        self.settled.append(number)


def test_other_ranks_complete_a_transfer_done_on_rank_0() -> None:
    """The other ranks complete a transfer once, when rank 0 first sees it done or waits for it."""
    told, effects = RecordingExecutor(), []
    polled = MultiRankTransfer(3, LateTransfer(lambda: effects.append("polled"), 1), told)  # type: ignore[arg-type]
    assert [polled.done() for _ in range(3)] == [False, True, True]
    waited = MultiRankTransfer(4, LateTransfer(lambda: effects.append("waited"), 9), told)  # type: ignore[arg-type]
    waited.wait()
    waited.wait()
    assert waited.done()
    assert (told.settled, effects) == ([3, 4], ["polled", "waited"])
