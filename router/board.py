"""The numbers of all pods, side by side in arrays, so that a request is priced on every pod in one pass.

In: what the ledger enters and ends, what was scraped, what was learnt. Out: one row for each pod, one slot
for each request that awaits its first token. No I/O and no clock; knows no prompts, keys or prices.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiled.jit import kernel, kernel_with_arrays
from router.scrape import EngineLoad

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
        ("learnt_slowdown", "f8"),  # by how much of itself a decoding request slows it; 0: as above
        ("ordered_step_tokens", "f8"),  # of one that orders its queue, see `queue_order`; 0: it does not
    ]
)

# One request that awaits its first token.
WAITING = np.dtype(
    [
        ("pod", "i8"),  # its row, -1 in a free slot
        ("arrived_s", "f8"),
        ("tokens", "f8"),
    ]
)

# What this router sent there; the rest is of the pod's engine.
_SENT = ("awaiting", "awaiting_tokens", "decoding", "held_tokens", "head_tokens", "head_since_s")

_ROWS_AT_FIRST = 16
_SLOTS_AT_FIRST = 64
_NOBODY = -1
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
    """Rows of pods and slots of waiting requests. Methods take the lock; who reads the arrays holds it.

    Attributes:
        lock: Guards all of it; held for a few microseconds, and never while taking another.
        pods: POD [rows].
        fleet_tokens_per_s: Prefill speed believed of a pod of which nothing is told or learnt: the median of
            what others tell, else what was learnt of the fleet; 0: unknown.
        mean_tokens: Mean uncached tokens of the last requests.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.pods = _no_pods(_ROWS_AT_FIRST)
        self.fleet_tokens_per_s = 0.0
        self._told_fleet_tokens_per_s = 0.0
        self._learnt_fleet_tokens_per_s = 0.0
        self.mean_tokens = 0.0
        self._waiting = _no_waiting(_SLOTS_AT_FIRST)
        self._slots = 0
        self._free_slots: list[int] = []
        self._rows: dict[str, int] = {}
        self._free_rows = list(range(_ROWS_AT_FIRST))
        # By row: the slots of its requests, oldest first.
        self._queues: list[dict[int, None]] = [{} for _ in range(_ROWS_AT_FIRST)]
        self._declared: frozenset[str] = frozenset()
        self._compile()

    @property
    def waiting(self) -> NDArray[Any]:
        """WAITING [slots], free ones among them."""
        return self._waiting[: self._slots]

    def rows(self, pods: Sequence[str]) -> NDArray[np.int64]:
        """The pods' rows, which are theirs as long as they are declared."""
        with self.lock:
            return np.fromiter((self._row(pod) for pod in pods), np.int64, len(pods))

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
            if anew:
                self._judge_fleet()
            for pod in self._rows.keys() - self._declared:
                self._drop_idle(pod)

    def prefill_tokens_per_s(self, pod: str) -> float:
        """The pod's prefill speed as far as is known."""
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

    def work(self, pod: str) -> PodWork:
        """What the pod has to do."""
        with self.lock:
            row = self._rows.get(pod)
            if row is None:
                return PodWork()
            known = self.pods[row]
            return PodWork(*(int(known[name]) for name in PodWork.__slots__))

    def begin(self, pod: str, tokens: int, now_s: float) -> int:
        """A request was sent to the pod; answers the slot that names it while it awaits its first token."""
        with self.lock:
            row, slot = self._row(pod), self._take_slot()
            queue = self._queues[row]
            _enter(self.pods, self._waiting, row, slot, float(tokens), float(now_s), not queue)
            queue[slot] = None
            self.mean_tokens += _MEAN_SHARE * (tokens - self.mean_tokens)
            return slot

    def end_prefill(self, slot: int, now_s: float) -> None:
        """The request in this slot has its first token and decodes; the slot is free."""
        with self.lock:
            self._leave_queue(self._waiting.item(slot)[0], slot, now_s, 1.0, 0.0)

    def hand_over(self, pod: str, slot: int, decodes: str, tokens: int, now_s: float) -> None:
        """The request in this slot is prefilled on `pod`, and decodes on another from now on."""
        with self.lock:
            self._leave_queue(self._rows[pod], slot, now_s, 0.0, -float(tokens))
            self._drop_idle(pod)
            # Only now: a new row may be one in a larger array.
            row = self._row(decodes)
            _count(self.pods, row, 1.0, float(tokens))

    def end(self, pod: str, slot: int | None, tokens: int, now_s: float) -> None:
        """The request is over; without a slot it was decoding."""
        with self.lock:
            row = self._rows[pod]
            if slot is not None:
                self._leave_queue(row, slot, now_s, 0.0, -float(tokens))
            else:
                _count(self.pods, row, -1.0, -float(tokens))
            self._drop_idle(pod)

    def scraped(self, pod: str, load: EngineLoad) -> None:
        """The engine told its load."""
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
            known["reported_tokens_per_s"] = load.prefill_tokens_per_s or 0.0
            known["ordered_step_tokens"] = load.ordered_step_tokens
            self._judge_fleet()

    def learnt(self, tokens_per_s: dict[str, float], fleet_tokens_per_s: float) -> None:
        """Prefill speeds by pod, and of the fleet."""
        with self.lock:
            self._learnt_fleet_tokens_per_s = fleet_tokens_per_s
            self._judge_fleet()
            for pod, speed in tokens_per_s.items():
                if (row := self._rows.get(pod)) is not None:
                    self.pods[row]["learnt_tokens_per_s"] = speed

    def slowed(self, slowdowns: Mapping[str, float]) -> None:
        """By how much of itself a decoding request slows a prefill, by pod; 0: not observed enough."""
        with self.lock:
            for pod, slowdown in slowdowns.items():
                if (row := self._rows.get(pod)) is not None:
                    self.pods[row]["learnt_slowdown"] = slowdown

    def _compile(self) -> None:
        """Compiles the kernels (or loads them from their cache), so that the first request need not wait."""
        _enter(self.pods, self._waiting, 0, 0, 0.0, 0.0, True)
        _leave(self.pods, self._waiting, 0, True, _NOBODY, 0.0, 0.0, 0.0)
        _count(self.pods, 0, 0.0, 0.0)

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
                self._grow_rows()
            row = self._rows[pod] = self._free_rows.pop()
        return row

    def _grow_rows(self) -> None:
        known = len(self.pods)
        self.pods = np.concatenate([self.pods, _no_pods(known)])
        self._free_rows = list(range(known, 2 * known))
        self._queues += [{} for _ in range(known)]

    def _drop_idle(self, pod: str) -> None:
        row = self._rows[pod]
        if pod not in self._declared and not self._queues[row] and not self.pods[row]["decoding"]:
            del self._rows[pod]
            self.pods[row] = _no_pods(1)[0]
            self._free_rows.append(row)

    def _take_slot(self) -> int:
        if self._free_slots:
            # The lowest, so that what is looked through stays short after a flood.
            return heapq.heappop(self._free_slots)
        if self._slots == len(self._waiting):
            self._waiting = np.concatenate([self._waiting, _no_waiting(self._slots)])
        self._slots += 1
        return self._slots - 1

    def _leave_queue(self, row: int, slot: int, now_s: float, decoding: float, held_tokens: float) -> None:
        queue = self._queues[row]
        was_head = next(iter(queue)) == slot
        del queue[slot]
        following = next(iter(queue), _NOBODY) if was_head else _NOBODY
        _leave(self.pods, self._waiting, slot, was_head, following, float(now_s), decoding, held_tokens)
        self._free_slot(slot)

    def _free_slot(self, slot: int) -> None:
        heapq.heappush(self._free_slots, slot)
        if slot == self._slots - 1:
            while self._slots and self._waiting[self._slots - 1]["pod"] < 0:
                self._slots -= 1
            self._free_slots = [free for free in self._free_slots if free < self._slots]
            heapq.heapify(self._free_slots)


@kernel_with_arrays
def prefill_tokens_per_s(pod: Any, fleet_tokens_per_s: float) -> float:
    """The believed prefill speed of a pod, which is one record of POD."""
    if pod["learnt_tokens_per_s"] > 0.0:
        return float(pod["learnt_tokens_per_s"])
    if pod["reported_tokens_per_s"] > 0.0:
        return float(pod["reported_tokens_per_s"])
    return fleet_tokens_per_s


@kernel
def _enter(
    pods: NDArray[Any],
    waiting: NDArray[Any],
    row: int,
    slot: int,
    tokens: float,
    now_s: float,
    is_head: bool,
) -> None:
    """A request waits for its first token from now on; `is_head`: it is computed at once."""
    known, request = pods[row], waiting[slot]
    request["pod"], request["arrived_s"], request["tokens"] = row, now_s, tokens
    known["awaiting"] += 1.0
    known["awaiting_tokens"] += tokens
    known["held_tokens"] += tokens
    if is_head:
        known["head_tokens"], known["head_since_s"] = tokens, now_s


@kernel
def _leave(
    pods: NDArray[Any],
    waiting: NDArray[Any],
    slot: int,
    was_head: bool,
    following: int,
    now_s: float,
    decoding: float,
    held_tokens: float,
) -> None:
    """A request waits no more; the one in `following` (-1: none) is computed after the head.

    And `_count` of its pod.
    """
    request = waiting[slot]
    known = pods[request["pod"]]
    known["decoding"] += decoding
    known["held_tokens"] += held_tokens
    known["awaiting"] -= 1.0
    known["awaiting_tokens"] -= request["tokens"]
    request["pod"] = -1
    if was_head:
        known["head_tokens"], known["head_since_s"] = 0.0, now_s
        if following >= 0:
            known["head_tokens"] = waiting[following]["tokens"]


@kernel
def _count(pods: NDArray[Any], row: int, decoding: float, held_tokens: float) -> None:
    """So many more requests decode, and so many more tokens are held."""
    pods[row]["decoding"] += decoding
    pods[row]["held_tokens"] += held_tokens


def _no_pods(rows: int) -> NDArray[Any]:
    pods = np.zeros(rows, POD)
    pods["scraped_s"] = -np.inf
    return pods


def _no_waiting(slots: int) -> NDArray[Any]:
    waiting = np.zeros(slots, WAITING)
    waiting["pod"] = -1
    return waiting
