"""Plugin registry and factory: builds the pipeline that a picker configuration describes.

A plugin's type is a supported llm-d type, an entry point of the group `kvroute.plugins`, or `FILE.py:CLASS`
relative to the configuration file. Any other type is rejected with the supported alternative. Defaults are as
in llm-d: one profile of all plugins, the single-profile handler, the max-score picker and required producers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
from msgspec import Meta, field

from router.config.fields import Settings
from router.config.picker_file import (
    DiscoverySettings,
    PickerConfig,
    PluginEntry,
    ProfileEntry,
    WeightedReference,
)
from router.errors import ConfigError
from router.picking.flow_queue import DETECTORS, FLOW_TYPES, AgentIdentity
from router.plugins import labels, producer_settings, producers, profiles, scorers
from router.plugins.api import Filter, Picker, Scorer
from router.plugins.attribute_reporter import TYPE as REPORTER
from router.plugins.pipeline import Pipeline
from router.plugins.scorers import APPROXIMATE, IMPLIED, PRECISE, PRODUCER_KEY
from router.prompts.parsers import PARSERS

ENTRY_POINTS = "kvroute.plugins"
_SINGLE = "single-profile-handler"
_PRECISE_SCORER = "precise-prefix-cache-scorer"  # combines a producer and its scorer
_Plugins = Mapping[str, object]
_Profiles = Mapping[str, profiles.Profile]

# Filters, scorers, pickers and deciders by type.
PLUGIN_TYPES: Mapping[str, type[Settings]] = {
    "label-selector-filter": labels.LabelSelectorFilter,
    "by-label-selector": labels.LabelSelectorFilter,
    "by-label": labels.ByLabelFilter,
    "decode-filter": labels.DecodeFilter,
    "prefill-filter": labels.PrefillFilter,
    "encode-filter": labels.EncodeFilter,
    "prefix-cache-affinity-filter": scorers.PrefixAffinityFilter,
    "utilization-filter": scorers.UtilizationFilter,
    "session-affinity-filter": labels.SessionAffinity,
    "session-affinity-scorer": labels.SessionAffinity,
    "header-based-testing-filter": labels.HeaderTestingFilter,
    "header-label-affinity-scorer": labels.HeaderLabelScorer,
    "queue-scorer": scorers.QueueScorer,
    "running-requests-size-scorer": scorers.RunningRequestsScorer,
    "kv-cache-utilization-scorer": scorers.KvUsageScorer,
    "lora-affinity-scorer": scorers.LoraAffinityScorer,
    "prefix-cache-scorer": scorers.PrefixScorer,
    "no-hit-lru-scorer": scorers.NoHitLruScorer,
    "load-aware-scorer": scorers.LoadAwareScorer,
    "active-request-scorer": scorers.ActiveRequestScorer,
    "token-load-scorer": scorers.TokenLoadScorer,
    "context-length-aware": scorers.ContextLengthAware,
    "ttft-cost-scorer": scorers.TtftCostScorer,
    "max-score-picker": profiles.MaxScorePicker,
    "random-picker": profiles.RandomPicker,
    "weighted-random-picker": profiles.WeightedRandomPicker,
    "prefix-based-pd-decider": profiles.PrefixBasedPdDecider,
    "always-disagg-pd-decider": profiles.AlwaysPdDecider,
    "always-disagg-multimodal-decider": profiles.AlwaysMultimodalDecider,
}


_NO_OUTPUT = Meta(description="only prompt tokens count")
_BY_HANDLER = "the profile handler sets the headers of all profiles"
_BY_DISCOVERY = "pods and resources are always watched"


class _InflightLoad(Settings):
    add_estimated_output_tokens: bool = False
    output_ratio: Annotated[Any, _NO_OUTPUT] = None
    max_estimated_output_tokens: Annotated[Any, _NO_OUTPUT] = None
    sync_cross_replica_state: Annotated[Any, Meta(description="replicas share their loads by --peer")] = None
    producer: Annotated[Any, Meta(description="hits are those of the index")] = field(
        default=None, name=PRODUCER_KEY
    )

    def __post_init__(self) -> None:
        if self.add_estimated_output_tokens:
            raise ValueError("addEstimatedOutputTokens: not supported; only prompt tokens count")


class _HeadersHandler(Settings):
    prefill_profile: Annotated[Any, Meta(description=_BY_HANDLER)] = None
    encode_profile: Annotated[Any, Meta(description=_BY_HANDLER)] = None


class _Notification(Settings):
    group: Annotated[Any, Meta(description=_BY_DISCOVERY)] = None
    version: Annotated[Any, Meta(description=_BY_DISCOVERY)] = None
    kind: Annotated[Any, Meta(description=_BY_DISCOVERY)] = None


# Types that are not part of a profile.
_NON_PROFILE_TYPES: Mapping[str, type[Settings]] = {
    _SINGLE: Settings,
    "disagg-profile-handler": profiles.DisaggHandlerSettings,
    "pd-profile-handler": profiles.PdHandlerSettings,
    "data-parallel-profile-handler": profiles.DataParallelHandlerSettings,
    "agent-identity": AgentIdentity,
    "session-id-producer": producers.SessionIdProducer,
    APPROXIMATE: producers.ApproximatePrefix,
    # Always active in the router.
    "file-discovery": DiscoverySettings,
    "core-metrics-extractor": producer_settings.MetricsExtractorSettings,
    "models-data-source": producer_settings.ModelsSettings,
    "models-extractor": Settings,
    "endpoint-notification-source": _Notification,
    "k8s-notification-source": _Notification,
    "destination-endpoint-served-verifier": Settings,
    "inflight-load-producer": _InflightLoad,
    # Their parameters are router settings, which producer_settings reads.
    PRECISE: producer_settings.PreciseSettings,
    _PRECISE_SCORER: producer_settings.PreciseSettings,
    "metrics-data-source": producer_settings.MetricsSettings,
    "token-producer": producer_settings.TokenSettings,
    "tokenizer": producer_settings.TokenSettings,
    # The profile handler sets their headers itself.
    "disagg-headers-handler": _HeadersHandler,
    "prefill-header-handler": _HeadersHandler,
}

# Types whose parameters other modules read.
_READ_ELSEWHERE = frozenset({*PARSERS, *FLOW_TYPES, REPORTER})

_TYPES: Mapping[str, type[Settings]] = {**PLUGIN_TYPES, **_NON_PROFILE_TYPES, **DETECTORS}

# Types that llm-d v0.11 removes, and what takes their place there.
REMOVED: Mapping[str, str] = {
    "pd-profile-handler": "disagg-profile-handler with profiles and deciders",
    "disagg-headers-handler": "nothing: the profile handler sets the headers",
    "prefill-header-handler": "nothing: the profile handler sets the headers",
    _PRECISE_SCORER: f"{PRECISE}, and a prefix-cache-scorer that names it by {PRODUCER_KEY}",
    "by-label": "label-selector-filter with matchExpressions",
    "by-label-selector": "label-selector-filter",
    "tokenizer": "token-producer",
}

# Alternatives to llm-d types that are not supported.
REPLACEMENTS: Mapping[str, str] = {
    "latency-scorer": "ttft-cost-scorer, which needs no predictor",
    "predicted-latency-producer": "ttft-cost-scorer, which needs no predictor",
    "latency-slo-admitter": "flowControl",
    "burst-prefix-cache-producer": "precise-prefix-cache-producer, which includes picks at once",
    "header-profile-handler": "disagg-profile-handler, or one router per profile",
    "slo-headroom-tier-filter": "ttft-cost-scorer, which needs no predictor",
    "topology-affinity-filter": "label-selector-filter, or a custom plugin (docs/plugins.md)",
    "topology-affinity-scorer": "label-selector-filter, or a custom plugin (docs/plugins.md)",
    "topology-extractor": "pod labels, which plugins can read",
    "mm-embeddings-cache-scorer": "precise-prefix-cache-producer",
    "mm-embeddings-cache-producer": "precise-prefix-cache-producer",
    "p2p-source-producer": "the engines' own KV transfer",
    "program-aware-fairness": "round-robin-fairness-policy",
    "priority-holdback-policy": "static-usage-limit-policy",
    "soft-reflective-ceiling-policy": "static-usage-limit-policy",
    "dcgm-data-source": "the engine's own metrics page",
    "dcgm-extractor": "the engine's own metrics page",
    "sglanggrpc-parser": "passthrough-parser",
    "disaggregatedset-rollout-screener": "pod readiness",
    "endpoint-attribute-scorer": "a custom plugin (docs/plugins.md)",
    "endpoint-attribute-filter": "utilization-filter, or a custom plugin (docs/plugins.md)",
}


def build_pipeline(config: PickerConfig, *, block_tokens: int, random: np.random.Generator) -> Pipeline:
    """Create and connect all plugins of a configuration.

    Raises:
        ConfigError: A plugin or parameter is unknown, missing or invalid; names its line.
    """
    plugins: dict[str, object] = {}
    prefixes: dict[str, producers.PrefixProducer] = {}
    attributes: dict[str, producers.AttributeProducer] = {}
    handlers: dict[str, Settings] = {}
    for name, entry in config.plugins.items():
        if entry.type in (PRECISE, _PRECISE_SCORER):
            prefixes[name] = producers.PrecisePrefix(block_tokens)
            if entry.type == _PRECISE_SCORER:
                plugins[name] = scorers.PrefixScorer(name)
        elif entry.type in _NON_PROFILE_TYPES:
            other = entry.parameters_section.read(_NON_PROFILE_TYPES[entry.type])
            if isinstance(other, producers.ApproximatePrefix):
                prefixes[name] = other
            elif isinstance(other, producers.AttributeProducer):
                attributes[name] = other
            elif entry.type.endswith("-profile-handler"):
                handlers[name] = other
        elif entry.type not in _READ_ELSEWHERE:
            plugins[name] = make_plugin(entry, config.directory)
    for name, plugin in plugins.items():
        _add_producer(config, prefixes, name, getattr(plugin, "producer", None), block_tokens)
    named = {entry.name: _profile(entry, plugins, config) for entry in _profile_entries(config, plugins)}
    handler = _handler(config, handlers, plugins, named)
    types = {name: entry.type for name, entry in config.plugins.items()}
    return Pipeline(handler, plugins, prefixes, attributes, types, random)


def ignored_parameters(config: PickerConfig) -> Iterator[str]:
    """Yield a line with location and reason for each parameter of a plugin that has no effect.

    Raises:
        ConfigError: A parameter is invalid; names its line.
    """
    for entry in config.entries:
        if (kind := _TYPES.get(entry.type)) is not None:
            yield from entry.parameters_section.read(kind).ignored()


def meaning(entry: PluginEntry) -> str:
    """Return in one sentence what a plugin of a configuration does here.

    Raises:
        ConfigError: The type is unknown, or a parameter is invalid; names its line.
    """
    if (kind := _TYPES.get(entry.type)) is not None:
        entry.parameters_section.read(kind)
        text = kind.__doc__ if kind is not Settings else None
        return text.partition("\n")[0] if text else "Always on, with or without an entry."
    if entry.type in _READ_ELSEWHERE:
        is_parser = entry.type in PARSERS
        return "Parser of requests, by their paths." if is_parser else "Part of admission or of responses."
    return "Custom plugin." if is_custom(entry.type) else _fail_unknown(entry)


def _add_producer(
    config: PickerConfig,
    prefixes: dict[str, producers.PrefixProducer],
    name: str,
    producer: object,
    block_tokens: int,
) -> None:
    """Add the prefix producer that a plugin reads, if it may be left out of the configuration."""
    if not isinstance(producer, str) or producer in prefixes:
        return
    # The reference may also be the type of a producer with another name.
    wanted = APPROXIMATE if producer == IMPLIED else producer
    same = [other for other, entry in config.plugins.items() if entry.type == wanted]
    if same:
        prefixes[producer] = prefixes[same[0]]
    elif producer == IMPLIED:
        prefixes[producer] = producers.ImpliedPrefix(block_tokens)
    elif producer == APPROXIMATE:
        prefixes[producer] = producers.ApproximatePrefix()
    elif producer == PRECISE:
        prefixes[producer] = producers.PrecisePrefix(block_tokens)
    else:
        known = sorted({*prefixes, APPROXIMATE, PRECISE})
        config.plugins[name].parameters_section.fail(
            PRODUCER_KEY, f"unknown producer {producer!r}; known: {', '.join(known)}"
        )


def _profile_entries(config: PickerConfig, plugins: _Plugins) -> tuple[ProfileEntry, ...]:
    if config.profiles:
        return config.profiles
    every = (name for name, plugin in plugins.items() if isinstance(plugin, Filter | Scorer | Picker))
    return (ProfileEntry("default", tuple(map(WeightedReference, every))).located(config.section),)


def _profile(entry: ProfileEntry, plugins: _Plugins, config: PickerConfig) -> profiles.Profile:
    filters: list[tuple[str, Filter]] = []
    weighted: list[profiles.WeightedScorer] = []
    pickers: list[Picker] = []
    for reference in entry.plugins:
        name = reference.plugin_ref
        plugin, kind = plugins.get(name), config.plugins[name].type
        is_filter, is_scorer = isinstance(plugin, Filter), isinstance(plugin, Scorer)
        # A class may implement both; the suffix of its type selects the role here.
        if isinstance(plugin, Filter) and not (is_scorer and kind.endswith("-scorer")):
            filters.append((name, plugin))
        if isinstance(plugin, Scorer) and not (is_filter and kind.endswith("-filter")):
            weighted.append(profiles.WeightedScorer(name, plugin, reference.weight))
        if isinstance(plugin, Picker):
            pickers.append(plugin)
        if plugin is not None and not isinstance(plugin, Filter | Scorer | Picker):
            reference.section.fail("pluginRef", f"{kind} is not a filter, scorer or picker")
    if len(pickers) > 1:
        entry.section.fail("plugins", "expected at most one picker per profile")
    picker = pickers[0] if pickers else profiles.MaxScorePicker()
    return profiles.Profile(entry.name, filters, weighted, picker)


def _handler(
    config: PickerConfig, handlers: Mapping[str, Settings], plugins: _Plugins, named: _Profiles
) -> profiles.ProfileHandler:
    if len(handlers) > 1:
        config.section.fail("plugins", f"expected at most one profile handler, got {', '.join(handlers)}")
    match next(iter(handlers.values()), None):
        case profiles.DisaggHandlerSettings() as disagg:
            return _disagg_handler(disagg, plugins, named)
        case profiles.DataParallelHandlerSettings(primary_port=port):
            pass
        case _:
            port = 0
    if len(named) != 1:
        config.section.fail(
            "schedulingProfiles",
            f"{_SINGLE} expects one profile, got {len(named)}; add a disagg-profile-handler",
        )
    return profiles.ProfileHandler(next(iter(named.values())), primary_port=port)


def _disagg_handler(
    settings: profiles.DisaggHandlerSettings, plugins: _Plugins, named: _Profiles
) -> profiles.ProfileHandler:
    names, deciders = settings.profiles, settings.deciders
    if (decode := named.get(names.decode)) is None:
        settings.section.fail("profiles", f"decode profile is missing; profiles: {', '.join(named)}")
    return profiles.ProfileHandler(
        decode,
        _stage(settings, "deciders.prefill", deciders.prefill, named.get(names.prefill), plugins),
        _stage(settings, "deciders.encode", deciders.encode, named.get(names.encode), plugins),
        prefill_first=settings.stage_order == "prefill-first",
        primary_port=settings.primary_port,
    )


def _stage(
    settings: Settings, key: str, decider: str | None, profile: profiles.Profile | None, plugins: _Plugins
) -> profiles.Stage | None:
    """Return a stage, or None without a decider, in which case it is never disaggregated."""
    if decider is None:
        return None
    plugin: Any = plugins.get(decider)
    if not hasattr(plugin, "decide"):
        known = [kind for kind in PLUGIN_TYPES if kind.endswith("-decider")]
        settings.section.fail(key, f"expected a decider ({', '.join(known)}), got {decider!r}")
    if profile is None:
        settings.section.fail("profiles", f"there is a decider but no profile for {key.rpartition('.')[2]}")
    return profiles.Stage(profile, plugin)


def make_plugin(entry: PluginEntry, directory: Path) -> object:
    """Create a filter, scorer, picker or decider.

    Raises:
        ConfigError: The type is unknown or a parameter is invalid; names its line.
    """
    if (plugin_type := PLUGIN_TYPES.get(entry.type)) is not None:
        return entry.parameters_section.read(plugin_type)
    parameters = entry.parameters_section.value()
    try:
        return _custom(entry, directory)(**parameters)
    except ConfigError:
        raise
    except Exception as error:
        entry.section.fail("parameters", f"{entry.type} rejects them: {error}")


def is_custom(kind: str) -> bool:
    """Return whether a type is a custom plugin, which may block."""
    return ".py:" in kind or any(entry_points(group=ENTRY_POINTS, name=kind))


def _custom(entry: PluginEntry, directory: Path) -> Callable[..., object]:
    path, colon, name = entry.type.rpartition(":")
    if colon and path.endswith(".py"):
        return _from_file(entry, directory / path, name)
    installed = entry_points(group=ENTRY_POINTS)
    if entry.type in installed.names:
        point = installed[entry.type]
        try:
            loaded: Callable[..., object] = point.load()
        except Exception as error:
            entry.section.fail("type", f"cannot load entry point {point.value}: {error}")
        return loaded
    return _fail_unknown(entry)


def _fail_unknown(entry: PluginEntry) -> NoReturn:
    installed = entry_points(group=ENTRY_POINTS)
    known = {*PLUGIN_TYPES, *_NON_PROFILE_TYPES, *_READ_ELSEWHERE, *installed.names}
    instead = REPLACEMENTS.get(entry.type)
    advice = f"use {instead}" if instead else f"known: {', '.join(sorted(known))}"
    entry.section.fail("type", f"unknown plugin type {entry.type!r}; {advice}")


def _from_file(entry: PluginEntry, path: Path, name: str) -> Callable[..., object]:
    spec = importlib.util.spec_from_file_location(f"kvroute_plugin_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        entry.section.fail("type", f"file not found: {path}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        found: Any = getattr(module, name)
    except Exception as error:
        entry.section.fail("type", f"cannot load {name} from {path}: {error!r}")
    if not callable(found):
        entry.section.fail("type", f"{name} in {path} is not a class")
    return found  # type: ignore[no-any-return]
