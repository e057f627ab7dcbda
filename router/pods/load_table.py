"""The numbers of all pods, side by side in an array, so that a request is priced on every pod in one pass.

In: what the ledger enters and ends, what was scraped, what was learnt. Out: one row for each pod. No I/O and
no clock; knows no prompts, keys or prices.
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

# What is known of one pod; times are seconds of the router's monotonic clock.
POD = np.dtype(
    [
        ("awaiting", "f8"),  # requests that await their first token
        ("awaiting_tokens", "f8"),  # their uncached prompt tokens
        ("decoding", "f8"),  # requests past their first token
        ("held_tokens", "f8"),  # uncached prompt tokens of both
        ("head_tokens", "f8"),  # those of the request that is computed now; 0: none is
        ("head_since_s", "f8"),  # since when it is
        ("foreign_waiting", "f8"),  # requests in the engine's queue that are not ours
        ("foreign_running", "f8"),  # and those beyond it
        ("scraped_s", "f8"),  # when the engine was asked last; -inf: never
        ("waiting", "f8"),  # the engine's queue then; of these three 0: not told
        ("kv_usage", "f8"),  # share of the KV cache that running requests held then, 0..1
        ("kv_used_tokens", "f8"),  # tokens that running requests held then
        ("kv_capacity_tokens", "f8"),  # 0: not told
        ("reported_tokens_per_s", "f8"),  # prefill speed as the engine tells it; 0: not told
        ("learnt_tokens_per_s", "f8"),  # prefill speed as observed; 0: not observed enough
    ]
)

# What this router sent there; the rest is of the pod's engine.
_SENT = ("awaiting", "awaiting_tokens", "decoding", "held_tokens", "head_tokens", "head_since_s")
_AWAITING, _AWAITING_TOKENS, _DECODING, _HELD_TOKENS, _HEAD_TOKENS, _HEAD_SINCE_S = range(len(_SENT))

_ROWS_AT_FIRST = 16
# How fast the mean size of a request follows: about the last fifty count.
_MEAN_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class PodWork:
    """What a pod has to do, as far as this router caused it."""

    awaiting: int = 0
    awaiting_tokens: int = 0
    decoding: int = 0
    held_tokens: int = 0


class PodBoard:
    """Rows of pods. Methods take the lock; who reads the array `pods`, POD [rows], holds it."""

    def __init__(self) -> None:
        # Held for a few microseconds, and never while taking another.
        self.lock = Lock()
        # Prefill speed believed of a pod of which nothing is told or learnt: the median of what others tell,
        # else what was learnt of the fleet; 0: unknown.
        self.fleet_tokens_per_s = 0.0
        self._told_fleet_tokens_per_s = 0.0
        self._learnt_fleet_tokens_per_s = 0.0
        self.mean_tokens = 0.0  # mean uncached tokens of the last requests
        self._tickets = count()
        self._rows: dict[str, int] = {}
        # By pod: the speed that its engine tells and that is no longer believed.
        self._doubted: dict[str, float] = {}
        self._free_rows = list(range(_ROWS_AT_FIRST))
        # By row: the uncached tokens of its waiting requests by ticket, oldest first.
        self._queues: list[dict[int, int]] = [{} for _ in range(_ROWS_AT_FIRST)]
        self._declared: frozenset[str] = frozenset()
        self._put(_no_pods(_ROWS_AT_FIRST))

    def rows(self, pods: Sequence[str]) -> NDArray[np.int64]:
        """The pods' rows, which are theirs as long as they are declared."""
        with self.lock:
            return np.fromiter((self._row(pod) for pod in pods), np.int64, len(pods))

    def known(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """A copy of these rows."""
        with self.lock:
            return self.pods[rows]

    def declare(self, pods: Collection[str], anew: Collection[str] = ()) -> None:
        """Gives these pods rows; others' go with their last request.

        Args:
            anew: Those of them that are in another life: what is known of their engines is void.
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
                self._doubted.pop(pod, None)
            if anew:
                self._judge_fleet()
            for pod in self._rows.keys() - self._declared:
                self._drop_idle(pod)

    def prefill_tokens_per_s(self, pod: str) -> float:
        with self.lock:
            if (row := self._rows.get(pod)) is None:
                return self.fleet_tokens_per_s
            return float(prefill_tokens_per_s(self.pods[row], self.fleet_tokens_per_s))

    def told_tokens_per_s(self, pod: str) -> float:
        """The prefill speed that the pod's engine tells, else the median of what others tell; 0: none do."""
        with self.lock:
            row = self._rows.get(pod)
            own = 0.0 if row is None else float(self.pods[row]["reported_tokens_per_s"])
            return own or self._told_fleet_tokens_per_s

    def told(self) -> dict[str, float]:
        """The prefill speeds in tokens/s that engines tell and that are believed, by pod."""
        with self.lock:
            told = self.pods["reported_tokens_per_s"].tolist()
            return {pod: told[row] for pod, row in self._rows.items() if told[row]}

    def doubt(self, pod: str) -> None:
        """Believe the speed that the pod's engine tells no longer, until it tells another."""
        with self.lock:
            known = self.pods[self._row(pod)]
            self._doubted[pod] = float(known["reported_tokens_per_s"])
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
        """Enter a request sent to the pod; return the ticket that names it."""
        with self.lock:
            row, ticket = self._row(pod), next(self._tickets)
            if not (queue := self._queues[row]):
                self._compute(row, tokens, now_s)
            queue[ticket] = tokens
            self._add(row, 1, tokens, 0, tokens)
            self.mean_tokens += _MEAN_SHARE * (tokens - self.mean_tokens)
            return ticket

    def end_prefill(self, pod: str, ticket: int, now_s: float) -> None:
        with self.lock:
            self._leave_queue(self._rows[pod], ticket, now_s, 1, 0)

    def hand_over(self, pod: str, ticket: int, decodes: str, tokens: int, now_s: float) -> None:
        """The request is prefilled on `pod`, and decodes on another from now on."""
        with self.lock:
            self._leave_queue(self._rows[pod], ticket, now_s, 0, -tokens)
            self._drop_idle(pod)
            self._add(self._row(decodes), 0, 0, 1, tokens)

    def end(self, pod: str, ticket: int, tokens: int, now_s: float) -> None:
        """The request is over, which waited or decoded there."""
        with self.lock:
            row = self._rows[pod]
            if ticket in self._queues[row]:
                self._leave_queue(row, ticket, now_s, 0, -tokens)
            else:
                self._add(row, 0, 0, -1, -tokens)
            self._drop_idle(pod)

    def scraped(self, pod: str, load: EngineLoad) -> None:
        with self.lock:
            known = self.pods[self._row(pod)]
            waiting, running, kv_usage = load.waiting or 0, load.running or 0, load.kv_usage or 0.0
            known["scraped_s"] = load.scraped_s
            known["waiting"], known["kv_usage"] = waiting, kv_usage
            # What is there beyond what we know of came from others, or from before our time.
            beyond = waiting + running - known["awaiting"] - known["decoding"]
            foreign_waiting = max(0.0, waiting - known["awaiting"])
            known["foreign_waiting"] = foreign_waiting
            known["foreign_running"] = max(0.0, beyond - foreign_waiting)
            known["kv_capacity_tokens"] = load.kv_capacity_tokens or 0
            known["kv_used_tokens"] = kv_usage * (load.kv_capacity_tokens or 0)
            told = load.prefill_tokens_per_s or 0.0
            known["reported_tokens_per_s"] = 0.0 if told == self._doubted.get(pod) else told
            self._judge_fleet()

    def learnt(self, tokens_per_s: dict[str, float], fleet_tokens_per_s: float) -> None:
        """Prefill speeds by pod, and of the fleet."""
        with self.lock:
            self._learnt_fleet_tokens_per_s = fleet_tokens_per_s
            self._judge_fleet()
            for pod, speed in tokens_per_s.items():
                if (row := self._rows.get(pod)) is not None:
                    self.pods[row]["learnt_tokens_per_s"] = speed

    def _judge_fleet(self) -> None:
        """A pod that tells nothing yet is like those that do: else it would look many times faster."""
        told = self.pods["reported_tokens_per_s"]
        told = told[told > 0.0]
        self._told_fleet_tokens_per_s = float(np.median(told)) if len(told) else 0.0
        self.fleet_tokens_per_s = self._told_fleet_tokens_per_s or self._learnt_fleet_tokens_per_s

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
        # The same memory as [rows, fields]: a field of a record takes ten times as long to change.
        self._cells: Any = memoryview(pods.view(np.float64).reshape(len(pods), -1))  # type: ignore[arg-type]

    def _drop_idle(self, pod: str) -> None:
        row = self._rows[pod]
        if pod not in self._declared and not self._queues[row] and not self._cells[row, _DECODING]:
            del self._rows[pod]
            self._doubted.pop(pod, None)
            self.pods[row] = _no_pods(1)[0]
            self._free_rows.append(row)

    def _leave_queue(self, row: int, ticket: int, now_s: float, decoding: int, held_tokens: int) -> None:
        queue = self._queues[row]
        was_head = next(iter(queue)) == ticket
        self._add(row, -1, -queue.pop(ticket), decoding, held_tokens)
        if was_head:
            self._compute(row, next(iter(queue.values()), 0), now_s)

    def _compute(self, row: int, tokens: int, now_s: float) -> None:
        """The pod begins to compute a request of so many uncached tokens; 0: it has none."""
        self._cells[row, _HEAD_TOKENS], self._cells[row, _HEAD_SINCE_S] = tokens, now_s

    def _add(self, row: int, awaiting: int, awaiting_tokens: int, decoding: int, held_tokens: int) -> None:
        cells = self._cells
        cells[row, _AWAITING] += awaiting
        cells[row, _AWAITING_TOKENS] += awaiting_tokens
        cells[row, _DECODING] += decoding
        cells[row, _HELD_TOKENS] += held_tokens


@kernel_with_arrays
def prefill_tokens_per_s(pod: Any, fleet_tokens_per_s: float) -> float:
    """The believed prefill speed of a pod, which is one record of POD."""
    if pod["learnt_tokens_per_s"] > 0.0:
        return float(pod["learnt_tokens_per_s"])
    if pod["reported_tokens_per_s"] > 0.0:
        return float(pod["reported_tokens_per_s"])
    return fleet_tokens_per_s


def _no_pods(rows: int) -> NDArray[Any]:
    pods = np.zeros(rows, POD)
    pods["scraped_s"] = -np.inf
    return pods
