"""The configuration's flow control: a PickerConfig in, parameters and a detector out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from router.agent_headers import agent_session
from router.config_fields import Fields
from router.config_file import PickerConfig
from router.flow import FlowParameters
from router.flow_queue import FAIRNESS, ORDERS, BandParameters, QueueParameters
from router.saturation import ConcurrencyDetector, Detector, UtilizationDetector

DETECTORS = ("utilization-detector", "concurrency-detector")
USAGE_LIMIT = "static-usage-limit-policy"
FLOW_TYPES = (*ORDERS, *FAIRNESS, USAGE_LIMIT, *DETECTORS)
"""Plugin types of flow control."""

_BAND_FIELDS = ("priority", "maxBytes", "maxRequests", "fairnessPolicyRef", "orderingPolicyRef")
_FLOW_FIELDS = (
    "maxBytes",
    "maxRequests",
    "defaultRequestTTL",
    "noEndpointRequestTTL",
    "defaultPriorityBand",
    "defaultNegativePriorityBand",
    "priorityBands",
    "usageLimitPolicyPluginRef",
    "saturationDetector",
    "enableEviction",
)
_PRIORITY_MAX = (1 << 31) - 1
# An account of its load is renewed so often by the router itself that two may fail before it counts as old.
LOAD_AGES = 3.0


def flow_of(
    config: PickerConfig, load_every_s: float, load_age_max_s: float | None = None
) -> tuple[FlowParameters, Detector] | None:
    """Reads it; None where it is switched off.

    Args:
        load_every_s: How often pods are asked for their load.
        load_age_max_s: How old it may be where no detector says so; None: from how often it is asked for.

    Raises:
        ConfigError: Something is not understood.
    """
    fields = config.flow.only(*_FLOW_FIELDS)
    detector = _detector(config, load_every_s, load_age_max_s)
    for entry in config.plugins.values():
        if entry.type in (*ORDERS, *FAIRNESS):
            entry.parameters.only()
    bands: dict[int, BandParameters] = {}
    for item in fields.each("priorityBands", _BAND_FIELDS):
        priority = item.whole("priority", 0, least=-_PRIORITY_MAX - 1, most=_PRIORITY_MAX)
        if priority in bands:
            item.fail("priority", f"there is a band for {priority} already")
        bands[priority] = _band(item, config)
    queue = QueueParameters(
        requests_max=fields.quantity("maxRequests", 1) if "maxRequests" in fields else None,
        bytes_max=fields.quantity("maxBytes", 1) if "maxBytes" in fields else None,
        bands=bands,
        default=_band(fields.fields("defaultPriorityBand", _BAND_FIELDS), config),
        default_negative=_band(fields.fields("defaultNegativePriorityBand", _BAND_FIELDS), config),
    )
    ttl_s = fields.duration_s("defaultRequestTTL", 60.0)
    parameters = FlowParameters(
        queue,
        ttl_s,
        fields.duration_s("noEndpointRequestTTL", ttl_s),
        _ceiling(fields, config),
        evicts=fields.flag("enableEviction", False),
    )
    return (parameters, detector) if config.gates["flowControl"] else None


def fairness_of(config: PickerConfig) -> Callable[[Mapping[str, str]], str]:
    """Who names a request's flow where no fairness header does: an agent's session, if that is configured."""
    if any(entry.type == "agent-identity" for entry in config.plugins.values()):
        return lambda headers: agent_session(headers) or ""
    return lambda _headers: ""


def _band(item: Fields, config: PickerConfig) -> BandParameters:
    default = BandParameters()
    return BandParameters(
        requests_max=item.quantity("maxRequests", default.requests_max),
        bytes_max=item.quantity("maxBytes", default.bytes_max),
        order=_type_of(item, "orderingPolicyRef", config, tuple(ORDERS), default.order),
        fairness=_type_of(item, "fairnessPolicyRef", config, FAIRNESS, default.fairness),
    )


def _type_of(item: Fields, key: str, config: PickerConfig, allowed: tuple[str, ...], default: str) -> str:
    """The type of a plugin that is referred to by name; a type's own name does, too."""
    if key not in item:
        return default
    name = item.text(key)
    kind = config.plugins[name].type if name in config.plugins else name
    if kind not in allowed:
        item.fail(key, f"{name!r} is none of {', '.join(allowed)}")
    return kind


def _ceiling(fields: Fields, config: PickerConfig) -> float:
    if "usageLimitPolicyPluginRef" not in fields:
        return 1.0
    name = fields.text("usageLimitPolicyPluginRef")
    if name not in config.plugins or config.plugins[name].type != USAGE_LIMIT:
        fields.fail("usageLimitPolicyPluginRef", f"{name!r} is no {USAGE_LIMIT} among the plugins")
    return config.plugins[name].parameters.only("threshold").number("threshold", 1.0, least=1e-6)


def _detector(config: PickerConfig, load_every_s: float, load_age_max_s: float | None) -> Detector:
    made: Mapping[str, Detector] = {
        name: _made_detector(entry.type, entry.parameters, load_every_s)
        for name, entry in config.plugins.items()
        if entry.type in DETECTORS
    }
    reference = config.detector
    if reference is None:
        return UtilizationDetector(load_age_max_s=load_age_max_s or LOAD_AGES * load_every_s)
    if reference.name not in made:
        kind = config.plugins[reference.name].type
        reference.fields.fail("pluginRef", f"{kind} is no detector; there are {', '.join(DETECTORS)}")
    return made[reference.name]


def _made_detector(kind: str, parameters: Fields, load_every_s: float) -> Detector:
    if kind == DETECTORS[0]:
        known = parameters.only(
            "queueDepthThreshold", "kvCacheUtilThreshold", "metricsStalenessThreshold", "headroom"
        )
        known.number("headroom", 0.0)
        age_s = known.duration_s("metricsStalenessThreshold", 0.2)
        return UtilizationDetector(
            known.number("queueDepthThreshold", 5.0, least=1e-6),
            known.number("kvCacheUtilThreshold", 0.8, least=1e-6, most=1.0),
            max(age_s, LOAD_AGES * load_every_s),
        )
    known = parameters.only("mode", "concurrencyMode", "maxConcurrency", "maxTokenConcurrency", "headroom")
    known.number("headroom", 0.0)
    mode = "concurrencyMode" if "concurrencyMode" in known else "mode"
    return ConcurrencyDetector(
        known.whole("maxConcurrency", 100, least=1),
        known.whole("maxTokenConcurrency", 1_000_000, least=1),
        known.choice(mode, ("requests", "tokens", "hybrid"), "requests"),
    )
