"""The configuration's flow control: a PickerConfig in, parameters and a detector out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Literal

from msgspec import Meta

from router.admission import ConcurrencyDetector, Detector, UtilizationDetector
from router.config_fields import Count, Duration, Number, Positive, Settings
from router.config_file import BandSettings, PickerConfig, PluginEntry
from router.flow import FlowParameters
from router.flow_queue import FAIRNESS, ORDERS, BandParameters, QueueParameters
from router.sessions import agent_session

DETECTORS = ("utilization-detector", "concurrency-detector")
USAGE_LIMIT = "static-usage-limit-policy"
FLOW_TYPES = (*ORDERS, *FAIRNESS, USAGE_LIMIT, *DETECTORS)
"""Plugin types of flow control."""

# An account of its load is renewed so often by the router itself that two may fail before it counts as old.
LOAD_AGES = 3.0

_Mode = Literal["requests", "tokens", "hybrid"]


class _UsageLimit(Settings):
    threshold: Positive = 1.0


class _Utilization(Settings):
    queue_depth_threshold: Positive = 5.0
    kv_cache_util_threshold: Annotated[float, Meta(ge=1e-6, le=1.0)] = 0.8
    metrics_staleness_threshold: Duration = Duration(0.2)
    headroom: Number = 0.0


class _Concurrency(Settings):
    mode: _Mode = "requests"
    concurrency_mode: _Mode | None = None
    max_concurrency: Count = 100
    max_token_concurrency: Count = 1_000_000
    headroom: Number = 0.0


def flow_of(
    config: PickerConfig, load_every_s: float, load_age_max_s: float | None = None
) -> tuple[FlowParameters, Detector] | None:
    """Reads it; None where it is switched off.

    Args:
        load_age_max_s: How old it may be where no detector says so; None: from how often it is asked for.

    Raises:
        ConfigError: Something is not understood.
    """
    detector = _detector(config, load_every_s, load_age_max_s)
    for entry in config.plugins.values():
        if entry.type in (*ORDERS, *FAIRNESS):
            entry.told.read(Settings)
    flow = config.flow
    bands: dict[int, BandParameters] = {}
    for band in flow.priority_bands:
        if band.priority in bands:
            band.section.fail("priority", f"there is a band for {band.priority} already")
        bands[band.priority] = _band(band, config)
    queue = QueueParameters(
        requests_max=flow.max_requests,
        bytes_max=flow.max_bytes,
        bands=bands,
        default=_band(flow.default_priority_band, config),
        default_negative=_band(flow.default_negative_priority_band, config),
    )
    parameters = FlowParameters(
        queue,
        flow.default_request_ttl,
        flow.default_request_ttl if flow.no_endpoint_request_ttl is None else flow.no_endpoint_request_ttl,
        _ceiling(config),
        evicts=flow.enable_eviction,
    )
    return (parameters, detector) if config.gates["flowControl"] else None


def fairness_of(config: PickerConfig) -> Callable[[Mapping[str, str]], str]:
    """Who names a request's flow where no fairness header does: an agent's session, if that is configured."""
    if any(entry.type == "agent-identity" for entry in config.plugins.values()):
        return lambda headers: agent_session(headers) or ""
    return lambda _headers: ""


def _band(band: BandSettings, config: PickerConfig) -> BandParameters:
    default = BandParameters()
    return BandParameters(
        requests_max=band.max_requests or default.requests_max,
        bytes_max=band.max_bytes or default.bytes_max,
        order=_type(band, "orderingPolicyRef", band.ordering_policy_ref, tuple(ORDERS), config)
        or default.order,
        fairness=_type(band, "fairnessPolicyRef", band.fairness_policy_ref, FAIRNESS, config)
        or default.fairness,
    )


def _type(
    band: BandSettings, key: str, name: str | None, allowed: tuple[str, ...], config: PickerConfig
) -> str | None:
    """The type of a plugin that is referred to by name; a type's own name does, too."""
    kind = config.plugins[name].type if name in config.plugins else name
    if kind is not None and kind not in allowed:
        band.section.fail(key, f"{name!r} is none of {', '.join(allowed)}")
    return kind


def _ceiling(config: PickerConfig) -> float:
    name = config.flow.usage_limit_policy_plugin_ref
    if name is None:
        return 1.0
    if name not in config.plugins or config.plugins[name].type != USAGE_LIMIT:
        config.flow.section.fail(
            "usageLimitPolicyPluginRef", f"{name!r} is no {USAGE_LIMIT} among the plugins"
        )
    return config.plugins[name].told.read(_UsageLimit).threshold


def _detector(config: PickerConfig, load_every_s: float, load_age_max_s: float | None) -> Detector:
    made: Mapping[str, Detector] = {
        name: _made_detector(entry, load_every_s)
        for name, entry in config.plugins.items()
        if entry.type in DETECTORS
    }
    reference = config.detector
    if reference is None:
        return UtilizationDetector(load_age_max_s=load_age_max_s or LOAD_AGES * load_every_s)
    if reference.plugin_ref not in made:
        kind = config.plugins[reference.plugin_ref].type
        reference.section.fail("pluginRef", f"{kind} is no detector; there are {', '.join(DETECTORS)}")
    return made[reference.plugin_ref]


def _made_detector(entry: PluginEntry, load_every_s: float) -> Detector:
    if entry.type == DETECTORS[0]:
        known = entry.told.read(_Utilization)
        age_s = max(known.metrics_staleness_threshold, LOAD_AGES * load_every_s)
        return UtilizationDetector(known.queue_depth_threshold, known.kv_cache_util_threshold, age_s)
    limits = entry.told.read(_Concurrency)
    mode = limits.concurrency_mode or limits.mode
    return ConcurrencyDetector(limits.max_concurrency, limits.max_token_concurrency, mode)
