"""Holds what engines tell of themselves against the views of their caches: page readings in, findings out.

A reading is completed with what was predicted of the engine's cache until then. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from indexer.reconcile import EngineReading
from router.promises import Promises


class EngineWatch:
    """To be used by one thread.

    Args:
        promises: What was predicted of each pod's cache.
        observe: Told the pod and the completed reading, see `KvIndexer.observe`.
    """

    def __init__(self, promises: Promises, observe: Callable[[str, EngineReading], object]) -> None:
        self._promises = promises
        self._observe = observe

    def asked(self, pod: str) -> int:
        """The pod's page is about to be asked for; what to hand to `told` with it."""
        return self._promises.answered_tokens(pod)

    def told(self, pod: str, reading: EngineReading, answered_tokens: int) -> None:
        """The page came."""
        promised_tokens = self._promises.promised_tokens(pod)
        self._observe(
            pod, replace(reading, predicted_tokens=answered_tokens, promised_tokens=promised_tokens)
        )
