"""By how much requests that decode on a pod slow its prefills: observed prefills in, one share per pod out.

Pure. A prefill beside d decoding requests takes 1 + slowdown * d times as long as one beside none. Learnt is
the slope of a line through a pod's seconds per token over d, by the medians of its thirds with the fewest and
the most decoding requests (Tukey's resistant line), as a share of where that line begins. Its limits: where
always about as many decode nothing is told, and the prior stays; and whatever else slows prefills just when
others decode, such as a busy host, is taken for theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

DECODE_SLOWDOWN = 0.008
"""What one decoding request adds to a prefill's time, as a share of it, where nothing is learnt.

As in the simulator behind the default policy.
"""


@dataclass(frozen=True, slots=True)
class SlowdownParameters:
    """How slowdowns are learnt.

    Attributes:
        prior: Believed of a pod that has not been observed.
        bound: Estimates stay within [prior / bound, prior * bound].
        window: Observations kept per pod.
        observations_min: Observations from which on anything is learnt.
        belief: What the prior is worth: as many observations, times the square of by how many decoding
            requests the pod's emptiest and fullest third differ. About where the error of what is observed
            is as large as what may be wrong about the prior, if prefills' times scatter by a fifth.
        life_s: Older observations are forgotten.
    """

    prior: float = DECODE_SLOWDOWN
    bound: float = 20.0
    window: int = 256
    observations_min: int = 12
    belief: float = 1000.0
    life_s: float = 300.0


class Beside(NamedTuple):
    """One prefill: its end, its seconds per uncached token, and how many requests decoded beside it."""

    ended_s: float
    seconds_per_token: float
    decoding: float


class DecodeSlowdowns:
    """Per-pod estimates; to be used under its owner's lock."""

    def __init__(self, parameters: SlowdownParameters) -> None:
        self._parameters = parameters
        self._observed: dict[str, deque[Beside]] = {}
        self._changed: set[str] = set()
        self._estimates: dict[str, float] = {}

    def of(self, pod: str) -> float:
        """The pod's slowdown as far as is known."""
        return self._estimates.get(pod, self._parameters.prior)

    def observe(self, pod: str, beside: Beside) -> None:
        """Takes a prefill that was the only one on its pod; estimates follow with the next review."""
        if (observed := self._observed.get(pod)) is None:
            observed = self._observed[pod] = deque(maxlen=self._parameters.window)
        observed.append(beside)
        self._changed.add(pod)

    def review(self, now_s: float) -> dict[str, float]:
        """Forgets what is too old and estimates anew.

        Returns:
            By pod of which there was anything new or too old; 0: not observed enough.
        """
        oldest_s = now_s - self._parameters.life_s
        for pod, observed in self._observed.items():
            while observed and observed[0].ended_s < oldest_s:
                observed.popleft()
                self._changed.add(pod)
        changed, self._changed = self._changed, set()
        return {pod: self._judge(pod) for pod in changed}

    def forget(self, pods: Collection[str]) -> None:
        """Forgets these pods."""
        for pod in pods:
            self._observed.pop(pod, None)
            self._estimates.pop(pod, None)
            self._changed.discard(pod)

    def _judge(self, pod: str) -> float:
        if len(self._observed[pod]) < self._parameters.observations_min:
            self._estimates.pop(pod, None)
            return 0.0
        estimate = self._estimates[pod] = decode_slowdown(self._observed[pod], self._parameters)
        return estimate


def decode_slowdown(observed: Collection[Beside], parameters: SlowdownParameters) -> float:
    """The slowdown of a pod with these prefills, at least three; see the module."""
    by_decoding = sorted(observed, key=lambda beside: beside.decoding)
    third = len(by_decoding) // 3
    few, few_s = _middle(by_decoding[:third])
    many, many_s = _middle(by_decoding[-third:])
    apart = many - few
    if apart <= 0.0:
        return parameters.prior
    least, most = parameters.prior / parameters.bound, parameters.prior * parameters.bound
    slope_s = (many_s - few_s) / apart
    alone_s = few_s - slope_s * few
    # Both ways alike, so that noise about a small truth does not make it larger.
    seen = min(max(slope_s / alone_s, -most), most) if alone_s > 0.0 else most
    worth = len(by_decoding) * apart**2
    share = worth / (worth + parameters.belief)
    return min(max(share * seen + (1.0 - share) * parameters.prior, least), most)


def _middle(observed: Sequence[Beside]) -> tuple[float, float]:
    """Decoding requests and seconds per token of one third."""
    return fmean(one.decoding for one in observed), median(one.seconds_per_token for one in observed)
