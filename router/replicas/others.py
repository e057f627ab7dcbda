"""What other routers have in flight: their news in; board, adapters and index as if we had sent it ourselves.

Their requests stand in a ledger of their own on the board that prices ours, and what they will bring is
assumed of the pods as what ours will. Times come in; knows no sockets.
"""

from __future__ import annotations

from collections import Counter
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from indexer.errors import PeerError
from router.dispatch import Dispatch
from router.ledger import Ledger
from router.pods import PodSet
from router.rates import Lesson
from router.replicas.news import News, Sent

if TYPE_CHECKING:
    from indexer import KvIndexer

REQUESTS_MAX = 100_000
"""Of one peer; as many as its ledger holds."""


class _Theirs(NamedTuple):
    """A request of another router's: as our ledger has it, and by its client's id."""

    dispatch: Dispatch
    client_id: str


class OthersWork:
    """Takes news of other routers. Thread-safe; one peer's come one after the other.

    Args:
        ledger: For others' requests alone, on the board that prices ours.
        assumed: Where their blocks are assumed.
        pods: Of others nothing is assumed.
    """

    def __init__(self, ledger: Ledger, assumed: KvIndexer, pods: PodSet) -> None:
        self._ledger = ledger
        self._assumed = assumed
        self._pods = pods
        self._lock = Lock()
        # By peer and its number for the request.
        self._by_peer: dict[str, dict[int, _Theirs]] = {}
        self._ids: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._ledger)

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
                    self._ledger.first_token(request.dispatch.request_id, now_s)
            for number in news.prefilled:
                if (request := theirs.get(number)) is not None:
                    self._assumed.settle(request.dispatch.key, now_s)
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
        for displaced in self._ledger.dispatch(dispatch):
            self._assumed.settle(displaced.key, now_s)
        if sent.is_prefilled:
            self._ledger.first_token(request.dispatch.request_id, now_s)
            return
        pods = self._pods.snapshot()
        for pod in filter(None, (sent.pod, sent.prefill_pod)):
            if pod in pods:
                self._assumed.speculate(dispatch.key, pod, sent.keys, now_s, None)

    def _end(self, theirs: dict[int, _Theirs], number: int, now_s: float) -> None:
        request = theirs.pop(number)
        self._ids[request.client_id] -= 1
        if not self._ids[request.client_id]:
            del self._ids[request.client_id]
        self._ledger.end(request.dispatch.request_id, now_s)
        self._assumed.settle(request.dispatch.key, now_s)
