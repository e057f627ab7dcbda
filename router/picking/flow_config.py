"""Flow control's part of the picker configuration: queue settings, saturation ceiling and detector."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from router.config.fields import Duration, Positive, Settings
from router.config.picker_file import BandSettings, FlowSettings, PickerConfig
from router.picking.admission import ConcurrencyDetector, SaturationDetector, UtilizationDetector
from router.picking.flow_queue import FAIRNESS, ORDERS
from router.prompts.request import agent_session_id

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
