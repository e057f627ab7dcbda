"""Two routers without sockets: one sends its ledger changes, the other applies them."""

from __future__ import annotations

from collections.abc import Iterable

from router.feedback.change_log import ChangeLog, FollowerQueue, LedgerChanges, decode_changes
from router.feedback.fleet import RemoteLoad
from router.inflight.ledger import Ledger, LedgerParameters
from router.pods.load_table import PodLoadTable
from tests.support.router.bench import Bench, PlainIndex

PEER = "10.0.0.9:9002"


class Follower:
    """Router that applies another router's ledger changes.

    Args:
        bench: Its pods and index; None: without pods.
    """

    def __init__(self, bench: Bench | None = None) -> None:
        self.bench = bench or Bench()
        self.index: PlainIndex = self.bench.index
        self.load_table: PodLoadTable = self.bench.pods.load_table
        self.ledger = Ledger(LedgerParameters(), self.load_table, self.bench.ledger.adapters)
        self.remote = RemoteLoad(self.ledger, self.index, self.bench.pods)

    def follow(self, change_log: ChangeLog, queue: FollowerQueue, now_s: float) -> None:
        """Apply all changes that are available."""
        for changes in received(change_log, queue):
            self.remote.apply(PEER, changes, now_s)


def received(change_log: ChangeLog, queue: FollowerQueue) -> list[LedgerChanges]:
    """Return all changes since the last call, after encoding and decoding."""
    change_log.flush()
    return [decode_changes(message) for message in queued(queue)]


def queued(queue: FollowerQueue) -> Iterable[bytes]:
    """Yield the messages in the queue without waiting."""
    while message := queue.get(0.0):
        yield message
