"""Two routers without sockets, of which one tells and the other takes."""

from __future__ import annotations

from collections.abc import Iterable

from router.feedback.change_log import Journal, Reader
from router.feedback.fleet import OthersWork
from router.feedback.messages import News, read_news
from router.inflight.ledger import Ledger, LedgerParameters
from router.pods.load_table import PodBoard
from tests.unit.router_support import Bench, PlainIndex

PEER = "10.0.0.9:9002"


class Follower:
    """What one router makes of what another tells.

    Args:
        bench: Whose pods and index it is; None: one that knows no pods.
    """

    def __init__(self, bench: Bench | None = None) -> None:
        self.bench = bench or Bench()
        self.index: PlainIndex = self.bench.index
        self.board: PodBoard = self.bench.pods.board
        self.ledger = Ledger(LedgerParameters(), self.board, self.bench.ledger.adapters)
        self.work = OthersWork(self.ledger, self.index, self.bench.pods)

    def follow(self, journal: Journal, reader: Reader, now_s: float) -> None:
        """Takes all that there is to be told."""
        for news in told(journal, reader):
            self.work.take(PEER, news, now_s)


def told(journal: Journal, reader: Reader) -> list[News]:
    """All that was not taken yet, over the wire."""
    journal.tell()
    return [read_news(message) for message in waiting(reader)]


def waiting(reader: Reader) -> Iterable[bytes]:
    """Messages that are there already."""
    while message := reader.take(0.0):
        yield message
