"""How fast each pod prefills, in tokens per second: observed prefills in, one robust estimate per pod out.

Pure. Only requests that found an empty queue are to be observed: their time is their own prefill's and
nobody else's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from statistics import median
from threading import Lock


@dataclass(frozen=True, slots=True)
class RateParameters:
    """How rates are learnt.

    Attributes:
        prior_tokens_per_s: Believed of a pod that has not been observed enough.
        window: Observations kept per pod; the estimate is their median, so that outliers do not move it.
        observations_min: Observations from which on the prior is no longer believed.
        tokens_min: Shorter prefills are not observed: their time is mostly the engine's step, not tokens.
        bound: The estimate stays within [prior / bound, prior * bound].
    """

    prior_tokens_per_s: float = 15_000.0
    window: int = 64
    observations_min: int = 4
    tokens_min: int = 128
    bound: float = 100.0


class PrefillRates:
    """Per-pod estimates; safe to share between threads."""

    def __init__(self, parameters: RateParameters) -> None:
        self._parameters = parameters
        self._observed: dict[str, deque[float]] = {}
        self._estimates: dict[str, float] = {}
        self._lock = Lock()

    def tokens_per_s(self, pod: str) -> float:
        """The pod's speed as far as is known."""
        return self._estimates.get(pod, self._parameters.prior_tokens_per_s)

    def observe(self, pod: str, tokens: int, seconds: float) -> None:
        """Takes one prefill of `tokens` uncached tokens that took `seconds` on an idle pod."""
        known = self._parameters
        if tokens < known.tokens_min or seconds <= 0.0:
            return
        with self._lock:
            observed = self._observed.setdefault(pod, deque(maxlen=known.window))
            observed.append(tokens / seconds)
            if len(observed) >= known.observations_min:
                prior = known.prior_tokens_per_s
                self._estimates[pod] = min(max(median(observed), prior / known.bound), prior * known.bound)

    def keep(self, pods: Collection[str]) -> None:
        """Forgets every pod but these."""
        with self._lock:
            for pod in self._observed.keys() - set(pods):
                del self._observed[pod]
                self._estimates.pop(pod, None)
