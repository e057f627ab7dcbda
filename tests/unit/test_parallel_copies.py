"""Copies on all ranks: what rank 0 takes as done is done everywhere before anything that follows."""

from model_server.worker.executor import MultiRankTransfer
from tests.integration.engine_support import LateTransfer


class Told:
    """Keeps what other ranks would be told to settle."""

    def __init__(self) -> None:
        self.settled: list[int] = []

    def wait_transfer(self, number: int) -> None:
        """Take one."""
        self.settled.append(number)


def test_other_ranks_settle_what_rank_0_has_seen_done() -> None:
    """That a transfer is done is told once, when it was first seen or waited for."""
    told, effects = Told(), []
    polled = MultiRankTransfer(3, LateTransfer(lambda: effects.append("polled"), 1), told)  # type: ignore[arg-type]
    assert [polled.done() for _ in range(3)] == [False, True, True]
    waited = MultiRankTransfer(4, LateTransfer(lambda: effects.append("waited"), 9), told)  # type: ignore[arg-type]
    waited.wait()
    waited.wait()
    assert waited.done()
    assert (told.settled, effects) == ([3, 4], ["polled", "waited"])
