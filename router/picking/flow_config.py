"""The configuration's flow control: a PickerConfig in; settings, a ceiling and a detector out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from router.config.fields import Duration, Positive, Settings
from router.config.picker_file import BandSettings, FlowSettings, PickerConfig
from router.picking.admission import ConcurrencyDetector, Detector, UtilizationDetector
from router.picking.flow_queue import FAIRNESS, ORDERS
from router.picking.sessions import agent_session

USAGE_LIMIT = "static-usage-limit-policy"
_DETECTORS: Mapping[str, type[Detector]] = {
    "utilization-detector": UtilizationDetector,
    "concurrency-detector": ConcurrencyDetector,
}
FLOW_TYPES = (*ORDERS, *FAIRNESS, USAGE_LIMIT, *_DETECTORS)  # plugin types of flow control

# An account of its load is renewed so often by the router itself that two may fail before it counts as old.
LOAD_AGES = 3.0


class _UsageLimit(Settings):
    threshold: Positive = 1.0


def flow_of(
    config: PickerConfig, load_every_s: float, load_age_max_s: float | None = None
) -> tuple[FlowSettings, float, Detector] | None:
    """Reads what FlowControl takes first; None where it is switched off.

    Args:
        load_age_max_s: How old it may be where no detector says so; None: from how often it is asked for.

    Raises:
        ConfigError: Something is not understood.
    """
    detector = _detector(config, load_every_s, load_age_max_s)
    for entry in config.entries:
        if entry.type in (*ORDERS, *FAIRNESS):
            entry.parameters_section.read(Settings)
    flow, priorities = config.flow, set[int]()
    for band in flow.priority_bands:
        if band.priority in priorities:
            band.section.fail("priority", f"there is a band for {band.priority} already")
        priorities.add(band.priority)
    settings = replace(
        flow,
        default_priority_band=_typed(flow.default_priority_band, config),
        default_negative_priority_band=_typed(flow.default_negative_priority_band, config),
        priority_bands=tuple(_typed(band, config) for band in flow.priority_bands),
    )
    ceiling = _ceiling(config)
    return (settings, ceiling, detector) if config.gates["flowControl"] else None


def fairness_of(config: PickerConfig) -> Callable[[Mapping[str, str]], str]:
    """Who names a request's flow where no fairness header does: an agent's session, if that is configured."""
    if any(entry.type == "agent-identity" for entry in config.entries):
        return lambda headers: agent_session(headers) or ""
    return lambda _headers: ""


def _typed(band: BandSettings, config: PickerConfig) -> BandSettings:
    """Return the band with types in the place of plugins' names; a type's own name is one, too."""

    def typed(key: str, name: str, allowed: tuple[str, ...]) -> str:
        kind = config.plugins[name].type if name in config.plugins else name
        if kind not in allowed:
            band.section.fail(key, f"{name!r} is none of {', '.join(allowed)}")
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
            "usageLimitPolicyPluginRef", f"{name!r} is no {USAGE_LIMIT} among the plugins"
        )
    return config.plugins[name].parameters_section.read(_UsageLimit).threshold


def _detector(config: PickerConfig, load_every_s: float, load_age_max_s: float | None) -> Detector:
    made: dict[str, Detector] = {}
    for entry in config.entries:
        if entry.type in _DETECTORS:
            detector = made[entry.name] = entry.parameters_section.read(_DETECTORS[entry.type])
            if isinstance(detector, UtilizationDetector):
                age_s = max(detector.load_age_max_s, LOAD_AGES * load_every_s)
                detector.load_age_max_s = Duration(age_s)
    reference = config.detector
    if reference is None:
        return UtilizationDetector(load_age_max_s=Duration(load_age_max_s or LOAD_AGES * load_every_s))
    if reference.plugin_ref not in made:
        kind = config.plugins[reference.plugin_ref].type
        reference.section.fail("pluginRef", f"{kind} is no detector; there are {', '.join(_DETECTORS)}")
    return made[reference.plugin_ref]
