"""Flow control's queue (priority bands, fairness, order within a flow), saturation detectors, configuration.

Nothing here blocks or reads a clock. `flow` decides when a request leaves the queue. Rules and thresholds are
those of llm-d's endpoint picker.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from math import inf
from random import random
from threading import Event
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta
from msgspec import field as option
from msgspec.structs import replace
from numpy.typing import NDArray

from router.config.fields import Count, Duration, InFlightProducer, Positive, Settings, Text
from router.config.picker_file import BandSettings, FlowSettings, PickerConfig
from router.prompts.request import AGENT_HEADERS, agent_session_id


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


_Mode = Literal["requests", "tokens", "hybrid"]


class UtilizationDetector(Settings):
    """Saturation as the mean over the pods of the greater of queue and KV cache usage."""

    queue_requests: Positive = option(default=5.0, name="queueDepthThreshold")  # queue depth of a full pod
    # Share of the KV cache in use at a full pod.
    kv_usage: Annotated[float, Meta(ge=1e-6, le=1.0)] = option(default=0.8, name="kvCacheUtilThreshold")
    # Maximum age of a pod's metrics in seconds; a pod without recent metrics counts as full.
    load_age_max_s: Duration = option(default=Duration(0.2), name="metricsStalenessThreshold")
    headroom: Annotated[Any, Meta(description="pods are not filtered by saturation")] = None

    def saturation(self, pods: NDArray[Any], _pending: int, now_s: float) -> float:
        full = np.maximum(pods["waiting"] / self.queue_requests, pods["kv_usage"] / self.kv_usage)
        full[now_s - pods["scraped_s"] > self.load_age_max_s] = 1.0
        return float(full.mean())


class ConcurrencyDetector(Settings):
    """Saturation as the share of the pods' capacity that this router's requests in flight use."""

    requests: Count = option(default=100, name="maxConcurrency")  # capacity of a pod in requests
    tokens: Count = option(
        default=1_000_000, name="maxTokenConcurrency"
    )  # capacity in uncached prompt tokens
    mode: _Mode = "requests"  # "hybrid": the greater of both
    concurrency_mode: _Mode | None = None  # alias of `mode`, which takes precedence
    headroom: Annotated[Any, Meta(description="pods are not filtered by saturation")] = None
    in_flight_load_producer_name: InFlightProducer = None

    def __post_init__(self) -> None:
        self.mode = self.concurrency_mode or self.mode

    def saturation(self, pods: NDArray[Any], pending: int, _now_s: float) -> float:
        inflight = float(pods["awaiting"].sum() + pods["decoding"].sum()) + pending
        by_requests = inflight / (self.requests * len(pods))
        by_tokens = float(pods["held_tokens"].sum()) / (self.tokens * len(pods))
        if self.mode == "requests":
            return by_requests
        return by_tokens if self.mode == "tokens" else max(by_requests, by_tokens)


class ProbabilisticAdmitter(UtilizationDetector):
    """Rejects requests of negative priority with the probability min(1, saturation ** power * k)."""

    load_age_max_s: Duration = Duration(inf)  # loads of any age count
    power: Positive = 5.0
    k: Positive = 300.0

    def rejects(self, pods: NDArray[Any], now_s: float) -> bool:
        """Draw whether one request is rejected; see `saturation`."""
        return bool(random() < self.saturation(pods, 0, now_s) ** self.power * self.k)


# `saturation` takes load_table.POD [pods], at least one pod, and the number of dispatched requests that are
# not in the load table yet. It returns 0 for idle pods and 1 or more for full ones.
SaturationDetector = UtilizationDetector | ConcurrencyDetector

USAGE_LIMIT = "static-usage-limit-policy"
_DEFAULT_DETECTOR = "utilization-detector"
DETECTORS: Mapping[str, type[SaturationDetector]] = {
    _DEFAULT_DETECTOR: UtilizationDetector,
    "concurrency-detector": ConcurrencyDetector,
}
ADMITTER = "probabilistic-admitter"
FLOW_TYPES = (*ORDERS, *FAIRNESS, USAGE_LIMIT, ADMITTER, *DETECTORS)  # plugin types of flow control

# Maximum age of a pod's metrics in refresh intervals: two refreshes may fail before they count as stale.
LOAD_AGE_INTERVALS = 3.0


class _UsageLimit(Settings):
    threshold: Positive = 1.0


def read_flow_settings(
    config: PickerConfig, load_every_s: float, load_age_max_s: float | None = None
) -> tuple[FlowSettings, float, SaturationDetector] | None:
    """Read the first three arguments of FlowControl; None if the feature gate is off.

    Args:
        load_every_s: Seconds between two refreshes of a pod's metrics.
        load_age_max_s: Maximum age of the metrics without a configured detector; None: three refreshes.

    Raises:
        ConfigError: A name, type or value is invalid.
    """
    detector = _detector(config, load_every_s, load_age_max_s)
    for entry in config.entries:
        if entry.type in (*ORDERS, *FAIRNESS):
            entry.parameters_section.read(Settings)
    flow, priorities = config.flow, set[int]()
    for band in flow.priority_bands:
        if band.priority in priorities:
            band.section.fail("priority", f"duplicate band: {band.priority}")
        priorities.add(band.priority)
    settings = replace(
        flow,
        default_priority_band=_typed(flow.default_priority_band, config),
        default_negative_priority_band=_typed(flow.default_negative_priority_band, config),
        priority_bands=tuple(_typed(band, config) for band in flow.priority_bands),
    )
    ceiling = _ceiling(config)
    return (settings, ceiling, detector) if config.gates["flowControl"] else None


class AgentIdentity(Settings):
    """Attribute from an agent's session header, also used as the fairness id."""

    additional_session_headers: tuple[Text, ...] = ()  # take precedence over the known ones

    def __post_init__(self) -> None:
        self._names = (*map(str.lower, self.additional_session_headers), *AGENT_HEADERS)

    def attribute(self, headers: Mapping[str, str]) -> str | None:
        return agent_session_id(headers, self._names)


def read_admitters(config: PickerConfig) -> tuple[ProbabilisticAdmitter, ...]:
    """Return the configured probabilistic admitters.

    Raises:
        ConfigError: A parameter is invalid.
    """
    entries = [entry for entry in config.entries if entry.type == ADMITTER]
    return tuple(entry.parameters_section.read(ProbabilisticAdmitter) for entry in entries)


def fairness_id_reader(config: PickerConfig) -> Callable[[Mapping[str, str]], str]:
    """Return a function from headers to the fallback fairness id: the agent session, if configured."""
    for entry in config.entries:
        if entry.type == "agent-identity":
            agents = entry.parameters_section.read(AgentIdentity)
            return lambda headers: agents.attribute(headers) or ""
    return lambda _headers: ""


def _typed(band: BandSettings, config: PickerConfig) -> BandSettings:
    """Return the band with plugin names replaced by their types; a type may also be named directly."""

    def typed(key: str, name: str, allowed: tuple[str, ...]) -> str:
        kind = config.type_of(name)
        if kind not in allowed:
            band.section.fail(key, f"expected one of {', '.join(allowed)}, got {name!r}")
        return kind

    return replace(
        band,
        order=typed("orderingPolicyRef", band.order, tuple(ORDERS)),
        fairness=typed("fairnessPolicyRef", band.fairness, FAIRNESS),
    )


def _ceiling(config: PickerConfig) -> float:
    name = config.flow.usage_limit_policy_plugin_ref
    if name is None:
        return 1.0
    if name not in config.plugins or config.plugins[name].type != USAGE_LIMIT:
        config.flow.section.fail(
            "usageLimitPolicyPluginRef", f"expected the name of a {USAGE_LIMIT} plugin, got {name!r}"
        )
    return config.plugins[name].parameters_section.read(_UsageLimit).threshold


def _detector(config: PickerConfig, load_every_s: float, load_age_max_s: float | None) -> SaturationDetector:
    made: dict[str, SaturationDetector] = {}
    for entry in config.entries:
        if entry.type in DETECTORS:
            detector = made[entry.name] = entry.parameters_section.read(DETECTORS[entry.type])
            if isinstance(detector, UtilizationDetector):
                age_s = max(detector.load_age_max_s, LOAD_AGE_INTERVALS * load_every_s)
                detector.load_age_max_s = Duration(age_s)
    reference = config.detector
    if reference is None or (reference.plugin_ref == _DEFAULT_DETECTOR not in config.plugins):
        age_s = load_age_max_s or LOAD_AGE_INTERVALS * load_every_s
        return UtilizationDetector(load_age_max_s=Duration(age_s))
    if reference.plugin_ref not in made:
        kind = config.type_of(reference.plugin_ref)
        reference.section.fail("pluginRef", f"expected a detector ({', '.join(DETECTORS)}), got {kind!r}")
    return made[reference.plugin_ref]
