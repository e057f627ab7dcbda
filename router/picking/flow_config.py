"""Saturation detectors and flow control's part of the picker configuration, with llm-d's thresholds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, field
from msgspec.structs import replace
from numpy.typing import NDArray

from router.config.fields import Count, Duration, Number, Positive, Settings
from router.config.picker_file import BandSettings, FlowSettings, PickerConfig
from router.picking.flow_queue import FAIRNESS, ORDERS
from router.prompts.request import agent_session_id

_Mode = Literal["requests", "tokens", "hybrid"]


class UtilizationDetector(Settings):
    """Saturation as the mean over the pods of the greater of queue and KV cache usage."""

    queue_requests: Positive = field(default=5.0, name="queueDepthThreshold")  # queue depth of a full pod
    # Share of the KV cache in use at a full pod.
    kv_usage: Annotated[float, Meta(ge=1e-6, le=1.0)] = field(default=0.8, name="kvCacheUtilThreshold")
    # Maximum age of a pod's metrics in seconds; a pod without recent metrics counts as full.
    load_age_max_s: Duration = field(default=Duration(0.2), name="metricsStalenessThreshold")
    headroom: Number = 0.0  # accepted, without effect

    def saturation(self, pods: NDArray[Any], _pending: int, now_s: float) -> float:
        full = np.maximum(pods["waiting"] / self.queue_requests, pods["kv_usage"] / self.kv_usage)
        full[now_s - pods["scraped_s"] > self.load_age_max_s] = 1.0
        return float(full.mean())


class ConcurrencyDetector(Settings):
    """Saturation as the share of the pods' capacity that this router's requests in flight use."""

    requests: Count = field(default=100, name="maxConcurrency")  # capacity of a pod in requests
    tokens: Count = field(default=1_000_000, name="maxTokenConcurrency")  # capacity in uncached prompt tokens
    mode: _Mode = "requests"  # "hybrid": the greater of both
    concurrency_mode: _Mode | None = None  # alias of `mode`, which takes precedence
    headroom: Number = 0.0  # accepted, without effect

    def __post_init__(self) -> None:
        self.mode = self.concurrency_mode or self.mode

    def saturation(self, pods: NDArray[Any], pending: int, _now_s: float) -> float:
        inflight = float(pods["awaiting"].sum() + pods["decoding"].sum()) + pending
        by_requests = inflight / (self.requests * len(pods))
        by_tokens = float(pods["held_tokens"].sum()) / (self.tokens * len(pods))
        if self.mode == "requests":
            return by_requests
        return by_tokens if self.mode == "tokens" else max(by_requests, by_tokens)


# `saturation` takes load_table.POD [pods], at least one pod, and the number of dispatched requests that are
# not in the load table yet. It returns 0 for idle pods and 1 or more for full ones.
SaturationDetector = UtilizationDetector | ConcurrencyDetector

USAGE_LIMIT = "static-usage-limit-policy"
_DETECTORS: Mapping[str, type[SaturationDetector]] = {
    "utilization-detector": UtilizationDetector,
    "concurrency-detector": ConcurrencyDetector,
}
FLOW_TYPES = (*ORDERS, *FAIRNESS, USAGE_LIMIT, *_DETECTORS)  # plugin types of flow control

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


def fairness_id_reader(config: PickerConfig) -> Callable[[Mapping[str, str]], str]:
    """Return a function from headers to the fallback fairness id: the agent session, if configured."""
    if any(entry.type == "agent-identity" for entry in config.entries):
        return lambda headers: agent_session_id(headers) or ""
    return lambda _headers: ""


def _typed(band: BandSettings, config: PickerConfig) -> BandSettings:
    """Return the band with plugin names replaced by their types; a type may also be named directly."""

    def typed(key: str, name: str, allowed: tuple[str, ...]) -> str:
        kind = config.plugins[name].type if name in config.plugins else name
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
        if entry.type in _DETECTORS:
            detector = made[entry.name] = entry.parameters_section.read(_DETECTORS[entry.type])
            if isinstance(detector, UtilizationDetector):
                age_s = max(detector.load_age_max_s, LOAD_AGE_INTERVALS * load_every_s)
                detector.load_age_max_s = Duration(age_s)
    reference = config.detector
    if reference is None:
        age_s = load_age_max_s or LOAD_AGE_INTERVALS * load_every_s
        return UtilizationDetector(load_age_max_s=Duration(age_s))
    if reference.plugin_ref not in made:
        kind = config.plugins[reference.plugin_ref].type
        reference.section.fail("pluginRef", f"expected a detector ({', '.join(_DETECTORS)}), got {kind}")
    return made[reference.plugin_ref]
