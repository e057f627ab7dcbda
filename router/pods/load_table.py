"""Load table: the load of all pods as a structured array, so that all costs are computed in one pass.

Fed by the ledger, metrics scrapes and rate estimates. No I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.jit import kernel_with_arrays
from router.pods.engine_load import EngineLoad

# Row of one pod; times are seconds of the router's monotonic clock.
POD = np.dtype(
    [
        ("awaiting", "f8"),  # requests before their first token
        ("awaiting_tokens", "f8"),  # uncached prompt tokens of `awaiting`
        ("decoding", "f8"),  # sequences of requests after their first token
        ("held_tokens", "f8"),  # uncached prompt tokens of `awaiting` and `decoding`
        ("head_tokens", "f8"),  # uncached tokens of the request in prefill; 0 if none
        ("head_since_s", "f8"),  # start of that prefill
        ("foreign_waiting", "f8"),  # queued requests of other senders
        ("foreign_running", "f8"),  # running requests of other senders
        ("scraped_s", "f8"),  # time of the last metrics scrape; -inf if none
        ("waiting", "f8"),  # scraped queue depth; 0 if not reported, as in the next three fields
        ("kv_usage", "f8"),  # scraped share of the KV cache used by running requests, 0..1
        ("kv_used_tokens", "f8"),  # scraped tokens in the KV cache of running requests
        ("kv_capacity_tokens", "f8"),  # size of the KV cache
        ("reported_tokens_per_s", "f8"),  # prefill rate reported by the engine; 0 if not reported
        ("observed_tokens_per_s", "f8"),  # observed prefill rate; 0 without enough samples
        ("failure_s", "f8"),  # cost of the pod's last failures in seconds
    ]
)

# Requests dispatched by this router; other fields are reported by the engine.
_SENT = ("awaiting", "awaiting_tokens", "decoding", "held_tokens", "head_tokens", "head_since_s")
_AWAITING, _AWAITING_TOKENS, _DECODING, _HELD_TOKENS, _HEAD_TOKENS, _HEAD_SINCE_S = range(len(_SENT))

_ROWS_AT_FIRST = 16
# Weight of the newest request in the moving average of sizes, which covers about 50 requests.
_MEAN_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class PodWork:
    """Load of a pod caused by this router's requests."""

    awaiting: int = 0
    awaiting_tokens: int = 0
    decoding: int = 0
    held_tokens: int = 0


class PodLoadTable:
    """Load of all pods in the array `pods`, POD [rows]. Readers hold `lock`; methods take it."""

    def __init__(self) -> None:
        # Held for a few microseconds, and never while acquiring another lock.
        self.lock = Lock()
        # Default prefill rate of a pod without its own: the median of reported rates, else the rate observed
        # for the fleet; 0 if unknown.
        self.fleet_tokens_per_s = 0.0
        self._reported_fleet_tokens_per_s = 0.0
        self._observed_fleet_tokens_per_s = 0.0
        self.mean_tokens = 0.0  # mean uncached tokens of the last requests
        self._tickets = count()
        self._rows: dict[str, int] = {}
        # Invalidated reported rate by pod, ignored until the engine reports another.
        self._invalidated: dict[str, float] = {}
        self._free_rows = list(range(_ROWS_AT_FIRST))
        # By row: uncached tokens of requests in prefill or queued, by ticket, oldest first.
        self._queues: list[dict[int, int]] = [{} for _ in range(_ROWS_AT_FIRST)]
        self._declared: frozenset[str] = frozenset()
        self._put(_no_pods(_ROWS_AT_FIRST))

    def rows(self, pods: Sequence[str]) -> NDArray[np.int64]:
        """Return the rows of these pods, which stay the same while the pods are declared."""
        with self.lock:
            return np.fromiter((self._row(pod) for pod in pods), np.int64, len(pods))

    def known(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Return a copy of these rows."""
        with self.lock:
            return self.pods[rows]

    def declare(self, pods: Collection[str], anew: Collection[str] = ()) -> None:
        """Replace the set of pods; a removed pod's row is freed after its last request.

        Args:
            anew: Addresses with a new engine process, whose reported and observed values are reset.
        """
        with self.lock:
            self._declared = frozenset(pods)
            for pod in self._declared:
                self._row(pod)
            for row in map(self._row, anew):
                fresh = _no_pods(1)
                for name in _SENT:
                    fresh[name] = self.pods[row][name]
                self.pods[row] = fresh[0]
            for pod in anew:
                self._invalidated.pop(pod, None)
            if anew:
                self._judge_fleet()
            for pod in self._rows.keys() - self._declared:
                self._drop_idle(pod)

    def prefill_tokens_per_s(self, pod: str) -> float:
        with self.lock:
            if (row := self._rows.get(pod)) is None:
                return self.fleet_tokens_per_s
            return float(prefill_tokens_per_s(self.pods[row], self.fleet_tokens_per_s))

    def reported_tokens_per_s(self, pod: str) -> float:
        """Return the prefill rate reported by the pod's engine, else the median of others; 0 if unknown."""
        with self.lock:
            row = self._rows.get(pod)
            own = 0.0 if row is None else float(self.pods[row]["reported_tokens_per_s"])
            return own or self._reported_fleet_tokens_per_s

    def reported_rates(self) -> dict[str, float]:
        """Return the valid reported prefill rates in tokens/s by pod."""
        with self.lock:
            reported = self.pods["reported_tokens_per_s"].tolist()
            return {pod: reported[row] for pod, row in self._rows.items() if reported[row]}

    def invalidate_rate(self, pod: str) -> None:
        """Invalidate the prefill rate reported by the pod's engine until it reports another."""
        with self.lock:
            known = self.pods[self._row(pod)]
            self._invalidated[pod] = float(known["reported_tokens_per_s"])
            known["reported_tokens_per_s"] = 0.0
            self._judge_fleet()

    def work(self, pod: str) -> PodWork:
        with self.lock:
            row = self._rows.get(pod)
            if row is None:
                return PodWork()
            known = self.pods[row]
            return PodWork(*(int(known[name]) for name in PodWork.__slots__))

    def begin(self, pod: str, tokens: int, now_s: float) -> int:
        """Add a request sent to the pod; return its ticket for later calls."""
        with self.lock:
            row, ticket = self._row(pod), next(self._tickets)
            if not (queue := self._queues[row]):
                self._compute(row, tokens, now_s)
            queue[ticket] = tokens
            self._add(row, 1, tokens, 0, tokens)
            self.mean_tokens += _MEAN_SHARE * (tokens - self.mean_tokens)
            return ticket

    def end_prefill(self, pod: str, ticket: int, now_s: float, sequences: int = 1) -> None:
        with self.lock:
            self._leave_queue(self._rows[pod], ticket, now_s, sequences, 0)

    def hand_over(
        self, pod: str, ticket: int, decodes: str, tokens: int, now_s: float, sequences: int = 1
    ) -> None:
        """Move a request from prefill on `pod` to decoding on another pod."""
        with self.lock:
            self._leave_queue(self._rows[pod], ticket, now_s, 0, -tokens)
            self._drop_idle(pod)
            self._add(self._row(decodes), 0, 0, sequences, tokens)

    def end(self, pod: str, ticket: int, tokens: int, now_s: float, sequences: int = 1) -> None:
        """Remove an ended request, in prefill or decoding."""
        with self.lock:
            row = self._rows[pod]
            if ticket in self._queues[row]:
                self._leave_queue(row, ticket, now_s, 0, -tokens)
            else:
                self._add(row, 0, 0, -sequences, -tokens)
            self._drop_idle(pod)

    def scraped(self, pod: str, load: EngineLoad) -> None:
        with self.lock:
            known = self.pods[self._row(pod)]
            waiting, running, kv_usage = load.waiting or 0, load.running or 0, load.kv_usage or 0.0
            known["scraped_s"] = load.scraped_s
            known["waiting"], known["kv_usage"] = waiting, kv_usage
            # Requests beyond this router's own come from other senders, or from before its start.
            beyond = waiting + running - known["awaiting"] - known["decoding"]
            foreign_waiting = max(0.0, waiting - known["awaiting"])
            known["foreign_waiting"] = foreign_waiting
            known["foreign_running"] = max(0.0, beyond - foreign_waiting)
            known["kv_capacity_tokens"] = load.kv_capacity_tokens or 0
            known["kv_used_tokens"] = kv_usage * (load.kv_capacity_tokens or 0)
            reported = load.prefill_tokens_per_s or 0.0
            known["reported_tokens_per_s"] = 0.0 if reported == self._invalidated.get(pod) else reported
            self._judge_fleet()

    def is_declared(self, pod: str) -> bool:
        return pod in self._declared

    def set_failure_cost(self, pod: str, seconds: float) -> None:
        """Set the seconds that a pod's failures add to its cost."""
        with self.lock:
            if (row := self._rows.get(pod)) is not None:
                self.pods[row]["failure_s"] = seconds

    def set_observed(self, tokens_per_s: dict[str, float], fleet_tokens_per_s: float) -> None:
        """Set the observed prefill rates in tokens/s by pod, and for the fleet."""
        with self.lock:
            self._observed_fleet_tokens_per_s = fleet_tokens_per_s
            self._judge_fleet()
            for pod, speed in tokens_per_s.items():
                if (row := self._rows.get(pod)) is not None:
                    self.pods[row]["observed_tokens_per_s"] = speed

    def _judge_fleet(self) -> None:
        """Update the default rate, without which a pod without a rate would look many times faster."""
        reported = self.pods["reported_tokens_per_s"]
        reported = reported[reported > 0.0]
        self._reported_fleet_tokens_per_s = float(np.median(reported)) if len(reported) else 0.0
        self.fleet_tokens_per_s = self._reported_fleet_tokens_per_s or self._observed_fleet_tokens_per_s

    def _row(self, pod: str) -> int:
        row = self._rows.get(pod)
        if row is None:
            if not self._free_rows:
                known = len(self.pods)
                self._put(np.concatenate([self.pods, _no_pods(known)]))
                self._free_rows = list(range(known, 2 * known))
                self._queues += [{} for _ in range(known)]
            row = self._rows[pod] = self._free_rows.pop()
        return row

    def _put(self, pods: NDArray[Any]) -> None:
        self.pods = pods
        # View of the same memory as [rows, fields]: writing a record's field takes ten times as long.
        self._cells: Any = memoryview(pods.view(np.float64).reshape(len(pods), -1))  # type: ignore[arg-type]

    def _drop_idle(self, pod: str) -> None:
        row = self._rows[pod]
        if pod not in self._declared and not self._queues[row] and not self._cells[row, _DECODING]:
            del self._rows[pod]
            self._invalidated.pop(pod, None)
            self.pods[row] = _no_pods(1)[0]
            self._free_rows.append(row)

    def _leave_queue(self, row: int, ticket: int, now_s: float, decoding: int, held_tokens: int) -> None:
        queue = self._queues[row]
        was_head = next(iter(queue)) == ticket
        self._add(row, -1, -queue.pop(ticket), decoding, held_tokens)
        if was_head:
            self._compute(row, next(iter(queue.values()), 0), now_s)

    def _compute(self, row: int, tokens: int, now_s: float) -> None:
        """Start the prefill of a request with so many uncached tokens; 0 if the queue is empty."""
        self._cells[row, _HEAD_TOKENS], self._cells[row, _HEAD_SINCE_S] = tokens, now_s

    def _add(self, row: int, awaiting: int, awaiting_tokens: int, decoding: int, held_tokens: int) -> None:
        cells = self._cells
        cells[row, _AWAITING] += awaiting
        cells[row, _AWAITING_TOKENS] += awaiting_tokens
        cells[row, _DECODING] += decoding
        cells[row, _HELD_TOKENS] += held_tokens


@kernel_with_arrays
def prefill_tokens_per_s(pod: Any, fleet_tokens_per_s: float) -> float:
    """Return the prefill rate of a POD row in tokens/s: observed, else reported, else the fleet's."""
    if pod["observed_tokens_per_s"] > 0.0:
        return float(pod["observed_tokens_per_s"])
    if pod["reported_tokens_per_s"] > 0.0:
        return float(pod["reported_tokens_per_s"])
    return fleet_tokens_per_s


def _no_pods(rows: int) -> NDArray[Any]:
    pods = np.zeros(rows, POD)
    pods["scraped_s"] = -np.inf
    return pods
