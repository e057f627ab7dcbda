"""Failing pods: seconds that a pod's last failures cost, and its exclusion after several in a row.

A pod that fails at once looks idle. Each failure in a row doubles its cost, which decays. After `OUT_AFTER`
failures it gets only one request from time to time, until one succeeds. No I/O and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from threading import Lock

from router.pods.load_table import PodLoadTable

OUT_AFTER = 5
"""Failures in a row after which a pod gets no requests, but one at a time as a trial."""

COST_S, COST_MAX_S, HALF_LIFE_S = 1.0, 60.0, 10.0
RETRY_S, RETRY_MAX_S = 5.0, 60.0


@dataclass(slots=True)
class _Streak:
    since_s: float  # dispatch of the first failed request
    counts_from_s: float = -math.inf  # failures of requests dispatched earlier are known already
    failures: int = 0
    failed_s: float = 0.0
    retry_s: float = RETRY_S / 2
    due_s: float = math.inf  # time of the next trial; infinity while the pod is not out


@dataclass(slots=True)
class PodFailures:
    """Consecutive failures by pod. Thread-safe; only declared pods are kept."""

    load_table: PodLoadTable
    # Called with a pod and the reason why it gets no requests; "" once it may get some.
    exclude: Callable[[str, str], None] = lambda _pod, _why: None
    # Called with a pod and whether its request failed; other routers need not be told of more.
    share: Callable[[str, bool], None] = lambda _pod, _failed: None
    # Pods whose next request is a trial; read before each call of `dispatched`.
    trials: set[str] = field(default_factory=set)
    _streaks: dict[str, _Streak] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def failed(self, pod: str, dispatched_s: float, now_s: float, *, shared: bool = False) -> None:
        """Record that the pod failed a request; `shared`: another router reported it."""
        with self._lock:
            if not self.load_table.is_declared(pod):
                return
            streak = self._streaks.setdefault(pod, _Streak(dispatched_s))
            if dispatched_s < streak.counts_from_s:
                return
            streak.failures, streak.failed_s = streak.failures + 1, now_s
            if streak.failures < OUT_AFTER:
                self.load_table.set_failure_cost(pod, _cost_s(streak, now_s))
            else:
                streak.retry_s = min(2 * streak.retry_s, RETRY_MAX_S)
                self._close(pod, streak, now_s, f"{OUT_AFTER} or more requests in a row failed")
        if not shared:
            self.share(pod, True)

    def succeeded(self, pod: str, dispatched_s: float, *, shared: bool = False) -> None:
        """Record that the pod answered a request; of older requests than its failures, it proves nothing."""
        # Nearly no pod has failures, so the usual case takes no lock.
        if pod not in self._streaks:
            return
        with self._lock:
            if (streak := self._streaks.get(pod)) is None or dispatched_s < streak.since_s:
                return
            self._drop(pod)
        if not shared:
            self.share(pod, False)

    def dispatched(self, pod: str, now_s: float) -> None:
        """Exclude a pod on trial that has just got its request."""
        with self._lock:
            if pod in self.trials:
                self._close(pod, self._streaks[pod], now_s, "its trial request has not ended")

    def expire(self, now_s: float) -> None:
        """Let costs decay and trials begin; to be called often."""
        if not self._streaks:
            return
        with self._lock:
            for pod, streak in list(self._streaks.items()):
                if not self.load_table.is_declared(pod):
                    self._drop(pod)
                elif streak.due_s == math.inf:
                    self.load_table.set_failure_cost(pod, _cost_s(streak, now_s))
                elif streak.due_s <= now_s and pod not in self.trials:
                    self.trials.add(pod)
                    self.load_table.set_failure_cost(pod, 0.0)
                    self.exclude(pod, "")

    def forget(self, pods: Collection[str]) -> None:
        """Forget the failures of pods that have a new process."""
        with self._lock:
            for pod in self._streaks.keys() & set(pods):
                self._drop(pod)

    def _close(self, pod: str, streak: _Streak, now_s: float, why: str) -> None:
        """Exclude a pod until its next trial. The cost acts at once, also where candidates are chosen."""
        self.trials.discard(pod)
        streak.counts_from_s, streak.due_s = now_s, now_s + streak.retry_s
        self.load_table.set_failure_cost(pod, COST_MAX_S)
        self.exclude(pod, why)

    def _drop(self, pod: str) -> None:
        was_out = self._streaks.pop(pod).due_s < math.inf
        self.trials.discard(pod)
        self.load_table.set_failure_cost(pod, 0.0)
        if was_out:
            self.exclude(pod, "")


def _cost_s(streak: _Streak, now_s: float) -> float:
    cost_s = min(COST_S * 2.0 ** (streak.failures - 1), COST_MAX_S)
    return float(cost_s * 0.5 ** ((now_s - streak.failed_s) / HALF_LIFE_S))
