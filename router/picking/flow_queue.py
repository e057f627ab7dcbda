"""The requests that wait for room: priority bands, fairness between flows, order within a flow; bounded.

Pure: time is passed in, nothing blocks. Who is let go when is `flow`'s.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from threading import Event

from router.config.picker_file import BandSettings, FlowSettings


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that waits."""

    flow: str  # its fairness id
    priority: int
    size_bytes: int
    arrived_s: float
    deadline_s: float  # when it is given up
    due_s: float  # when its client wants its first token; inf: it did not say
    is_active: Callable[[], bool] | None = None  # whether its client still waits; None: nobody can tell
    called: Event = field(default_factory=Event)  # set once there is an `outcome`
    outcome: str = ""
    has_evicted: bool = False  # whether another request was taken back for it
    gone: bool = False
    sequence: int = 0


Order = Callable[[Waiting], float]

ORDERS: Mapping[str, Order] = {
    "fcfs-ordering-policy": lambda waiting: waiting.sequence,
    "edf-ordering-policy": lambda waiting: waiting.deadline_s,
    "slo-deadline-ordering-policy": lambda waiting: waiting.due_s,
}
FAIRNESS = ("global-strict-fairness-policy", "round-robin-fairness-policy")


class FlowQueue:
    """Everything that waits; the settings name types of policies, not plugins."""

    def __init__(self, settings: FlowSettings) -> None:
        self._settings = settings
        self._told = {band.priority: band for band in settings.priority_bands}
        self._bands: dict[int, _Band] = {}
        self._sequence = count()

    def __len__(self) -> int:
        return sum(band.requests for band in self._bands.values())

    @property
    def size_bytes(self) -> int:
        return sum(band.size_bytes for band in self._bands.values())

    def put(self, waiting: Waiting) -> bool:
        """Takes a request in; False: there is no place."""
        known = self._settings
        band = self._band(waiting.priority)
        total_max, bytes_max = known.requests_max, known.bytes_max
        if total_max is not None and len(self) >= total_max:
            return False
        if bytes_max is not None and self.size_bytes + waiting.size_bytes > bytes_max:
            return False
        waiting.sequence = next(self._sequence)
        return band.put(waiting)

    def take(self) -> Waiting | None:
        """The next one; None: nobody waits."""
        for priority in sorted(self._bands, reverse=True):
            if (waiting := self._bands[priority].take()) is not None:
                return waiting
            del self._bands[priority]
        return None

    def remove(self, waiting: Waiting) -> None:
        if not waiting.gone:
            self._bands[waiting.priority].remove(waiting)

    def __iter__(self) -> Iterator[Waiting]:
        for band in list(self._bands.values()):
            yield from band.waiting()

    def _band(self, priority: int) -> _Band:
        band = self._bands.get(priority)
        if band is None:
            known = self._settings
            default = known.default_negative_priority_band if priority < 0 else known.default_priority_band
            band = self._bands[priority] = _Band(self._told.get(priority, default))
        return band


class _Band:
    """The flows of one priority; each a heap from which those that left are dropped when they come up."""

    def __init__(self, settings: BandSettings) -> None:
        self._settings = settings
        self._order = ORDERS[settings.order]
        self._takes_turns = settings.fairness == FAIRNESS[1]
        # In turn: the flow that was served goes to the end.
        self._flows: dict[str, list[tuple[float, int, Waiting]]] = {}
        self.requests = 0
        self.size_bytes = 0

    def put(self, waiting: Waiting) -> bool:
        known = self._settings
        if self.requests >= known.requests_max or self.size_bytes + waiting.size_bytes > known.bytes_max:
            return False
        self.requests += 1
        self.size_bytes += waiting.size_bytes
        flow = self._flows.setdefault(waiting.flow if self._takes_turns else "", [])
        heapq.heappush(flow, (self._order(waiting), waiting.sequence, waiting))
        return True

    def take(self) -> Waiting | None:
        for name in list(self._flows):
            flow = self._flows.pop(name)
            while flow and flow[0][2].gone:
                heapq.heappop(flow)
            if flow:
                _, _, waiting = heapq.heappop(flow)
                if flow:
                    self._flows[name] = flow
                self.remove(waiting)
                return waiting
        return None

    def remove(self, waiting: Waiting) -> None:
        waiting.gone = True
        self.requests -= 1
        self.size_bytes -= waiting.size_bytes

    def waiting(self) -> Iterator[Waiting]:
        for flow in self._flows.values():
            yield from (waiting for _, _, waiting in list(flow) if not waiting.gone)
