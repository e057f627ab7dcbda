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


class Reconciler:
    """Ends requests whose ends nobody told, by each pod's scraped load.

    An engine's count is compared a moment after it was read: by then the ends that came before it have been
    told, so whatever the ledger still has beyond it is lost news. An engine without any request has no queue:
    that counts at once.
    """

    def __init__(self, outcomes: Outcomes) -> None:
        self._outcomes = outcomes
        self._told: dict[str, EngineLoad] = {}

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


class EngineWatch:
    """Holds what engines tell of themselves against the views of their caches; to be used by one thread.

    A reading is completed with what was predicted of the engine's cache until then.

    Args:
        observe: Told the pod and the completed reading, see `KvIndexer.observe`.
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
