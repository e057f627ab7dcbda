"""From a configuration to the pipeline that it describes: a PickerConfig in, a Pipeline out; reads no files.

Adds what the reference adds: one profile of all that can stand in one, the single-profile handler, the
max-score picker, and producers for whatever is consumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from router.attribute_reporter import TYPE as REPORTER
from router.config_fields import Fields
from router.config_file import PickerConfig, PluginEntry, ProfileEntry, Reference
from router.flow_config import FLOW_TYPES
from router.parsers import PARSERS
from router.plugins.api import Filter, Observer, Picker, Scorer, Stateful
from router.plugins.cache_scorers import APPROXIMATE, PRECISE, PrefixScorer
from router.plugins.catalogue import INSTEAD, MAKERS, known_types, make
from router.plugins.deciders import Decider
from router.plugins.handlers import Disaggregated, ProfileHandler, SingleProfile
from router.plugins.pickers import MaxScorePicker
from router.plugins.pipeline import Pipeline, Producers
from router.plugins.producers import (
    AgentIdentity,
    ApproximatePrefix,
    AttributeProducer,
    PrecisePrefix,
    PrefixProducer,
    SessionIdProducer,
)
from router.plugins.profiles import Profile, WeightedScorer

_SINGLE, _DISAGG, _PD = "single-profile-handler", "disagg-profile-handler", "pd-profile-handler"
_HANDLERS = (_SINGLE, _DISAGG, _PD)
_PRECISE_SCORER = "precise-prefix-cache-scorer"


def _agent_identity(parameters: Fields) -> AttributeProducer:
    parameters.only()
    return AgentIdentity()


_ATTRIBUTES: Mapping[str, Callable[[Fields], AttributeProducer]] = {
    "agent-identity": _agent_identity,
    "session-id-producer": SessionIdProducer.read,
}
# Part of the router whether they are named or not; what they may be told is checked and has no effect here.
_BUILT_IN: Mapping[str, tuple[str, ...]] = {
    "file-discovery": ("path", "watchFile"),
    "core-metrics-extractor": (),
    "models-data-source": (),
    "models-extractor": (),
    "endpoint-notification-source": (),
    "destination-endpoint-served-verifier": (),
    "inflight-load-producer": ("addEstimatedOutputTokens", "syncCrossReplicaState"),
    # What these say is settings of the router's, which are read before any plugin is made.
    "metrics-data-source": ("scheme", "path", "insecureSkipVerify", "interval"),
    "token-producer": ("modelName", "vllm", "estimate"),
    "tokenizer": ("modelName", "vllm", "estimate"),
    # Where decoding is apart from prefilling the profile handler sets their headers itself.
    "disagg-headers-handler": (),
    "prefill-header-handler": ("prefillProfile",),
}


@dataclass(slots=True)
class _Parts:
    """What the plugins of a configuration were made into, by name."""

    plugins: dict[str, object] = field(default_factory=dict)
    prefixes: dict[str, PrefixProducer] = field(default_factory=dict)
    attributes: dict[str, AttributeProducer] = field(default_factory=dict)
    handlers: dict[str, PluginEntry] = field(default_factory=dict)


def build_pipeline(config: PickerConfig, *, block_tokens: int, random: np.random.Generator) -> Pipeline:
    """Makes every plugin and wires them.

    Args:
        block_tokens: Of the index.

    Raises:
        ConfigError: Something is not understood, missing, or does not fit; names the place.
    """
    parts = _make_all(config, block_tokens)
    for name, plugin in parts.plugins.items():
        _provide(config, parts, name, getattr(plugin, "producer", None), block_tokens)
    profiles = {entry.name: _profile(entry, parts, config) for entry in _profile_entries(config, parts)}
    handler = _handler(config, parts, profiles)
    observers = [(name, plugin) for name, plugin in parts.plugins.items() if isinstance(plugin, Observer)]
    return Pipeline(
        handler,
        Producers(parts.prefixes, parts.attributes),
        observers,
        random,
        types={name: entry.type for name, entry in config.plugins.items()},
        stateful={
            name: plugin
            for name, plugin in {**parts.prefixes, **parts.plugins}.items()
            if isinstance(plugin, Stateful)
        },
    )


def _make_all(config: PickerConfig, block_tokens: int) -> _Parts:
    parts = _Parts()
    for name, entry in config.plugins.items():
        kind, parameters = entry.type, entry.parameters
        if kind in _BUILT_IN:
            _check_built_in(entry)
        elif kind in _ATTRIBUTES:
            parts.attributes[name] = _ATTRIBUTES[kind](parameters)
        elif kind == APPROXIMATE:
            parts.prefixes[name] = ApproximatePrefix.read(parameters)
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
    entry.fields.fail("type", f"{entry.type!r} is not understood; there are {', '.join(sorted(everything))}")


def _check_built_in(entry: PluginEntry) -> None:
    known = entry.parameters.only(*_BUILT_IN[entry.type])
    if entry.type == "inflight-load-producer" and known.flag("addEstimatedOutputTokens", False):
        known.fail("addEstimatedOutputTokens", "is not understood; prompt tokens count alone")


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
        config.plugins[name].parameters.fail(
            "prefixMatchInfoProducerName", f"there is no producer {producer!r}; there are {', '.join(known)}"
        )


def _profile_entries(config: PickerConfig, parts: _Parts) -> Iterator[ProfileEntry]:
    if config.profiles:
        yield from config.profiles
        return
    fields = config.root
    yield ProfileEntry("default", tuple(_every_reference(config, parts)), fields)


def _every_reference(config: PickerConfig, parts: _Parts) -> Iterator[Reference]:
    for name, plugin in parts.plugins.items():
        if isinstance(plugin, Filter | Scorer | Picker):
            yield Reference(name, config.plugins[name].fields)


def _profile(entry: ProfileEntry, parts: _Parts, config: PickerConfig) -> Profile:
    filters: list[tuple[str, Filter]] = []
    scorers: list[WeightedScorer] = []
    pickers: list[Picker] = []
    for reference in entry.references:
        plugin, kind = parts.plugins.get(reference.name), config.plugins[reference.name].type
        is_filter, is_scorer = isinstance(plugin, Filter), isinstance(plugin, Scorer)
        # One object of ours does both; its type says which of them is meant here.
        if isinstance(plugin, Filter) and not (is_scorer and kind.endswith("-scorer")):
            filters.append((reference.name, plugin))
        if isinstance(plugin, Scorer) and not (is_filter and kind.endswith("-filter")):
            scorers.append(WeightedScorer(reference.name, plugin, reference.weight))
        if isinstance(plugin, Picker):
            pickers.append(plugin)
        if plugin is not None and not isinstance(plugin, Filter | Scorer | Picker):
            reference.fields.fail("pluginRef", f"{kind} has no filter, score or pick")
    if len(pickers) > 1:
        entry.fields.fail("plugins", "has two pickers; a profile takes one")
    return Profile(entry.name, filters, scorers, pickers[0] if pickers else MaxScorePicker())


def _handler(config: PickerConfig, parts: _Parts, profiles: Mapping[str, Profile]) -> ProfileHandler:
    if len(parts.handlers) > 1:
        names = ", ".join(parts.handlers)
        config.root.fail("plugins", f"has several profile handlers ({names}); one is used")
    entry = next(iter(parts.handlers.values()), None)
    if entry is not None and entry.type in (_DISAGG, _PD):
        return _disaggregated(entry, parts, profiles)
    if entry is not None:
        entry.parameters.only()
    if len(profiles) != 1:
        config.root.fail(
            "schedulingProfiles", f"{_SINGLE} takes one profile, here are {len(profiles)}; add a {_DISAGG}"
        )
    return SingleProfile(next(iter(profiles.values())))


def _disaggregated(entry: PluginEntry, parts: _Parts, profiles: Mapping[str, Profile]) -> ProfileHandler:
    if entry.type == _PD:
        return _prefill_apart(entry.parameters, parts, profiles)
    known = entry.parameters.only("stageOrder", "profiles", "deciders")
    order = known.choice("stageOrder", ("decode-first", "prefill-first"), "decode-first")
    names = known.fields("profiles", ("decode", "prefill", "encode"))
    deciders = known.fields("deciders", ("prefill", "encode"))
    decode = profiles.get(names.text("decode", "decode"))
    if decode is None:
        known.fail("profiles", f"there is no decode profile; there are {', '.join(profiles)}")
    prefill_decider = _decider(deciders, "prefill", parts)
    encode_decider = _decider(deciders, "encode", parts)
    for stage, decider in (("prefill", prefill_decider), ("encode", encode_decider)):
        if decider is not None and names.text(stage, stage) not in profiles:
            known.fail("profiles", f"there is a decider but no profile for {stage}")
    return Disaggregated(
        decode,
        profiles.get(names.text("prefill", "prefill")),
        profiles.get(names.text("encode", "encode")),
        prefill_decider=prefill_decider,
        encode_decider=encode_decider,
        prefill_first=order == "prefill-first",
    )


def _prefill_apart(parameters: Fields, parts: _Parts, profiles: Mapping[str, Profile]) -> ProfileHandler:
    """The older form, which names two profiles and one decider."""
    known = parameters.only("decodeProfile", "prefillProfile", "deciderPluginName", "prefixPluginName")
    decode = profiles.get(known.text("decodeProfile", "decode"))
    prefill = profiles.get(known.text("prefillProfile", "prefill"))
    if decode is None or prefill is None:
        known.fail("", f"needs the profiles decode and prefill; there are {', '.join(profiles)}")
    decider = _decider(known, "deciderPluginName", parts)
    return Disaggregated(decode, prefill, prefill_decider=decider)


def _decider(deciders: Fields, stage: str, parts: _Parts) -> Decider | None:
    if stage not in deciders:
        return None
    name = deciders.text(stage)
    plugin = parts.plugins.get(name)
    if not hasattr(plugin, "decide"):
        _fail_decider(deciders, stage, name)
    return plugin


def _fail_decider(deciders: Fields, stage: str, name: str) -> NoReturn:
    known = [kind for kind in MAKERS if kind.endswith("-decider")]
    deciders.fail(stage, f"{name!r} is no decider among the plugins; there are {', '.join(known)}")
