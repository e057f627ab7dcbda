"""Parsers of llm-d's YAML files: EndpointPickerConfig, InferenceObjective and InferenceModelRewrite.

Unknown fields are rejected with file, line and field. Each plugin parses its own parameters. In a cluster,
discovery watches objectives and rewrites.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from msgspec import Meta, field

from router.config.fields import (
    Duration,
    Int32,
    Number,
    Quantity,
    Section,
    Settings,
    Text,
    documents,
    read_text,
)
from router.errors import ConfigError

_DISCOVERY = "file-discovery"
_GATES = {"flowControl": False, "haPopulateNonLeaderDatastore": True}

Compat = Literal["off", "answers"]  # ext_proc responses in the router's own form, or in llm-d's
_BY_PEERS = "configure the replicas of this router with --peer"


class PluginEntry(Settings):
    """Entry of the section `plugins`."""

    type: Text
    name: Text = ""  # name for references; the type if empty
    parameters: Mapping[str, Any] = {}  # unchecked; parse them by `parameters_section`

    def __post_init__(self) -> None:
        self.name = self.name or self.type

    @property
    def parameters_section(self) -> Section:
        """Location of the parameters, from which the plugin parses them."""
        return self.section.at("parameters")


class Reference(Settings):
    """Reference to a plugin by name."""

    plugin_ref: Text


class DefaultReference(Settings):
    """Reference to a plugin by name, or by its type if the plugin needs no entry."""

    plugin_ref: Text


class WeightedReference(Reference):
    """Reference to a plugin in a profile, with its weight."""

    weight: Number = 1.0


class ProfileEntry(Settings):
    """Entry of the section `schedulingProfiles`."""

    name: Text
    plugins: tuple[WeightedReference, ...] = ()


class _Source(Reference):
    extractors: tuple[Reference, ...] = ()


class _DataLayer(Settings):
    instead: ClassVar[Mapping[str, str]] = {
        "peerDiscovery": _BY_PEERS,
        "crossReplicaSyncerPluginRef": _BY_PEERS,
        "crossReplicaSyncInterval": _BY_PEERS,
    }

    inject_defaults: bool = True
    sources: tuple[_Source, ...] = ()
    discovery: Reference | None = None


class _Handler(Settings):
    parsers: tuple[DefaultReference, ...] = ()


class BandSettings(Settings):
    """Limits and policies of one priority band of flow control."""

    priority: Int32 = 0
    requests_max: Quantity = field(default=Quantity(5000), name="maxRequests")  # queued requests
    bytes_max: Quantity = field(default=Quantity(1_000_000_000), name="maxBytes")  # queued bytes
    # Key of flow_queue.ORDERS, or the name of a plugin of that type.
    order: Text = field(default="fcfs-ordering-policy", name="orderingPolicyRef")
    # One of flow_queue.FAIRNESS: order across all flows, or round-robin among flows.
    fairness: Text = field(default="global-strict-fairness-policy", name="fairnessPolicyRef")


class FlowSettings(Settings):
    """Section `flowControl`: limits, timeouts and priority bands of queued requests."""

    # Limits across all bands; None for no limit.
    requests_max: Quantity | None = field(default=None, name="maxRequests")
    bytes_max: Quantity | None = field(default=None, name="maxBytes")
    ttl_s: Duration = field(default=Duration(60.0), name="defaultRequestTTL")  # queueing timeout in seconds
    # Queueing timeout in seconds while the pool has no pods; None for `ttl_s`.
    no_endpoint_ttl_s: Duration | None = field(default=None, name="noEndpointRequestTTL")
    default_priority_band: BandSettings = field(default_factory=BandSettings)
    default_negative_priority_band: BandSettings = field(default_factory=BandSettings)
    priority_bands: tuple[BandSettings, ...] = ()
    usage_limit_policy_plugin_ref: Text | None = None
    saturation_detector: DefaultReference | None = None
    # Whether in-flight requests of negative priority are evicted in favour of queued ones.
    evicts: bool = field(default=False, name="enableEviction")


class DiscoverySettings(Settings):
    """Discovery of pods by a file."""

    path: Text
    watch_file: bool = False


class PickerConfig(Settings):
    """Parsed EndpointPickerConfig."""

    api_version: Literal["llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1"]
    kind: Literal["EndpointPickerConfig"]
    compat: Compat | None = None
    feature_gates: tuple[Text, ...] = ()
    entries: tuple[PluginEntry, ...] = field(default=(), name="plugins")
    profiles: tuple[ProfileEntry, ...] = field(default=(), name="schedulingProfiles")
    data_layer: _DataLayer = field(default_factory=_DataLayer)
    request_handler: _Handler = field(default_factory=_Handler)
    flow: FlowSettings = field(default_factory=FlowSettings, name="flowControl")
    saturation_detector: DefaultReference | None = None
    parser: DefaultReference | None = None

    def __post_init__(self) -> None:
        self.plugins = {entry.name: entry for entry in self.entries}
        self.gates = dict(_GATES)
        for text in self.feature_gates:
            name, _, value = text.partition("=")
            if name not in self.gates or value not in ("", "true", "false"):
                raise ValueError(f"featureGates: unknown gate {text!r}; expected one of: {', '.join(_GATES)}")
            self.gates[name] = value != "false"

    @property
    def directory(self) -> Path:
        """Folder against which relative paths are resolved."""
        return Path(self.section.source).parent

    @property
    def parsers(self) -> tuple[DefaultReference, ...]:
        """Parsers in the file's order; empty for the defaults."""
        return self.request_handler.parsers or ((self.parser,) if self.parser is not None else ())

    @property
    def detector(self) -> DefaultReference | None:
        """Configured saturation detector; None for the default."""
        return self.flow.saturation_detector or self.saturation_detector

    def type_of(self, name: str) -> str:
        """Return the type of the plugin with this name; the name itself, if there is none."""
        return self.plugins[name].type if name in self.plugins else name

    @property
    def picks(self) -> bool:
        """Return whether the file configures how to pick; if not, the cost policy applies."""
        return bool(self.profiles) or any(entry.type != _DISCOVERY for entry in self.entries)

    @property
    def discovery(self) -> DiscoverySettings | None:
        """Settings of file discovery; None if the file configures none.

        Raises:
            ConfigError: `discovery` names a plugin of another type, or its parameters are invalid.
        """
        if (reference := self.data_layer.discovery) is None:
            return None
        entry = self.plugins[reference.plugin_ref]
        if entry.type != _DISCOVERY:
            reference.section.fail("pluginRef", f"{entry.type} cannot discover pods; use {_DISCOVERY}")
        return entry.parameters_section.read(DiscoverySettings)


def parse_config(text: str, source: str) -> PickerConfig:
    """Parse an EndpointPickerConfig; `source` names it in errors and resolves its relative paths.

    Raises:
        ConfigError: The text is invalid.
    """
    nodes = documents(text, source)
    if len(nodes) != 1:
        raise ConfigError(f"{source}:1: the file: must be one YAML document with a mapping")
    config = Section(source, "", nodes[0]).read(PickerConfig)
    for kind, entries in (("plugin", config.entries), ("profile", config.profiles)):
        names = set()
        for entry in entries:
            if entry.name in names:
                entry.section.fail("name", f"duplicate {kind} name {entry.name!r}; names must be unique")
            names.add(entry.name)
    for one in config.inner():
        if isinstance(one, Reference) and one.plugin_ref not in config.plugins:
            one.section.fail(
                "pluginRef", f"no plugin named {one.plugin_ref!r}; plugins are {sorted(config.plugins)}"
            )
    return config


class _Kind(Settings, forbid_unknown_fields=False):
    api_version: Literal["llm-d.ai/v1alpha2", "inference.networking.x-k8s.io/v1alpha2"]
    kind: Literal["InferenceObjective", "InferenceModelRewrite"]


class _Metadata(Settings, forbid_unknown_fields=False):
    name: Text = ""
    creation_timestamp: Text = ""


class _Resource(_Kind, forbid_unknown_fields=True):
    metadata: _Metadata
    status: Any = None


class _ObjectiveSpec(Settings):
    priority: Int32 = 0
    pool_ref: Any = None


class _Objective(_Resource):
    spec: _ObjectiveSpec = field(default_factory=_ObjectiveSpec)

    def __post_init__(self) -> None:
        if not self.metadata.name:
            raise ValueError("metadata.name: is missing")


class _Model(Settings):
    value: Text
    type: Literal["Exact"] = "Exact"


class _Match(Settings):
    model: _Model


class _Target(Settings):
    model_rewrite: Text
    weight: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None


class _Rule(Settings):
    targets: Annotated[list[_Target], Meta(min_length=1)]
    matches: tuple[_Match, ...] = ()


class _RewriteSpec(Settings):
    rules: tuple[_Rule, ...] = ()
    pool_ref: Any = None


class _Rewrite(_Resource):
    spec: _RewriteSpec = field(default_factory=_RewriteSpec)


@dataclass(frozen=True, slots=True)
class RewriteRule:
    """Rule of an InferenceModelRewrite."""

    models: frozenset[str]  # models that it matches; empty for all
    targets: Sequence[tuple[str, int | None]]  # (model, weight); None if no weight is given

    def draw(self, random: np.random.Generator) -> str:
        """Draw a target model by weight; if only some targets have weights, the others are never drawn."""
        weights = np.array([weight or 0 for _, weight in self.targets], float)
        if not weights.any():
            weights[:] = 1.0
        place = int(np.searchsorted(weights.cumsum(), random.random() * weights.sum(), side="right"))
        return self.targets[place][0]


class RewriteRules:
    """Rewrite rules, oldest object first; the first one for the exact model wins, then the first for all."""

    def __init__(self, rules: Sequence[RewriteRule], random: np.random.Generator) -> None:
        self._random = random
        self.replace(rules)

    def replace(self, rules: Sequence[RewriteRule]) -> None:
        """Replace all rules atomically: a request sees either the old or the new ones."""
        exact: dict[str, RewriteRule] = {}
        generic: RewriteRule | None = None
        for rule in rules:
            for model in rule.models:
                exact.setdefault(model, rule)
            if not rule.models and generic is None:
                generic = rule
        self._rules = exact, generic

    def target(self, model: str | None) -> str | None:
        """Return the model that replaces this one, or None if no rule matches."""
        exact, generic = self._rules
        rule = exact.get(model or "", generic)
        return rule.draw(self._random) if rule is not None else None


class Resources(NamedTuple):
    """Priorities and rewrite rules of a resources file or a cluster."""

    priorities: Mapping[str, int] = {}  # by name of the InferenceObjective
    rules: Sequence[RewriteRule] = ()  # rules of the oldest object first


def read_resources(path: Path) -> Resources:
    """Read a resources file.

    Raises:
        ConfigError: The file cannot be read or is invalid.
    """
    priorities: dict[str, int] = {}
    rewrites: list[_Rewrite] = []
    for node in documents(read_text(path), str(path)):
        section = Section(str(path), "", node)
        if section.read(_Kind).kind == "InferenceObjective":
            objective = section.read(_Objective)
            priorities[objective.metadata.name] = objective.spec.priority
        else:
            rewrites.append(section.read(_Rewrite))
    # RFC 3339 timestamps sort as text; without timestamps the stable sort keeps the file's order.
    rewrites.sort(key=lambda rewrite: rewrite.metadata.creation_timestamp)
    return Resources(priorities, [_rule(rule) for rewrite in rewrites for rule in rewrite.spec.rules])


def _rule(rule: _Rule) -> RewriteRule:
    models = frozenset(match.model.value for match in rule.matches)
    return RewriteRule(models, [(target.model_rewrite, target.weight) for target in rule.targets])
