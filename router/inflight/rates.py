"""How fast each pod prefills, in tokens per second: observed prefills in, one robust estimate per pod out.

Of a pod on which nothing decodes: by what decoding slows it, see DECODE_SLOWDOWN, is taken out. Only requests
that found an empty queue are to be observed: their time is their own prefill's and nobody else's; and only
those of which it is known what the pod had to compute, or at most had to, see `Lesson`. The estimates are
kept on the board, where pricing reads them. Pure.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from statistics import median
from threading import Lock
from typing import NamedTuple

from router.pods.load_table import PodBoard

DECODE_SLOWDOWN = 0.008
"""Share by which one request that decodes on a pod lengthens a prefill there.

Taken from the simulation that the default policy was chosen by.
"""

# A smaller change of the fleet's median is not worth estimating every pod anew.
_FLEET_CHANGE = 0.02


class Lesson(Enum):
    """What the time to a request's first token tells of the pod that prefilled it.

    RATE: How fast it is: its uncached tokens are known, and nothing else took long.
    AT_MOST: Only how fast it is at most: its cache is out of sight and may have served some of the tokens.
    """

    NOTHING = "nothing"
    RATE = "rate"
    AT_MOST = "at_most"


@dataclass(frozen=True, slots=True)
class RateParameters:
    """How rates are learnt."""

    prior_tokens_per_s: float = 15_000.0  # believed of a fleet that has neither told nor been observed
    window: int = 64  # observations kept per pod; their median counts, so that outliers do not move it
    observations_min: int = 8  # observations from which on a pod's median is believed at all
    doubt: float = 2.5  # standard errors that a median must differ from what is believed of any pod to count
    belief: float = 4.0  # as many observations the fleet's median (or what the pod itself tells) is worth
    tokens_min: int = 128  # shorter prefills are not observed: their time is mostly the engine's step
    # Medians stay within [prior / bound, prior * bound], where a pod's prior is what it tells, else what
    # others tell, else what is configured.
    bound: float = 100.0
    # Older observations are forgotten, and those since which the fleet has made `window` more for each pod. A
    # pod that was slow once is sent nothing by which it could show that it is not any more.
    life_s: float = 300.0


class PrefillRates:
    """Per-pod estimates; safe to share between threads.

    A pod is as fast as it tells or, if it does not, as the fleet's median, unless its own observations leave
    no doubt that it is not: else of two equal pods the one that seems slower by chance is asked no more, and
    cannot show that it is not. Beyond doubt its estimate is the geometric mean of both, its own median being
    weighted with the number of its observations. One pod that is wrong about itself moves neither the fleet's
    median nor other pods.
    """

    def __init__(self, parameters: RateParameters, board: PodBoard | None = None) -> None:
        self._parameters = parameters
        self.board = board or PodBoard()
        self._observed: dict[str, deque[_Prefill]] = {}
        self._observations = 0
        self._medians: dict[str, float] = {}
        # By pod: the speed that it tells, and how many observations there were when it was first seen.
        self._told: dict[str, tuple[float, int]] = {}
        self._lock = Lock()
        self._fleet = self._before = parameters.prior_tokens_per_s
        self.board.learnt({}, self._fleet)

    def observe(
        self,
        pod: str,
        tokens: float,
        seconds: float,
        now_s: float,
        lesson: Lesson = Lesson.RATE,
        decoding: float = 0.0,
    ) -> None:
        """Takes a prefill of `tokens` uncached tokens that took `seconds` on an idle pod and is over now.

        A speed that is only known to be the greatest possible makes no pod faster than is believed of one of
        which nothing is known; it counts in full where it is below that.

        Args:
            decoding: Requests that were past their prefills there.
        """
        known = self._parameters
        if lesson is Lesson.NOTHING or tokens < known.tokens_min or seconds <= 0.0:
            return
        with self._lock:
            speed = tokens / seconds * (1.0 + DECODE_SLOWDOWN * decoding)
            if lesson is Lesson.AT_MOST:
                # The fleet may have been learnt slow by the same means, and must be able to recover.
                unobserved = self.board.told_tokens_per_s(pod) or max(known.prior_tokens_per_s, self._fleet)
                speed = min(speed, unobserved)
            observed = self._observed.setdefault(pod, deque(maxlen=known.window))
            self._observations += 1
            observed.append(_Prefill(now_s, self._observations, speed))
            if len(observed) >= known.observations_min:
                self._medians[pod] = self._median(pod)
                self._tell([pod])

    def review(self, now_s: float) -> None:
        """Forgets what is too old; a pod with little left is as fast as it tells, or as the fleet.

        A pod that tells the same speed all the time, and of which nothing was observed meanwhile, counts as
        fast as the fleet: else one that told too little is sent nothing by which it could tell another. To be
        called every few seconds.
        """
        known = self._parameters
        with self._lock:
            oldest_s, oldest = now_s - known.life_s, self._observations - known.window * len(self._observed)
            for observed in self._observed.values():
                while observed and (observed[0].ended_s < oldest_s or observed[0].number <= oldest):
                    observed.popleft()
            enough = [pod for pod, seen in self._observed.items() if len(seen) >= known.observations_min]
            if unknown := self._medians.keys() - set(enough):
                # A fleet at rest is as fast as it was.
                self._before = self._fleet
            self._medians = {pod: self._median(pod) for pod in enough}
            self._unlearn(unknown)
            for pod, speed in self.board.told().items():
                if (known_told := self._told.get(pod)) is None or known_told[0] != speed:
                    self._told[pod] = speed, self._observations
                elif known_told[1] < oldest and not self._observed.get(pod):
                    self.board.doubt(pod)

    def keep(self, pods: Collection[str]) -> None:
        with self._lock:
            self._told = {pod: told for pod, told in self._told.items() if pod in pods}
            gone = self._observed.keys() - set(pods)
            for pod in gone:
                del self._observed[pod]
                self._medians.pop(pod, None)
            if gone:
                self._unlearn(gone)

    def _unlearn(self, pods: Collection[str]) -> None:
        self.board.learnt(dict.fromkeys(pods, 0.0), self._fleet)
        self._tell(self._medians)

    def _tell(self, pods: Iterable[str]) -> None:
        # What was believed before, at first what is configured, counts as one more where there is but one.
        known = tuple(self._medians.values())
        fleet = median(known if len(known) > 1 else (*known, self._before))
        if abs(fleet - self._fleet) > _FLEET_CHANGE * self._fleet:
            self._fleet, pods = fleet, self._medians
            # Before the estimates, which lean on it.
            self.board.learnt({}, fleet)
        self.board.learnt({pod: self._estimate(pod) for pod in pods}, self._fleet)

    def _estimate(self, pod: str) -> float:
        """The pod's speed; 0: nothing is known against what is believed of it."""
        speeds = sorted(one.tokens_per_s for one in self._observed[pod])
        observations = len(speeds)
        belief = self.board.told_tokens_per_s(pod) or self._fleet
        # As many lie below the true median as coins show heads: with these bounds it is between them.
        below = max(0, int((observations - self._parameters.doubt * math.sqrt(observations)) / 2))
        if speeds[below] <= belief <= speeds[-1 - below]:
            return 0.0
        share = observations / (observations + self._parameters.belief)
        return float(self._medians[pod] ** share * belief ** (1.0 - share))

    def _median(self, pod: str) -> float:
        prior = self.board.told_tokens_per_s(pod) or self._parameters.prior_tokens_per_s
        bound = self._parameters.bound
        own = median([one.tokens_per_s for one in self._observed[pod]])
        return min(max(own, prior / bound), prior * bound)


class _Prefill(NamedTuple):
    """One prefill."""

    ended_s: float
    number: int  # of the fleet's observations, counted from 1
    tokens_per_s: float  # as fast as it would have been beside nobody
