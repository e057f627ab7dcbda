"""Bounded queue of flow control: priority bands, fairness between flows, order within a flow.

Nothing here blocks or reads a clock. `flow` decides when a request leaves the queue.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from threading import Event

from router.config.picker_file import BandSettings, FlowSettings


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """Request in the queue of flow control. Times are seconds of the monotonic clock."""

    flow: str  # fairness id
    priority: int
    size_bytes: int
    arrived_s: float
    deadline_s: float  # time at which it is rejected
    due_s: float  # time by which the client wants the first token; inf without a target
    is_active: Callable[[], bool] | None = None  # whether the client is still connected; None if unknown
    finished: Event = field(default_factory=Event)  # set once `outcome` is
    outcome: str = ""
    has_evicted: bool = False  # whether another request was evicted for this one
    is_removed: bool = False
    sequence: int = 0


Order = Callable[[QueuedRequest], float]

ORDERS: Mapping[str, Order] = {
    "fcfs-ordering-policy": lambda queued: queued.sequence,
    "edf-ordering-policy": lambda queued: queued.deadline_s,
    "slo-deadline-ordering-policy": lambda queued: queued.due_s,
}
FAIRNESS = ("global-strict-fairness-policy", "round-robin-fairness-policy")


class FlowQueue:
    """Queue of all bands. The settings name types of policies, not plugin names."""

    def __init__(self, settings: FlowSettings) -> None:
        self._settings = settings
        self._configured = {band.priority: band for band in settings.priority_bands}
        self._bands: dict[int, _Band] = {}
        self._sequence = count()

    def __len__(self) -> int:
        return sum(band.requests for band in self._bands.values())

    @property
    def size_bytes(self) -> int:
        return sum(band.size_bytes for band in self._bands.values())

    def put(self, queued: QueuedRequest) -> bool:
        """Add a request; return False if the queue is full."""
        band = self._band(queued.priority)
        total_max, bytes_max = self._settings.requests_max, self._settings.bytes_max
        if total_max is not None and len(self) >= total_max:
            return False
        if bytes_max is not None and self.size_bytes + queued.size_bytes > bytes_max:
            return False
        queued.sequence = next(self._sequence)
        return band.put(queued)

    def take(self) -> QueuedRequest | None:
        """Remove and return the next request; None if the queue is empty."""
        for priority in sorted(self._bands, reverse=True):
            if (queued := self._bands[priority].take()) is not None:
                return queued
            del self._bands[priority]
        return None

    def remove(self, queued: QueuedRequest) -> None:
        if not queued.is_removed:
            self._bands[queued.priority].remove(queued)

    def __iter__(self) -> Iterator[QueuedRequest]:
        for band in list(self._bands.values()):
            yield from band.waiting()

    def _band(self, priority: int) -> _Band:
        band = self._bands.get(priority)
        if band is None:
            config = self._settings
            default = config.default_negative_priority_band if priority < 0 else config.default_priority_band
            band = self._bands[priority] = _Band(self._configured.get(priority, default))
        return band


class _Band:
    """Flows of one priority, each a heap. Removed requests stay in the heap until they reach its top."""

    def __init__(self, settings: BandSettings) -> None:
        self._settings = settings
        self._order = ORDERS[settings.order]
        self._is_round_robin = settings.fairness == FAIRNESS[1]
        # In round-robin order: `take` moves the served flow to the end.
        self._flows: dict[str, list[tuple[float, int, QueuedRequest]]] = {}
        self.requests = 0
        self.size_bytes = 0

    def put(self, queued: QueuedRequest) -> bool:
        limits = self._settings
        if self.requests >= limits.requests_max or self.size_bytes + queued.size_bytes > limits.bytes_max:
            return False
        self.requests += 1
        self.size_bytes += queued.size_bytes
        flow = self._flows.setdefault(queued.flow if self._is_round_robin else "", [])
        heapq.heappush(flow, (self._order(queued), queued.sequence, queued))
        return True

    def take(self) -> QueuedRequest | None:
        for name in list(self._flows):
            flow = self._flows.pop(name)
            while flow and flow[0][2].is_removed:
                heapq.heappop(flow)
            if flow:
                _, _, queued = heapq.heappop(flow)
                if flow:
                    self._flows[name] = flow
                self.remove(queued)
                return queued
        return None

    def remove(self, queued: QueuedRequest) -> None:
        queued.is_removed = True
        self.requests -= 1
        self.size_bytes -= queued.size_bytes

    def waiting(self) -> Iterator[QueuedRequest]:
        for flow in self._flows.values():
            yield from (queued for _, _, queued in list(flow) if not queued.is_removed)
