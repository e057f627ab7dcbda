"""What engines tell of themselves against what is believed of them: of their requests and of their caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from indexer.reconcile import EngineReading
from router.ledger import Ledger
from router.outcomes import Outcomes
from router.pods import PodSnapshot
from router.scrape import EngineLoad

# Longer than Envoy keeps its access log back.
_NEWS_TRAVEL_S = 1.0
# Longer than what a deleted pod has begun usually lasts.
_GONE_S = 60.0


class Reconciler:
    """Ends requests whose ends nobody told, by each pod's scraped load.

    An engine's count is compared a moment after it was read: by then the ends that came before it have been
    told, so whatever the ledger still has beyond it is lost news. An engine without any request has no queue:
    that counts at once. Of a pod that went away nobody tells any more once its gateway is replaced, too: what
    was sent there is over a minute later. No pick depends on it, but the number of requests in flight does.
    """

    def __init__(self, outcomes: Outcomes) -> None:
        self._outcomes = outcomes
        self._told: dict[str, EngineLoad] = {}
        self._present: frozenset[str] = frozenset()
        self._gone_s: dict[str, float] = {}

    def look(self, pods: PodSnapshot, now_s: float) -> None:
        """Looks at what the pods have told; cheap, to be called often."""
        told = {}
        for address, pod in pods.items():
            load = self._told.get(address, pod.load)
            if pod.load is not None and pod.load.requests == 0:
                self._outcomes.idle(address, pod.load.asked_s, now_s)
            if load is None:
                continue
            if now_s - load.scraped_s < _NEWS_TRAVEL_S:
                told[address] = load
            elif address in self._told and load.requests is not None:
                self._outcomes.reconcile(address, load.requests, load.scraped_s, now_s)
        self._told = told
        self._end_of_gone(pods, now_s)

    def _end_of_gone(self, pods: PodSnapshot, now_s: float) -> None:
        gone = (self._present | self._gone_s.keys()) - pods.keys()
        self._gone_s = {address: self._gone_s.get(address, now_s) for address in gone}
        self._present = frozenset(pods)
        for address in [address for address in gone if now_s - self._gone_s[address] >= _GONE_S]:
            self._outcomes.reconcile(address, 0, now_s, now_s)
            del self._gone_s[address]


class EngineWatch:
    """Holds what engines tell of themselves against the views of their caches; to be used by one thread.

    A reading is completed with what was predicted of the engine's cache until then.
    """

    def __init__(self, ledger: Ledger, observe: Callable[[str, EngineReading], object]) -> None:
        self._ledger = ledger
        self._observe = observe

    def asked(self, pod: str) -> int:
        """The pod's page is about to be asked for; what to hand to `told` with it."""
        return self._ledger.answered_tokens(pod)

    def told(self, pod: str, reading: EngineReading, answered_tokens: int) -> None:
        promised_tokens = self._ledger.promised_tokens(pod)
        self._observe(
            pod, replace(reading, predicted_tokens=answered_tokens, promised_tokens=promised_tokens)
        )
