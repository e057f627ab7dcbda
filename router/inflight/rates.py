"""Prefill rates: one robust estimate per pod, in tokens per second, from observed prefills. No I/O.

Rates are those of pods without decoding requests; observations are corrected by DECODE_SLOWDOWN. Callers
observe only requests that found an empty queue and whose uncached tokens are known, see `RateSample`. The
cost model reads the estimates from the load table.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum
from statistics import median
from threading import Lock
from typing import NamedTuple

from router.pods.load_table import PodLoadTable

# Share by which each decoding request lengthens a prefill on its pod; source: docs/decisions.md.
DECODE_SLOWDOWN = 0.008

# Smaller relative changes of the fleet's median do not trigger new estimates for all pods.
_FLEET_CHANGE = 0.02


class RateSample(Enum):
    """Quality of a request's time to first token as a sample of its pod's prefill rate."""

    NONE = "none"  # not usable
    EXACT = "exact"  # the uncached tokens are known, and nothing but the prefill took long
    UPPER_BOUND = "upper_bound"  # may be too high: the pod's unknown cache may have served some tokens


@dataclass(frozen=True, slots=True)
class RateParameters:
    """Parameters of the rate estimation."""

    prior_tokens_per_s: float = 15_000.0  # rate of a fleet without reported or observed rates
    window: int = 64  # observations kept per pod; the estimate uses their median, which ignores outliers
    observations_min: int = 8  # observations below which a pod's median is not used
    standard_errors_min: float = 2.5  # deviation from the expected rate below which a median is not used
    prior_weight: float = 4.0  # weight of the expected rate, in observations
    tokens_min: int = 128  # shorter prefills are not observed: their time is mostly the engine's step
    # Medians are clamped to [prior / bound_factor, prior * bound_factor]. A pod's prior is the rate it
    # reports, else the median that other pods report, else `prior_tokens_per_s`.
    bound_factor: float = 100.0
    # Observations expire at this age, or when the fleet has made `window` newer ones per pod: a pod that was
    # slow once gets no requests, so it could not show that it has recovered.
    age_max_s: float = 300.0


@dataclass(eq=False)
class PrefillRates:
    """Per-pod prefill rate estimates. Thread-safe.

    A pod's expected rate is the one its engine reports, else the fleet's median. The estimate is the expected
    rate unless the pod's own observations differ significantly; otherwise, of two equal pods, the one that
    seems slower by chance would get no more requests to correct that. If they differ, the estimate is the
    geometric mean of the expected rate and the pod's median, weighted by `prior_weight` and the number of
    observations. A wrong rate reported by one pod changes neither the fleet's median nor other pods.
    """

    parameters: RateParameters
    load_table: PodLoadTable = field(default_factory=PodLoadTable)

    def __post_init__(self) -> None:
        self._observed: dict[str, deque[_Observation]] = {}
        self._observations = 0
        self._medians: dict[str, float] = {}
        # By pod: the rate its engine reports, and the fleet's observations when that rate was first seen.
        self._reported: dict[str, tuple[float, int]] = {}
        self._lock = Lock()
        self._fleet = self._before = self.parameters.prior_tokens_per_s
        self.load_table.set_observed({}, self._fleet)

    def observe(
        self,
        pod: str,
        tokens: float,
        seconds: float,
        now_s: float,
        sample: RateSample = RateSample.EXACT,
        decoding: float = 0.0,
    ) -> None:
        """Record a prefill of `tokens` uncached tokens that took `seconds` on an idle pod and ended now.

        An upper bound is capped at the pod's reported rate, else at the larger of the fleet's rate and the
        configured prior, so that unseen cache hits cannot make a pod look fast.

        Args:
            decoding: Requests decoding on the pod meanwhile.
        """
        known = self.parameters
        if sample is RateSample.NONE or tokens < known.tokens_min or seconds <= 0.0:
            return
        with self._lock:
            rate = tokens / seconds * (1.0 + DECODE_SLOWDOWN * decoding)
            if sample is RateSample.UPPER_BOUND:
                # The prior: a fleet rate learnt too slow from upper bounds must be able to recover.
                cap = self.load_table.reported_tokens_per_s(pod) or max(known.prior_tokens_per_s, self._fleet)
                rate = min(rate, cap)
            observed = self._observed.setdefault(pod, deque(maxlen=known.window))
            self._observations += 1
            observed.append(_Observation(now_s, self._observations, rate))
            if len(observed) >= known.observations_min:
                self._medians[pod] = self._median(pod)
                self._publish([pod])

    def expire(self, now_s: float) -> None:
        """Remove old observations and update the estimates; to be called every few seconds.

        The fleet's rate replaces a reported rate that is unchanged while the pod is not observed: a pod that
        reports too low a rate gets no requests to correct it.
        """
        known = self.parameters
        with self._lock:
            oldest_s = now_s - known.age_max_s
            oldest = self._observations - known.window * len(self._observed)
            for observed in self._observed.values():
                while observed and (observed[0].ended_s < oldest_s or observed[0].number <= oldest):
                    observed.popleft()
            enough = [pod for pod, seen in self._observed.items() if len(seen) >= known.observations_min]
            if unknown := self._medians.keys() - set(enough):
                # Without recent observations the fleet keeps its last rate.
                self._before = self._fleet
            self._medians = {pod: self._median(pod) for pod in enough}
            self._reset(unknown)
            for pod, rate in self.load_table.reported_rates().items():
                if (seen := self._reported.get(pod)) is None or seen[0] != rate:
                    self._reported[pod] = rate, self._observations
                elif seen[1] < oldest and not self._observed.get(pod):
                    self.load_table.invalidate_rate(pod)

    def keep(self, pods: Collection[str]) -> None:
        with self._lock:
            self._reported = {pod: seen for pod, seen in self._reported.items() if pod in pods}
            gone = self._observed.keys() - set(pods)
            for pod in gone:
                del self._observed[pod]
                self._medians.pop(pod, None)
            if gone:
                self._reset(gone)

    def _reset(self, pods: Collection[str]) -> None:
        self.load_table.set_observed(dict.fromkeys(pods, 0.0), self._fleet)
        self._publish(self._medians)

    def _publish(self, pods: Iterable[str]) -> None:
        # A single pod's median is averaged with the previous fleet rate (at first the configured prior).
        known = tuple(self._medians.values())
        fleet = median(known if len(known) > 1 else (*known, self._before))
        if abs(fleet - self._fleet) > _FLEET_CHANGE * self._fleet:
            self._fleet, pods = fleet, self._medians
            # The estimates below read the fleet's rate from the load table.
            self.load_table.set_observed({}, fleet)
        self.load_table.set_observed({pod: self._estimate(pod) for pod in pods}, self._fleet)

    def _estimate(self, pod: str) -> float:
        """Return the pod's rate in tokens/s; 0 if it does not differ significantly from the expected rate."""
        rates = sorted(one.tokens_per_s for one in self._observed[pod])
        observations, known = len(rates), self.parameters
        expected = self.load_table.reported_tokens_per_s(pod) or self._fleet
        # Sign test: of n observations binomial(n, 1/2) are below the true median, n / 2 +- sqrt(n) / 2.
        below = max(0, int((observations - known.standard_errors_min * math.sqrt(observations)) / 2))
        if rates[below] <= expected <= rates[-1 - below]:
            return 0.0
        share = observations / (observations + known.prior_weight)
        return float(self._medians[pod] ** share * expected ** (1.0 - share))

    def _median(self, pod: str) -> float:
        prior = self.load_table.reported_tokens_per_s(pod) or self.parameters.prior_tokens_per_s
        bound = self.parameters.bound_factor
        own = median([one.tokens_per_s for one in self._observed[pod]])
        return min(max(own, prior / bound), prior * bound)


class _Observation(NamedTuple):
    """Observed prefill."""

    ended_s: float
    number: int  # position in the fleet's observations, from 1
    tokens_per_s: float  # corrected for decoding requests
