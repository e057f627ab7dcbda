"""From a configuration to the pipeline that it describes: a PickerConfig in, a Pipeline out.

A plugin's type is one of the reference's that we have, an entry point of the group `kvroute.plugins`, or
`FILE.py:CLASS`, relative to the configuration. What is neither is refused with what there is instead. Adds
what the reference adds: one profile of all that can stand in one, the single-profile handler, the max-score
picker, and producers for whatever is consumed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import numpy as np

from router.config.fields import Settings
from router.config.picker_file import (
    DiscoverySettings,
    PickerConfig,
    PluginEntry,
    ProfileEntry,
    WeightedReference,
)
from router.errors import ConfigError
from router.picking.flow_config import FLOW_TYPES
from router.plugins import cache_scorers, labels, load
from router.plugins.api import Filter, Picker, Scorer
from router.plugins.attribute_reporter import TYPE as REPORTER
from router.plugins.cache_scorers import APPROXIMATE, PRECISE, PRODUCER_KEY
from router.plugins.pipeline import Pipeline
from router.plugins.producer_settings import MetricsSettings, TokenSettings
from router.plugins.producers import (
    AgentIdentity,
    ApproximatePrefix,
    AttributeProducer,
    PrecisePrefix,
    PrefixProducer,
    SessionIdProducer,
)
from router.plugins.profiles import (
    AlwaysMultimodal,
    AlwaysPd,
    Disaggregation,
    MaxScorePicker,
    PrefillApart,
    PrefixBasedPd,
    Profile,
    ProfileHandler,
    RandomPicker,
    Stage,
    WeightedRandomPicker,
    WeightedScorer,
)
from router.plugins.session_affinity import SessionAffinity
from router.prompts.parsers import PARSERS

ENTRY_POINTS = "kvroute.plugins"
_SINGLE = "single-profile-handler"
_Plugins = Mapping[str, object]

# Types that stand in a profile or decide for a handler, as far as they need nothing of the router.
MAKERS: Mapping[str, type[Settings]] = {
    "label-selector-filter": labels.LabelSelectorFilter,
    "by-label-selector": labels.LabelSelectorFilter,
    "by-label": labels.ByLabelFilter,
    "decode-filter": labels.DecodeFilter,
    "prefill-filter": labels.PrefillFilter,
    "encode-filter": labels.EncodeFilter,
    "prefix-cache-affinity-filter": load.PrefixAffinityFilter,
    "utilization-filter": load.UtilizationFilter,
    "session-affinity-filter": SessionAffinity,
    "session-affinity-scorer": SessionAffinity,
    "header-based-testing-filter": labels.HeaderTestingFilter,
    "header-label-affinity-scorer": labels.HeaderLabelScorer,
    "queue-scorer": load.QueueScorer,
    "running-requests-size-scorer": load.RunningRequestsScorer,
    "kv-cache-utilization-scorer": load.KvUsageScorer,
    "lora-affinity-scorer": cache_scorers.LoraAffinityScorer,
    "prefix-cache-scorer": cache_scorers.PrefixScorer,
    "no-hit-lru-scorer": cache_scorers.NoHitLruScorer,
    "load-aware-scorer": load.LoadAwareScorer,
    "active-request-scorer": load.ActiveRequestScorer,
    "token-load-scorer": load.TokenLoadScorer,
    "context-length-aware": cache_scorers.ContextLengthAware,
    "ttft-cost-scorer": load.TtftCostScorer,
    "max-score-picker": MaxScorePicker,
    "random-picker": RandomPicker,
    "weighted-random-picker": WeightedRandomPicker,
    "prefix-based-pd-decider": PrefixBasedPd,
    "always-disagg-pd-decider": AlwaysPd,
    "always-disagg-multimodal-decider": AlwaysMultimodal,
}


class _InflightLoad(Settings):
    add_estimated_output_tokens: bool = False
    sync_cross_replica_state: Any = None

    def __post_init__(self) -> None:
        if self.add_estimated_output_tokens:
            raise ValueError("addEstimatedOutputTokens: is not understood; prompt tokens count alone")


class _PrefillHeader(Settings):
    prefill_profile: Any = None


# Types that stand in no profile.
_OTHERS: Mapping[str, type[Settings]] = {
    _SINGLE: Settings,
    "disagg-profile-handler": Disaggregation,
    "pd-profile-handler": PrefillApart,
    "agent-identity": AgentIdentity,
    "session-id-producer": SessionIdProducer,
    APPROXIMATE: ApproximatePrefix,
    # Part of the router whether they are named or not; what they may be told is checked, without effect.
    "file-discovery": DiscoverySettings,
    "core-metrics-extractor": Settings,
    "models-data-source": Settings,
    "models-extractor": Settings,
    "endpoint-notification-source": Settings,
    "destination-endpoint-served-verifier": Settings,
    "inflight-load-producer": _InflightLoad,
    # What these say is settings of the router's, which are read before any plugin is made.
    "metrics-data-source": MetricsSettings,
    "token-producer": TokenSettings,
    "tokenizer": TokenSettings,
    # Where decoding is apart from prefilling the profile handler sets their headers itself.
    "disagg-headers-handler": Settings,
    "prefill-header-handler": _PrefillHeader,
}

# A producer and its scorer in one.
_PRECISE_SCORER = "precise-prefix-cache-scorer"
# Types whose parameters are others' to read.
_READ_ELSEWHERE = frozenset({*PARSERS, *FLOW_TYPES, REPORTER})

# Replacements of types that we do not have.
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


def build_pipeline(config: PickerConfig, *, block_tokens: int, random: np.random.Generator) -> Pipeline:
    """Makes every plugin and wires them.

    Raises:
        ConfigError: Something is not understood, missing, or does not fit; names the place.
    """
    plugins: dict[str, object] = {}
    prefixes: dict[str, PrefixProducer] = {}
    attributes: dict[str, AttributeProducer] = {}
    handlers: dict[str, Settings] = {}
    for name, entry in config.plugins.items():
        if entry.type in (PRECISE, _PRECISE_SCORER):
            prefixes[name] = PrecisePrefix(block_tokens)
            if entry.type == _PRECISE_SCORER:
                plugins[name] = cache_scorers.PrefixScorer(name)
        elif entry.type in _OTHERS:
            other = entry.parameters_section.read(_OTHERS[entry.type])
            if isinstance(other, ApproximatePrefix):
                prefixes[name] = other
            elif isinstance(other, AttributeProducer):
                attributes[name] = other
            elif entry.type.endswith("-profile-handler"):
                handlers[name] = other
        elif entry.type not in _READ_ELSEWHERE:
            plugins[name] = make(entry, config.directory)
    for name, plugin in plugins.items():
        _provide(config, prefixes, name, getattr(plugin, "producer", None), block_tokens)
    profiles = {entry.name: _profile(entry, plugins, config) for entry in _profile_entries(config, plugins)}
    handler = _handler(config, handlers, plugins, profiles)
    types = {name: entry.type for name, entry in config.plugins.items()}
    return Pipeline(handler, plugins, prefixes, attributes, types, random)


def _provide(
    config: PickerConfig, prefixes: dict[str, PrefixProducer], name: str, producer: object, block_tokens: int
) -> None:
    """Adds the producer that a plugin consumes, if it is one of the two that need not be declared."""
    if not isinstance(producer, str) or producer in prefixes:
        return
    # A renamed producer is meant by its type, too, as long as there is one.
    same = [other for other, entry in config.plugins.items() if entry.type == producer]
    if same:
        prefixes[producer] = prefixes[same[0]]
    elif producer == APPROXIMATE:
        prefixes[producer] = ApproximatePrefix()
    elif producer == PRECISE:
        prefixes[producer] = PrecisePrefix(block_tokens)
    else:
        known = sorted({*prefixes, APPROXIMATE, PRECISE})
        config.plugins[name].parameters_section.fail(
            PRODUCER_KEY, f"there is no producer {producer!r}; there are {', '.join(known)}"
        )


def _profile_entries(config: PickerConfig, plugins: _Plugins) -> tuple[ProfileEntry, ...]:
    if config.profiles:
        return config.profiles
    every = (name for name, plugin in plugins.items() if isinstance(plugin, Filter | Scorer | Picker))
    return (ProfileEntry("default", tuple(map(WeightedReference, every))).located(config.section),)


def _profile(entry: ProfileEntry, plugins: _Plugins, config: PickerConfig) -> Profile:
    filters: list[tuple[str, Filter]] = []
    scorers: list[WeightedScorer] = []
    pickers: list[Picker] = []
    for reference in entry.plugins:
        name = reference.plugin_ref
        plugin, kind = plugins.get(name), config.plugins[name].type
        is_filter, is_scorer = isinstance(plugin, Filter), isinstance(plugin, Scorer)
        # One object of ours does both; its type says which of them is meant here.
        if isinstance(plugin, Filter) and not (is_scorer and kind.endswith("-scorer")):
            filters.append((name, plugin))
        if isinstance(plugin, Scorer) and not (is_filter and kind.endswith("-filter")):
            scorers.append(WeightedScorer(name, plugin, reference.weight))
        if isinstance(plugin, Picker):
            pickers.append(plugin)
        if plugin is not None and not isinstance(plugin, Filter | Scorer | Picker):
            reference.section.fail("pluginRef", f"{kind} has no filter, score or pick")
    if len(pickers) > 1:
        entry.section.fail("plugins", "has two pickers; a profile takes one")
    return Profile(entry.name, filters, scorers, pickers[0] if pickers else MaxScorePicker())


def _handler(
    config: PickerConfig, handlers: Mapping[str, Settings], plugins: _Plugins, profiles: Mapping[str, Profile]
) -> ProfileHandler:
    if len(handlers) > 1:
        config.section.fail("plugins", f"has several profile handlers ({', '.join(handlers)}); one is used")
    match next(iter(handlers.values()), None):
        case Disaggregation() as told:
            return _disaggregated(told, plugins, profiles)
        case PrefillApart() as told:
            return _prefill_apart(told, plugins, profiles)
    if len(profiles) != 1:
        config.section.fail(
            "schedulingProfiles",
            f"{_SINGLE} takes one profile, here are {len(profiles)}; add a disagg-profile-handler",
        )
    return ProfileHandler(next(iter(profiles.values())))


def _disaggregated(
    told: Disaggregation, plugins: _Plugins, profiles: Mapping[str, Profile]
) -> ProfileHandler:
    names, deciders = told.profiles, told.deciders
    if (decode := profiles.get(names.decode)) is None:
        told.section.fail("profiles", f"there is no decode profile; there are {', '.join(profiles)}")
    return ProfileHandler(
        decode,
        _stage(told, "deciders.prefill", deciders.prefill, profiles.get(names.prefill), plugins),
        _stage(told, "deciders.encode", deciders.encode, profiles.get(names.encode), plugins),
        prefill_first=told.stage_order == "prefill-first",
    )


def _prefill_apart(told: PrefillApart, plugins: _Plugins, profiles: Mapping[str, Profile]) -> ProfileHandler:
    decode, prefill = profiles.get(told.decode_profile), profiles.get(told.prefill_profile)
    if decode is None or prefill is None:
        told.section.fail("", f"needs the profiles decode and prefill; there are {', '.join(profiles)}")
    return ProfileHandler(
        decode, _stage(told, "deciderPluginName", told.decider_plugin_name, prefill, plugins)
    )


def _stage(
    told: Settings, key: str, decider: str | None, profile: Profile | None, plugins: _Plugins
) -> Stage | None:
    """Make a stage; None: without a decider it is never apart."""
    if decider is None:
        return None
    plugin: Any = plugins.get(decider)
    if not hasattr(plugin, "decide"):
        known = [kind for kind in MAKERS if kind.endswith("-decider")]
        told.section.fail(key, f"{decider!r} is no decider among the plugins; there are {', '.join(known)}")
    if profile is None:
        told.section.fail("profiles", f"there is a decider but no profile for {key.rpartition('.')[2]}")
    return Stage(profile, plugin)


def make(entry: PluginEntry, directory: Path) -> object:
    """Makes a profile's plugin.

    Raises:
        ConfigError: There is no such type, or its parameters are wrong; names the place.
    """
    if (maker := MAKERS.get(entry.type)) is not None:
        return entry.parameters_section.read(maker)
    parameters = entry.parameters_section.value()
    try:
        return _custom(entry, directory)(**parameters)
    except ConfigError:
        raise
    except Exception as error:
        entry.section.fail("parameters", f"{entry.type} refuses them: {error}")


def is_own(kind: str) -> bool:
    """Whether a type is a user's own plugin, which may do whatever it likes."""
    return ".py:" in kind or any(entry_points(group=ENTRY_POINTS, name=kind))


def _custom(entry: PluginEntry, directory: Path) -> Callable[..., object]:
    path, colon, name = entry.type.rpartition(":")
    if colon and path.endswith(".py"):
        return _from_file(entry, directory / path, name)
    installed = entry_points(group=ENTRY_POINTS)
    if entry.type in installed.names:
        return _from_entry_point(entry, installed[entry.type])
    known = {*MAKERS, *_OTHERS, *_READ_ELSEWHERE, PRECISE, _PRECISE_SCORER, *installed.names}
    instead = INSTEAD.get(entry.type)
    advice = f"there is {instead} instead" if instead else f"there are {', '.join(sorted(known))}"
    return entry.section.fail("type", f"{entry.type!r} is not understood; {advice}")


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
