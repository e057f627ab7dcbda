"""What an operator did wrong, told once: the problems there are now in; a log line, a gauge and an Event out.

A problem is told again only when what it says has changed. Who posts Events is handed in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from prometheus_client import CollectorRegistry, Gauge

_log = logging.getLogger(__name__)

# What changes all the time is told no more often than this.
_TOLD_EVERY_S = 30.0
# Kubernetes forgets Events after an hour.
_POSTED_EVERY_S = 1800.0


class Reason(StrEnum):
    """What can be wrong; docs/operations.md says what to do about each."""

    POOL_NOT_FOUND = "PoolNotFound"
    BAD_POOL = "BadPool"
    CRD_MISSING = "CrdMissing"
    FORBIDDEN = "Forbidden"
    API_UNREACHABLE = "ApiUnreachable"
    NO_PODS_MATCH = "NoPodsMatch"
    PODS_NOT_READY = "PodsNotReady"
    WRONG_TARGET_PORT = "WrongTargetPort"
    POD_UNREACHABLE = "PodUnreachable"
    ENGINE_WITHOUT_EVENTS = "EngineWithoutEvents"
    BAD_ANNOTATION = "BadAnnotation"
    BAD_POD = "BadPod"
    BAD_OBJECTIVE = "BadObjective"
    BAD_REWRITE = "BadRewrite"


# Each attempt fails in words of its own: the first ones stay.
_FIRST_WORDS_STAY = frozenset({Reason.API_UNREACHABLE})


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that there is.

    Attributes:
        detail: What is wrong, for a person.
        since_s: When it was seen first.
        told_s: When it was told last.
        posted_s: When an Event was asked for last.
    """

    reason: Reason
    detail: str
    since_s: float
    told_s: float
    posted_s: float


class Problems:
    """All problems; to be used by one thread, `current` by any.

    Args:
        post: Told of each problem that is told: the reason and what is wrong; "" when it is over.
    """

    def __init__(self, registry: CollectorRegistry, post: Callable[[Reason, str], None]) -> None:
        self.current: Mapping[Reason, Problem] = {}
        self._post = post
        gauge = Gauge(
            "kvroute_discovery_problem",
            "1 while discovery is kept from its work by what the reason says.",
            ["reason"],
            registry=registry,
        )
        self._gauges = {reason: gauge.labels(reason) for reason in Reason}

    def see(self, found: Mapping[Reason, str], now_s: float) -> None:
        current = {}
        for reason, detail in found.items():
            known = self.current.get(reason)
            if known is None:
                current[reason] = self._tell(Problem(reason, detail, now_s, now_s, now_s))
            elif (
                known.detail == detail or reason in _FIRST_WORDS_STAY or now_s - known.told_s < _TOLD_EVERY_S
            ):
                current[reason] = self._kept(known, now_s)
            else:
                current[reason] = self._tell(Problem(reason, detail, known.since_s, now_s, now_s))
        for reason in self.current.keys() - current.keys():
            _log.info("%s: over", reason)
            self._gauges[reason].set(0)
            self._post(reason, "")
        self.current = current

    def _kept(self, problem: Problem, now_s: float) -> Problem:
        if now_s - problem.posted_s < _POSTED_EVERY_S:
            return problem
        self._post(problem.reason, problem.detail)
        return replace(problem, posted_s=now_s)

    def _tell(self, problem: Problem) -> Problem:
        _log.warning("%s: %s", problem.reason, problem.detail)
        self._gauges[problem.reason].set(1)
        self._post(problem.reason, problem.detail)
        return problem
