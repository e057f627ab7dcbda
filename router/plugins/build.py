"""From a configuration to the pipeline that it describes: a PickerConfig in, a Pipeline out; reads no files.

Adds what the reference adds: one profile of all that can stand in one, the single-profile handler, the
max-score picker, and producers for whatever is consumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

from router.attribute_reporter import TYPE as REPORTER
from router.config_fields import Settings, Text
from router.config_file import DiscoverySettings, PickerConfig, PluginEntry, ProfileEntry, WeightedReference
from router.flow_config import FLOW_TYPES
from router.parsers import PARSERS
from router.plugins.api import Filter, Picker, Scorer
from router.plugins.cache_scorers import APPROXIMATE, PRECISE, PRODUCER_KEY, PrefixScorer
from router.plugins.catalogue import INSTEAD, MAKERS, known_types, make
from router.plugins.handlers import ProfileHandler, Stage
from router.plugins.pickers import MaxScorePicker
from router.plugins.pipeline import Pipeline
from router.plugins.producers import (
    AgentIdentity,
    ApproximatePrefix,
    AttributeProducer,
    PrecisePrefix,
    PrefixProducer,
    SessionIdProducer,
)
from router.plugins.profiles import Profile, WeightedScorer
from router.producer_settings import MetricsSettings, TokenSettings

_SINGLE, _DISAGG, _PD = "single-profile-handler", "disagg-profile-handler", "pd-profile-handler"
_HANDLERS = (_SINGLE, _DISAGG, _PD)
_PRECISE_SCORER = "precise-prefix-cache-scorer"


_ATTRIBUTES: Mapping[str, type[AttributeProducer]] = {
    "agent-identity": AgentIdentity,
    "session-id-producer": SessionIdProducer,
}


class _InflightLoad(Settings):
    add_estimated_output_tokens: bool = False
    sync_cross_replica_state: Any = None

    def __post_init__(self) -> None:
        if self.add_estimated_output_tokens:
            raise ValueError("addEstimatedOutputTokens: is not understood; prompt tokens count alone")


class _PrefillHeader(Settings):
    prefill_profile: Any = None


# Part of the router whether they are named or not; what they may be told is checked and has no effect here.
_BUILT_IN: Mapping[str, type[Settings]] = {
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


class _Stages(Settings):
    decode: Text = "decode"
    prefill: Text = "prefill"
    encode: Text = "encode"


class _Deciders(Settings):
    prefill: Text | None = None
    encode: Text | None = None


class _Disaggregation(Settings):
    stage_order: Literal["decode-first", "prefill-first"] = "decode-first"
    profiles: _Stages = msgspec.field(default_factory=_Stages)
    deciders: _Deciders = msgspec.field(default_factory=_Deciders)


class _PrefillApart(Settings):
    """The older form, which names two profiles and one decider."""

    decode_profile: Text = "decode"
    prefill_profile: Text = "prefill"
    decider_plugin_name: Text | None = None
    prefix_plugin_name: Any = None


@dataclass(slots=True)
class _Parts:
    """What the plugins of a configuration were made into, by name."""

    plugins: dict[str, object] = field(default_factory=dict)
    prefixes: dict[str, PrefixProducer] = field(default_factory=dict)
    attributes: dict[str, AttributeProducer] = field(default_factory=dict)
    handlers: dict[str, PluginEntry] = field(default_factory=dict)


def build_pipeline(config: PickerConfig, *, block_tokens: int, random: np.random.Generator) -> Pipeline:
    """Makes every plugin and wires them.

    Raises:
        ConfigError: Something is not understood, missing, or does not fit; names the place.
    """
    parts = _make_all(config, block_tokens)
    for name, plugin in parts.plugins.items():
        _provide(config, parts, name, getattr(plugin, "producer", None), block_tokens)
    profiles = {entry.name: _profile(entry, parts, config) for entry in _profile_entries(config, parts)}
    handler = _handler(config, parts, profiles)
    types = {name: entry.type for name, entry in config.plugins.items()}
    return Pipeline(handler, parts.plugins, parts.prefixes, parts.attributes, types, random)


def _make_all(config: PickerConfig, block_tokens: int) -> _Parts:
    parts = _Parts()
    for name, entry in config.plugins.items():
        kind = entry.type
        if kind in _BUILT_IN:
            entry.told.read(_BUILT_IN[kind])
        elif kind in _ATTRIBUTES:
            parts.attributes[name] = entry.told.read(_ATTRIBUTES[kind])
        elif kind == APPROXIMATE:
            parts.prefixes[name] = entry.told.read(ApproximatePrefix)
        elif kind in (PRECISE, _PRECISE_SCORER):
            parts.prefixes[name] = PrecisePrefix(block_tokens)
            if kind == _PRECISE_SCORER:
                parts.plugins[name] = PrefixScorer(name)
        elif kind in _HANDLERS:
            parts.handlers[name] = entry
        elif kind not in PARSERS and kind not in FLOW_TYPES and kind != REPORTER:
            _refuse_unknown(entry)
            parts.plugins[name] = make(entry, config.directory)
    return parts


def _refuse_unknown(entry: PluginEntry) -> None:
    """Before a type is looked for elsewhere: those whose name is taken by something else than a profile's."""
    if entry.type in known_types() or ":" in entry.type or entry.type in INSTEAD:
        return
    everything = {*known_types(), *_BUILT_IN, *_ATTRIBUTES, *_HANDLERS, *PARSERS, *FLOW_TYPES, REPORTER}
    everything |= {APPROXIMATE, PRECISE, _PRECISE_SCORER}
    entry.section.fail("type", f"{entry.type!r} is not understood; there are {', '.join(sorted(everything))}")


def _provide(config: PickerConfig, parts: _Parts, name: str, producer: object, block_tokens: int) -> None:
    """Adds the producer that a plugin consumes, if it is one of the two that need not be declared."""
    if not isinstance(producer, str) or producer in parts.prefixes:
        return
    # A renamed producer is meant by its type, too, as long as there is one.
    same = [other for other, entry in config.plugins.items() if entry.type == producer]
    if same:
        parts.prefixes[producer] = parts.prefixes[same[0]]
    elif producer == APPROXIMATE:
        parts.prefixes[producer] = ApproximatePrefix()
    elif producer == PRECISE:
        parts.prefixes[producer] = PrecisePrefix(block_tokens)
    else:
        known = sorted({*parts.prefixes, APPROXIMATE, PRECISE})
        config.plugins[name].told.fail(
            PRODUCER_KEY, f"there is no producer {producer!r}; there are {', '.join(known)}"
        )


def _profile_entries(config: PickerConfig, parts: _Parts) -> tuple[ProfileEntry, ...]:
    if config.profiles:
        return config.profiles
    every = (name for name, plugin in parts.plugins.items() if isinstance(plugin, Filter | Scorer | Picker))
    return (ProfileEntry("default", tuple(map(WeightedReference, every))).located(config.section),)


def _profile(entry: ProfileEntry, parts: _Parts, config: PickerConfig) -> Profile:
    filters: list[tuple[str, Filter]] = []
    scorers: list[WeightedScorer] = []
    pickers: list[Picker] = []
    for reference in entry.plugins:
        name = reference.plugin_ref
        plugin, kind = parts.plugins.get(name), config.plugins[name].type
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


def _handler(config: PickerConfig, parts: _Parts, profiles: Mapping[str, Profile]) -> ProfileHandler:
    if len(parts.handlers) > 1:
        names = ", ".join(parts.handlers)
        config.section.fail("plugins", f"has several profile handlers ({names}); one is used")
    entry = next(iter(parts.handlers.values()), None)
    if entry is not None and entry.type == _DISAGG:
        return _disaggregated(entry.told.read(_Disaggregation), parts, profiles)
    if entry is not None and entry.type == _PD:
        return _prefill_apart(entry.told.read(_PrefillApart), parts, profiles)
    if entry is not None:
        entry.told.read(Settings)
    if len(profiles) != 1:
        config.section.fail(
            "schedulingProfiles", f"{_SINGLE} takes one profile, here are {len(profiles)}; add a {_DISAGG}"
        )
    return ProfileHandler(next(iter(profiles.values())))


def _disaggregated(told: _Disaggregation, parts: _Parts, profiles: Mapping[str, Profile]) -> ProfileHandler:
    names, deciders = told.profiles, told.deciders
    if (decode := profiles.get(names.decode)) is None:
        told.section.fail("profiles", f"there is no decode profile; there are {', '.join(profiles)}")
    return ProfileHandler(
        decode,
        _stage(told, "deciders.prefill", deciders.prefill, profiles.get(names.prefill), parts),
        _stage(told, "deciders.encode", deciders.encode, profiles.get(names.encode), parts),
        prefill_first=told.stage_order == "prefill-first",
    )


def _prefill_apart(told: _PrefillApart, parts: _Parts, profiles: Mapping[str, Profile]) -> ProfileHandler:
    decode, prefill = profiles.get(told.decode_profile), profiles.get(told.prefill_profile)
    if decode is None or prefill is None:
        told.section.fail("", f"needs the profiles decode and prefill; there are {', '.join(profiles)}")
    return ProfileHandler(decode, _stage(told, "deciderPluginName", told.decider_plugin_name, prefill, parts))


def _stage(
    told: Settings, key: str, decider: str | None, profile: Profile | None, parts: _Parts
) -> Stage | None:
    """Make a stage; None: without a decider it is never apart."""
    if decider is None:
        return None
    plugin: Any = parts.plugins.get(decider)
    if not hasattr(plugin, "decide"):
        known = [kind for kind in MAKERS if kind.endswith("-decider")]
        told.section.fail(key, f"{decider!r} is no decider among the plugins; there are {', '.join(known)}")
    if profile is None:
        told.section.fail("profiles", f"there is a decider but no profile for {key.rpartition('.')[2]}")
    return Stage(profile, plugin)
