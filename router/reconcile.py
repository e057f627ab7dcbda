"""Requests whose ends nobody told: the engines' own counts in, the ledger corrected.

An engine's count is compared a moment after it was read: by then the ends that came before it have been told,
so whatever the ledger still has beyond it is lost news. An engine without any request has no queue: that
counts at once. Time comes in.
"""

from __future__ import annotations

from router.outcomes import Outcomes
from router.pods import PodSnapshot
from router.scrape import EngineLoad

# Longer than Envoy keeps its access log back.
_NEWS_TRAVEL_S = 1.0


class Reconciler:
    """Compares each pod's scraped load with what was sent there."""

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
