"""This router among the others of its fleet: what it tells, what it is told, and how that stands.

Others' requests stand in a ledger of their own on the board that prices ours, and what they will bring is
assumed of the pods as what ours will.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from indexer.config import IndexerConfig
from indexer.errors import PeerError
from indexer.peers import PeerIdentity
from router.feedback.change_log import Journal, LedgerDoor
from router.feedback.follower import STATES, Followers
from router.feedback.lifecycle import Heard, Outcomes
from router.feedback.messages import News, Sent
from router.inflight.dispatch import Dispatch
from router.inflight.ledger import Ledger, LedgerParameters
from router.inflight.rates import Lesson
from router.pods.pod_set import PodSet

if TYPE_CHECKING:
    from indexer import KvIndexer

_NAME = "kvroute_router_ledger_"

REQUESTS_MAX = 100_000
"""Requests of one peer; as many as its ledger holds."""


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
            for one in self._followers.peers
            if one.state != "self"
        ]
        unknown = sorted(self._followers.unknown_names)
        return [*lines, *({"address": name, "state": "unknown_name"} for name in unknown)]

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            _NAME + "followers", "Other routers that follow this one's ledger.", value=self._journal.readers
        )
        states = Counter(one.state for one in self._followers.peers)
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


class _Theirs(NamedTuple):
    """A request of another router's: as our ledger has it, and by its client's id."""

    dispatch: Dispatch
    client_id: str


@dataclass(eq=False)
class OthersWork:
    """Takes news of other routers. Thread-safe; one peer's come one after the other."""

    ledger: Ledger  # for others' requests alone, on the board that prices ours
    assumed: KvIndexer  # where their blocks are assumed
    pods: PodSet  # of others nothing is assumed

    def __post_init__(self) -> None:
        self._lock = Lock()
        # By peer and its number for the request.
        self._by_peer: dict[str, dict[int, _Theirs]] = {}
        self._ids: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.ledger)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._ids

    def requests(self, peer: str) -> int:
        return len(self._by_peer.get(peer, ()))

    def take(self, peer: str, news: News, now_s: float) -> None:
        """Takes what a peer tells of its requests; of numbers that it has not told nothing follows.

        Raises:
            PeerError: "broken": it tells of too many.
        """
        with self._lock:
            theirs = self._by_peer.setdefault(peer, {})
            for sent in news.sent:
                self._begin(peer, theirs, sent, now_s)
            for number in (*news.overdue, *news.prefilled):
                if (request := theirs.get(number)) is not None:
                    self.ledger.first_token(request.dispatch.request_id, now_s)
            for number in news.prefilled:
                if (request := theirs.get(number)) is not None:
                    self.assumed.settle(request.dispatch.key, now_s)
            for number in news.ended:
                if number in theirs:
                    self._end(theirs, number, now_s)

    def lose(self, peer: str, now_s: float) -> int:
        """Nothing is known of this peer any more: its requests count no longer; tells how many there were."""
        with self._lock:
            theirs = self._by_peer.pop(peer, {})
            numbers = list(theirs)
            for number in numbers:
                self._end(theirs, number, now_s)
            return len(numbers)

    def _begin(self, peer: str, theirs: dict[int, _Theirs], sent: Sent, now_s: float) -> None:
        if sent.number in theirs:
            self._end(theirs, sent.number, now_s)
        if len(theirs) >= REQUESTS_MAX:
            raise PeerError("broken", f"it tells of more than {REQUESTS_MAX} requests in flight")
        dispatch = Dispatch(
            f"{peer} {sent.number}",
            sent.pod,
            sent.uncached_tokens,
            0.0,
            0.0,
            None,
            Lesson.NOTHING,
            now_s - sent.age_s,
            prefill_pod=sent.prefill_pod,
            adapter=sent.adapter,
        )
        request = theirs[sent.number] = _Theirs(dispatch, sent.request_id)
        self._ids[sent.request_id] += 1
        for displaced in self.ledger.dispatch(dispatch):
            self.assumed.settle(displaced.key, now_s)
        if sent.is_prefilled:
            self.ledger.first_token(request.dispatch.request_id, now_s)
            return
        pods = self.pods.snapshot()
        for pod in filter(None, (sent.pod, sent.prefill_pod)):
            if pod in pods:
                self.assumed.speculate(dispatch.key, pod, sent.keys, now_s, None)

    def _end(self, theirs: dict[int, _Theirs], number: int, now_s: float) -> None:
        request = theirs.pop(number)
        self._ids[request.client_id] -= 1
        if not self._ids[request.client_id]:
            del self._ids[request.client_id]
        self.ledger.end(request.dispatch.request_id, now_s)
        self.assumed.settle(request.dispatch.key, now_s)
