"""Failing pods: seconds that a pod's last failures cost, and its exclusion after several in a row.

A pod that fails at once looks idle. Each failure in a row doubles its cost, which decays. After `OUT_AFTER`
failures it gets only one request from time to time, until one succeeds. No I/O and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock

from router.pods.load_table import PodLoadTable

OUT_AFTER = 3
COST_S, COST_MAX_S, HALF_LIFE_S = 1.0, 60.0, 10.0
RETRY_S, RETRY_MAX_S = 5.0, 60.0


@dataclass(slots=True)
class _Streak:
    since_s: float  # dispatch of the first failed request
    failures: int = 0
    failed_s: float = 0.0
    retry_s: float = RETRY_S / 2
    due_s: float = math.inf  # time of the next trial; infinity while the pod is not excluded
    counts_from_s: float = -math.inf  # failures of requests dispatched earlier count no more


@dataclass(slots=True)
class PodFailures:
    """Consecutive failures of declared pods. Thread-safe."""

    load_table: PodLoadTable
    # Called with a pod and the reason why it gets no requests; "" if it may get some.
    exclude: Callable[[str, str], None] = lambda _pod, _why: None
    # Called with a pod and whether its request failed, for other routers.
    share: Callable[[str, bool], None] = lambda _pod, _failed: None
    trials: set[str] = field(default_factory=set)  # pods whose next request is a trial
    _streaks: dict[str, _Streak] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def failed(self, pod: str, dispatched_s: float, now_s: float, *, shared: bool = False) -> None:
        """Record that the pod failed a request; `shared`: another router reported it."""
        with self._lock:
            streak = self._streaks.get(pod) or _Streak(dispatched_s)
            # Other routers have trials of their own.
            is_known = dispatched_s < streak.counts_from_s or (shared and streak.due_s < math.inf)
            if is_known or not self.load_table.is_declared(pod):
                return
            self._streaks[pod] = streak
            streak.failures, streak.failed_s = streak.failures + 1, now_s
            if streak.failures < OUT_AFTER:
                self._decay(pod, streak, now_s)
            else:
                streak.retry_s = min(2 * streak.retry_s, RETRY_MAX_S)
                self._exclude(pod, streak, now_s, f"{OUT_AFTER} or more requests in a row failed")
        if not shared:
            self.share(pod, True)

    def succeeded(self, pod: str, dispatched_s: float, *, shared: bool = False) -> None:
        """Record that the pod answered a request; one older than its failures proves nothing."""
        # Nearly no pod has failures, so the usual case takes no lock.
        if pod not in self._streaks:
            return
        with self._lock:
            if (streak := self._streaks.get(pod)) is None or dispatched_s < streak.since_s:
                return
            self._forget(pod)
        if not shared:
            self.share(pod, False)

    def dispatched(self, pod: str, now_s: float) -> None:
        """Exclude a pod on trial that has just got its request."""
        with self._lock:
            if pod in self.trials:
                self._exclude(pod, self._streaks[pod], now_s, "its trial request has not ended")

    def expire(self, now_s: float) -> None:
        """Let costs decay and trials begin; to be called often."""
        with self._lock:
            for pod, streak in list(self._streaks.items()):
                if not self.load_table.is_declared(pod):
                    self._forget(pod)
                elif streak.due_s == math.inf:
                    self._decay(pod, streak, now_s)
                elif streak.due_s <= now_s and pod not in self.trials:
                    self.trials.add(pod)
                    self.load_table.set_failure_cost(pod, 0.0)
                    self.exclude(pod, "")

    def _decay(self, pod: str, streak: _Streak, now_s: float) -> None:
        cost_s = min(COST_S * 2.0 ** (streak.failures - 1), COST_MAX_S)
        self.load_table.set_failure_cost(pod, cost_s * 0.5 ** ((now_s - streak.failed_s) / HALF_LIFE_S))

    def _exclude(self, pod: str, streak: _Streak, now_s: float, why: str) -> None:
        self.trials.discard(pod)
        streak.counts_from_s, streak.due_s = now_s, now_s + streak.retry_s
        # Unlike the exclusion, the cost also applies where the candidates are chosen already.
        self.load_table.set_failure_cost(pod, COST_MAX_S)
        self.exclude(pod, why)

    def _forget(self, pod: str) -> None:
        del self._streaks[pod]
        self.trials.discard(pod)
        self.load_table.set_failure_cost(pod, 0.0)
        self.exclude(pod, "")
