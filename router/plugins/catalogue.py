"""The plugin types of a configuration: a type's name in, who makes it out; ours, installed ones, and files.

A type is one of the reference's that we have, an entry point of the group `kvroute.plugins`, or
`FILE.py:CLASS`, relative to the configuration. What is neither is refused with what there is instead.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from router.config_fields import Settings
from router.config_file import PluginEntry
from router.errors import ConfigError
from router.plugins.cache_scorers import ContextLengthAware, LoraAffinityScorer, NoHitLruScorer, PrefixScorer
from router.plugins.handlers import AlwaysMultimodal, AlwaysPd, PrefixBasedPd
from router.plugins.labels import (
    ByLabelFilter,
    DecodeFilter,
    EncodeFilter,
    HeaderLabelScorer,
    HeaderTestingFilter,
    LabelSelectorFilter,
    PrefillFilter,
)
from router.plugins.load_filters import PrefixAffinityFilter, UtilizationFilter
from router.plugins.load_scorers import (
    ActiveRequestScorer,
    KvUsageScorer,
    LoadAwareScorer,
    QueueScorer,
    RunningRequestsScorer,
    TokenLoadScorer,
    TtftCostScorer,
)
from router.plugins.pickers import MaxScorePicker, RandomPicker, WeightedRandomPicker
from router.plugins.session_affinity import SessionAffinity

ENTRY_POINTS = "kvroute.plugins"

MAKERS: Mapping[str, type[Settings]] = {
    "label-selector-filter": LabelSelectorFilter,
    "by-label-selector": LabelSelectorFilter,
    "by-label": ByLabelFilter,
    "decode-filter": DecodeFilter,
    "prefill-filter": PrefillFilter,
    "encode-filter": EncodeFilter,
    "prefix-cache-affinity-filter": PrefixAffinityFilter,
    "utilization-filter": UtilizationFilter,
    "session-affinity-filter": SessionAffinity,
    "session-affinity-scorer": SessionAffinity,
    "header-based-testing-filter": HeaderTestingFilter,
    "header-label-affinity-scorer": HeaderLabelScorer,
    "queue-scorer": QueueScorer,
    "running-requests-size-scorer": RunningRequestsScorer,
    "kv-cache-utilization-scorer": KvUsageScorer,
    "lora-affinity-scorer": LoraAffinityScorer,
    "prefix-cache-scorer": PrefixScorer,
    "no-hit-lru-scorer": NoHitLruScorer,
    "load-aware-scorer": LoadAwareScorer,
    "active-request-scorer": ActiveRequestScorer,
    "token-load-scorer": TokenLoadScorer,
    "context-length-aware": ContextLengthAware,
    "ttft-cost-scorer": TtftCostScorer,
    "max-score-picker": MaxScorePicker,
    "random-picker": RandomPicker,
    "weighted-random-picker": WeightedRandomPicker,
    "prefix-based-pd-decider": PrefixBasedPd,
    "always-disagg-pd-decider": AlwaysPd,
    "always-disagg-multimodal-decider": AlwaysMultimodal,
}
"""Types that stand in a profile or decide for a handler, as far as they need nothing of the router."""

INSTEAD: Mapping[str, str] = {
    "data-parallel-profile-handler": "one endpoint for each rank, which discovery makes",
    "latency-scorer": "ttft-cost-scorer, which needs no predictor",
    "predicted-latency-producer": "ttft-cost-scorer, which needs no predictor",
    "latency-slo-admitter": "flowControl",
    "probabilistic-admitter": "flowControl",
    "burst-prefix-cache-producer": "precise-prefix-cache-producer, which knows of picks at once",
    "header-profile-handler": "disagg-profile-handler, or one router for each profile",
    "slo-headroom-tier-filter": "ttft-cost-scorer, which needs no predictor",
    "topology-affinity-filter": "label-selector-filter, or a plugin of your own, see docs/plugins.md",
    "topology-affinity-scorer": "label-selector-filter, or a plugin of your own, see docs/plugins.md",
    "topology-extractor": "labels of the pods, which plugins see",
    "mm-embeddings-cache-scorer": "precise-prefix-cache-producer",
    "mm-embeddings-cache-producer": "precise-prefix-cache-producer",
    "p2p-source-producer": "the engines' own transfer of blocks",
    "program-aware-fairness": "round-robin-fairness-policy",
    "priority-holdback-policy": "static-usage-limit-policy",
    "soft-reflective-ceiling-policy": "static-usage-limit-policy",
    "dcgm-data-source": "the engine's own metrics page",
    "dcgm-extractor": "the engine's own metrics page",
    "sglanggrpc-parser": "passthrough-parser",
    "disaggregatedset-rollout-screener": "readiness of the pods",
    "endpoint-attribute-scorer": "a plugin of your own, see docs/plugins.md",
    "endpoint-attribute-filter": "utilization-filter, or a plugin of your own, see docs/plugins.md",
}
"""What there is in the place of types that we do not have."""


def make(entry: PluginEntry, directory: Path) -> object:
    """Makes a profile's plugin.

    Raises:
        ConfigError: There is no such type, or its parameters are wrong; names the place.
    """
    if (maker := MAKERS.get(entry.type)) is not None:
        return entry.told.read(maker)
    parameters = entry.told.value()
    try:
        return _custom(entry, directory)(**parameters)
    except ConfigError:
        raise
    except Exception as error:
        entry.section.fail("parameters", f"{entry.type} refuses them: {error}")


def _custom(entry: PluginEntry, directory: Path) -> Callable[..., object]:
    path, colon, name = entry.type.rpartition(":")
    if colon and path.endswith(".py"):
        return _from_file(entry, directory / path, name)
    installed = tuple(entry_points(group=ENTRY_POINTS, name=entry.type))
    if installed:
        return _from_entry_point(entry, installed[0])
    instead = INSTEAD.get(entry.type)
    advice = f"there is {instead} instead" if instead else f"there are {', '.join(sorted(known_types()))}"
    return entry.section.fail("type", f"{entry.type!r} is not understood; {advice}")


def is_own(kind: str) -> bool:
    """Whether a type is a user's own plugin, which may do whatever it likes."""
    return ".py:" in kind or any(entry_points(group=ENTRY_POINTS, name=kind))


def known_types() -> frozenset[str]:
    """Names of all types that may stand in a profile."""
    return frozenset(MAKERS) | {point.name for point in entry_points(group=ENTRY_POINTS)}


def _from_entry_point(entry: PluginEntry, point: EntryPoint) -> Callable[..., object]:
    try:
        loaded: Callable[..., object] = point.load()
    except Exception as error:
        entry.section.fail("type", f"the entry point {point.value} cannot be loaded: {error}")
    return loaded


def _from_file(entry: PluginEntry, path: Path, name: str) -> Callable[..., object]:
    spec = importlib.util.spec_from_file_location(f"kvroute_plugin_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        entry.section.fail("type", f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        found: Any = getattr(module, name)
    except Exception as error:
        entry.section.fail("type", f"{path} has no usable {name}: {error!r}")
    if not callable(found):
        entry.section.fail("type", f"{name} in {path} is no class")
    return found  # type: ignore[no-any-return]
