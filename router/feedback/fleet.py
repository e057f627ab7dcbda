"""Load sharing among router replicas: sends this router's requests, receives those of others, reports both.

Requests of other routers have a ledger of their own on the same load table, so they count in every pick. The
blocks that they add to their pods are speculative index entries, like those of this router's requests.
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
from router.feedback.change_log import ChangeLog, LedgerChanges, LedgerService, Sent
from router.feedback.follower import STATES, LedgerFollower
from router.feedback.lifecycle import Lifecycle
from router.inflight.dispatch import Dispatch
from router.inflight.ledger import Ledger, LedgerParameters
from router.inflight.rates import RateSample
from router.observe.metrics import gauge
from router.pods.pod_set import PodSet

if TYPE_CHECKING:
    from indexer import KvIndexer

_NAME, _UNKNOWN = "kvroute_router_ledger_", "unknown_name"

REQUESTS_MAX = 100_000  # maximum requests in flight of one peer; equal to the capacity of its ledger


class Fleet(Collector):
    """Other routers of the fleet: exchange of requests in flight and reports on them, and its metrics."""

    def __init__(
        self,
        config: IndexerConfig,
        identity: PeerIdentity,
        ledger: Ledger,
        pods: PodSet,
        index: KvIndexer,
        lifecycle: Lifecycle,
    ) -> None:
        self._has_peers = bool(config.peers)
        self._lifecycle = lifecycle
        self._lock = Lock()
        self._received: Counter[str] = Counter()
        self._change_log = ChangeLog(ledger, states=lifecycle.state_reports)
        self.service = LedgerService(self._change_log, identity)
        self._remote = RemoteLoad(Ledger(LedgerParameters(), pods.load_table, ledger.adapters), index, pods)
        self._follower = LedgerFollower(config, identity, self._on_changes, self._remote.drop)
        if self._has_peers:
            lifecycle.forward_to(self._change_log.forward, self._remote.__contains__)

    def start(self) -> None:
        self._change_log.start()
        if self._has_peers:
            self._follower.start()

    def close(self) -> None:
        self._follower.close()
        self._change_log.close()

    def status(self, now_s: float) -> list[dict[str, Any]]:
        """Return the state of each peer, JSON-ready, for the debug pages."""
        rows: list[dict[str, Any]] = [
            {
                "address": peer.address,
                "state": peer.state,
                "why": peer.why,
                "requests": self._remote.requests(peer.address),
                "heard_ago_s": None if peer.received_s is None else round(now_s - peer.received_s, 3),
            }
            for peer in self._follower.peers
            if peer.state != "self"
        ]
        unknown = sorted(self._follower.unknown_names)
        return [*rows, *({"address": name, "state": _UNKNOWN} for name in unknown)]

    def collect(self) -> Iterable[Metric]:
        followers, requests = self._change_log.follower_count, len(self._remote)
        yield GaugeMetricFamily(_NAME + "followers", "Routers that follow this one's ledger.", followers)
        peers = dict.fromkeys(STATES, 0) | Counter(peer.state for peer in self._follower.peers)
        peers[_UNKNOWN] = len(self._follower.unknown_names)
        values = [([state], number) for state, number in peers.items()]
        yield gauge(_NAME + "peers", "Peers by state of their ledger.", ("state",), values)
        yield GaugeMetricFamily(_NAME + "others_requests", "Other routers' requests in flight.", requests)
        received = CounterMetricFamily(_NAME + "news", "Ledger changes received.", labels=["kind"])
        for kind, number in list(self._received.items()):
            received.add_metric([kind], number)
        yield received

    def _on_changes(self, address: str, changes: LedgerChanges, now_s: float) -> None:
        self._remote.apply(address, changes, now_s)
        for report in changes.reports:
            self._lifecycle.peer_reported(report, now_s)
        with self._lock:
            # The metric's kinds are the fields' names on the wire.
            for name, kind in zip(changes.__struct_fields__, changes.__struct_encode_fields__, strict=True):
                if number := len(getattr(changes, name)):
                    self._received[kind] += number


class _RemoteRequest(NamedTuple):
    """Request of another router."""

    dispatch: Dispatch
    client_id: str  # request id of the client; the dispatch has an id per peer and number


@dataclass(eq=False)
class RemoteLoad:
    """Load of other routers: applies their ledger changes. Thread-safe; changes of a peer must be serial."""

    ledger: Ledger  # of other routers' requests only, on the load table of all requests
    index: KvIndexer  # receives speculative entries
    pods: PodSet  # pods not in it get no speculative entries

    def __post_init__(self) -> None:
        self._lock = Lock()
        # By peer and the peer's number of the request.
        self._by_peer: dict[str, dict[int, _RemoteRequest]] = {}
        self._ids: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.ledger)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._ids

    def requests(self, peer: str) -> int:
        return len(self._by_peer.get(peer, ()))

    def apply(self, peer: str, changes: LedgerChanges, now_s: float) -> None:
        """Apply a peer's ledger changes; unknown request numbers are ignored.

        Raises:
            PeerError: "broken": the peer has more than `REQUESTS_MAX` requests in flight.
        """
        with self._lock:
            requests = self._by_peer.setdefault(peer, {})
            for sent in changes.sent:
                self._begin(peer, requests, sent, now_s)
            for number in (*changes.overdue, *changes.prefilled):
                if (request := requests.get(number)) is not None:
                    self.ledger.first_token(request.dispatch.request_id, now_s)
            for number in changes.prefilled:
                if (request := requests.get(number)) is not None:
                    self.index.settle(request.dispatch.key, now_s)
            for number in changes.ended:
                if number in requests:
                    self._end(requests, number, now_s)

    def drop(self, peer: str, now_s: float) -> int:
        """Remove all requests of a lost peer; return their number."""
        with self._lock:
            requests = self._by_peer.pop(peer, {})
            numbers = list(requests)
            for number in numbers:
                self._end(requests, number, now_s)
            return len(numbers)

    def _begin(self, peer: str, requests: dict[int, _RemoteRequest], sent: Sent, now_s: float) -> None:
        if sent.number in requests:
            self._end(requests, sent.number, now_s)
        if len(requests) >= REQUESTS_MAX:
            raise PeerError("broken", f"the peer has more than {REQUESTS_MAX} requests in flight")
        dispatch = Dispatch(
            f"{peer} {sent.number}",
            sent.pod,
            sent.uncached_tokens,
            0.0,
            0.0,
            None,
            RateSample.NONE,
            now_s - sent.age_s,
            prefill_pod=sent.prefill_pod,
            adapter=sent.adapter,
            engine=sent.engine,
            sequences=sent.sequences,
        )
        request = requests[sent.number] = _RemoteRequest(dispatch, sent.request_id)
        self._ids[sent.request_id] += 1
        for evicted in self.ledger.dispatch(dispatch):
            self.index.settle(evicted.key, now_s)
        if sent.is_prefilled:
            self.ledger.first_token(request.dispatch.request_id, now_s)
            return
        pods = self.pods.current
        for pod in filter(None, (sent.pod, sent.prefill_pod)):
            if pod in pods:
                self.index.speculate(dispatch.key, pod, sent.keys, now_s, None)

    def _end(self, requests: dict[int, _RemoteRequest], number: int, now_s: float) -> None:
        request = requests.pop(number)
        self._ids[request.client_id] -= 1
        if not self._ids[request.client_id]:
            del self._ids[request.client_id]
        self.ledger.end(request.dispatch.request_id, now_s)
        self.index.settle(request.dispatch.key, now_s)
