"""This router among the others of its fleet: what it tells, what it is told, and how that stands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from threading import Lock
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from indexer.config import IndexerConfig
from indexer.peer_service import PeerIdentity
from router.ledger import Ledger, LedgerParameters
from router.outcomes import Heard, Outcomes
from router.pods import PodSet
from router.replicas.follow import STATES, Followers
from router.replicas.journal import Journal, LedgerDoor
from router.replicas.news import News
from router.replicas.others import OthersWork

if TYPE_CHECKING:
    from indexer import KvIndexer

_NAME = "kvroute_router_ledger_"


class Fleet(Collector):
    """The other routers of the fleet: what they are told of our requests, and what they tell of theirs.

    Args:
        config: Who they are.
        identity: Who we are.
        pods: With the board that prices our requests and theirs.
        assumed: Where their blocks are assumed.
        outcomes: Is told what they have heard of our requests.
    """

    def __init__(
        self,
        config: IndexerConfig,
        identity: PeerIdentity,
        ledger: Ledger,
        pods: PodSet,
        assumed: KvIndexer,
        outcomes: Outcomes,
    ) -> None:
        self._has_peers = bool(config.peers)
        self._outcomes = outcomes
        self._lock = Lock()
        self._taken: Counter[str] = Counter()
        self._journal = Journal(ledger)
        self.door = LedgerDoor(self._journal, identity)
        self._others = OthersWork(Ledger(LedgerParameters(), pods.board, ledger.adapters), assumed, pods)
        self._followers = Followers(config, identity, self._take, self._others.lose)

    def start(self) -> None:
        self._journal.start()
        if self._has_peers:
            self._followers.start()

    def close(self) -> None:
        self._followers.close()
        self._journal.close()

    def heard(self, heard: Heard) -> None:
        self._journal.heard(heard)

    def know(self, request_id: str) -> bool:
        return request_id in self._others

    def shown(self, now_s: float) -> list[dict[str, Any]]:
        """A line for each of the others, for people."""
        lines: list[dict[str, Any]] = [
            {
                "address": one.address,
                "state": one.state,
                "why": one.why,
                "requests": self._others.requests(one.address),
                "heard_ago_s": None if one.heard_s is None else round(now_s - one.heard_s, 3),
            }
            for one in self._followers.states
            if one.state != "self"
        ]
        unknown = sorted(self._followers.unknown_names)
        return [*lines, *({"address": name, "state": "unknown_name"} for name in unknown)]

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            _NAME + "followers", "Other routers that follow this one's ledger.", value=self._journal.readers
        )
        states = Counter(one.state for one in self._followers.states)
        peers = GaugeMetricFamily(
            _NAME + "peers", "Routers by whether their ledgers are followed.", labels=["state"]
        )
        for state in STATES:
            peers.add_metric([state], states[state])
        peers.add_metric(["unknown_name"], len(self._followers.unknown_names))
        yield peers
        yield GaugeMetricFamily(
            _NAME + "others_requests", "Other routers' requests in flight.", value=len(self._others)
        )
        taken = CounterMetricFamily(_NAME + "news", "What other routers told.", labels=["kind"])
        for kind, number in list(self._taken.items()):
            taken.add_metric([kind], number)
        yield taken

    def _take(self, address: str, news: News, now_s: float) -> None:
        self._others.take(address, news, now_s)
        for heard in news.heard:
            self._outcomes.told(heard, now_s)
        with self._lock:
            for kind in news.__struct_fields__:
                if told := len(getattr(news, kind)):
                    self._taken[kind] += told
