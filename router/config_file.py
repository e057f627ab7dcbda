"""The reference's EndpointPickerConfig: YAML text in, one checked PickerConfig out.

Strict: what is not understood is refused by file, line and field rather than ignored. Knows the format; what
a plugin's parameters mean is the plugin's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from msgspec import field

from router.config_fields import (
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

COMPAT = ("off", "answers")
"""Form of ext_proc's answers: our own, or the reference's."""

_BY_PEERS = "replicas of this router find each other by --peer"


class _Entry(Settings):
    type: Text
    name: Text = ""
    parameters: Mapping[str, Any] = {}


class _Plugin(Settings):
    plugin_ref: Text


class _Weighted(_Plugin):
    weight: Number = 1.0


class _Source(_Plugin):
    extractors: tuple[_Plugin, ...] = ()


class _Profile(Settings):
    name: Text
    plugins: tuple[_Weighted, ...] = ()


class _DataLayer(Settings):
    instead: ClassVar[Mapping[str, str]] = {
        "peerDiscovery": _BY_PEERS,
        "crossReplicaSyncerPluginRef": _BY_PEERS,
        "crossReplicaSyncInterval": _BY_PEERS,
    }

    inject_defaults: bool = True
    sources: tuple[_Source, ...] = ()
    discovery: _Plugin | None = None


class _Handler(Settings):
    parsers: tuple[_Plugin, ...] = ()


class BandSettings(Settings):
    """One priority band of flow control."""

    priority: Int32 = 0
    max_bytes: Quantity | None = None
    max_requests: Quantity | None = None
    fairness_policy_ref: Text | None = None
    ordering_policy_ref: Text | None = None


class FlowSettings(Settings):
    """The section `flowControl`."""

    max_bytes: Quantity | None = None
    max_requests: Quantity | None = None
    default_request_ttl: Duration = field(default=Duration(60.0), name="defaultRequestTTL")
    no_endpoint_request_ttl: Duration | None = field(default=None, name="noEndpointRequestTTL")
    default_priority_band: BandSettings = field(default_factory=BandSettings)
    default_negative_priority_band: BandSettings = field(default_factory=BandSettings)
    priority_bands: tuple[BandSettings, ...] = ()
    usage_limit_policy_plugin_ref: Text | None = None
    saturation_detector: _Plugin | None = None
    enable_eviction: bool = False


class _File(Settings):
    api_version: Literal["llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1"]
    kind: Literal["EndpointPickerConfig"]
    compat: Literal["off", "answers"] | None = None
    feature_gates: tuple[Text, ...] = ()
    plugins: tuple[_Entry, ...] = ()
    scheduling_profiles: tuple[_Profile, ...] = ()
    data_layer: _DataLayer = field(default_factory=_DataLayer)
    request_handler: _Handler = field(default_factory=_Handler)
    flow_control: FlowSettings = field(default_factory=FlowSettings)
    saturation_detector: _Plugin | None = None
    parser: _Plugin | None = None


class DiscoverySettings(Settings):
    """Parameters of file-discovery."""

    path: Text
    watch_file: bool = False


@dataclass(frozen=True, slots=True)
class PluginEntry:
    """One entry of `plugins`.

    Attributes:
        name: By which it is referred to.
        section: The entry itself, for errors.
        parameters: Not checked yet.
    """

    name: str
    type: str
    section: Section
    parameters: Section


@dataclass(frozen=True, slots=True)
class Reference:
    """A pluginRef, with the place where it stands."""

    name: str
    section: Section
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class ProfileEntry:
    """One of `schedulingProfiles`."""

    name: str
    references: tuple[Reference, ...]
    section: Section


@dataclass(frozen=True, slots=True)
class PickerConfig:
    """A whole EndpointPickerConfig.

    Attributes:
        directory: Where relative paths begin.
        compat: None where the file does not say.
        gates: Feature gates, defaults included.
        plugins: By name, in the file's order.
        parsers: In the file's order; empty: the default ones.
        detector: The saturation detector that is named; None: the default one.
    """

    source: str
    directory: Path
    root: Section
    compat: str | None
    gates: dict[str, bool]
    plugins: dict[str, PluginEntry]
    profiles: tuple[ProfileEntry, ...]
    parsers: tuple[Reference, ...]
    flow: FlowSettings
    detector: Reference | None
    discovery: DiscoverySettings | None

    @property
    def picks(self) -> bool:
        """Whether the file says anything about how to pick; else it is the cost policy's."""
        others = (entry for entry in self.plugins.values() if entry.type != _DISCOVERY)
        return bool(self.profiles) or any(True for _ in others)


def read_config(path: Path) -> PickerConfig:
    """Reads a configuration file.

    Raises:
        ConfigError: It cannot be read, or something in it is not understood.
    """
    return parse_config(read_text(path), str(path), path.parent)


def parse_config(text: str, source: str, directory: Path) -> PickerConfig:
    """Reads a configuration.

    Args:
        source: Its name, for errors.
        directory: Where relative paths begin.

    Raises:
        ConfigError: Something in it is not understood.
    """
    nodes = documents(text, source)
    if len(nodes) != 1:
        raise ConfigError(f"{source}:1: the file: must be a mapping, and the only one")
    root = Section(source, "", nodes[0])
    file = root.read(_File)
    plugins = _plugins(root, file)
    references = _References(root, plugins)
    parsers = [
        references.of(f"requestHandler.parsers[{at}]", parser.plugin_ref)
        for at, parser in enumerate(file.request_handler.parsers)
    ]
    if not parsers and file.parser is not None:
        parsers = [references.of("parser", file.parser.plugin_ref)]
    detector, where = file.flow_control.saturation_detector, "flowControl.saturationDetector"
    if detector is None:
        detector, where = file.saturation_detector, "saturationDetector"
    _check_sources(file.data_layer, references)
    return PickerConfig(
        source=source,
        directory=directory,
        root=root,
        compat=file.compat,
        gates=_gates(root, file.feature_gates),
        plugins=plugins,
        profiles=_profiles(file, references),
        parsers=tuple(parsers),
        flow=file.flow_control,
        detector=references.of(where, detector.plugin_ref) if detector is not None else None,
        discovery=_discovery(file.data_layer, references),
    )


def _plugins(root: Section, file: _File) -> dict[str, PluginEntry]:
    plugins: dict[str, PluginEntry] = {}
    for at, entry in enumerate(file.plugins):
        section = root.at(f"plugins[{at}]")
        name = entry.name or entry.type
        if name in plugins:
            section.fail("name", f"there is a plugin {name!r} already; give this one a name of its own")
        plugins[name] = PluginEntry(name, entry.type, section, section.at("parameters"))
    return plugins


class _References:
    """Makes references to plugins, and refuses those to none."""

    def __init__(self, root: Section, plugins: dict[str, PluginEntry]) -> None:
        self.root = root
        self.plugins = plugins

    def of(self, place: str, name: str, weight: float = 1.0) -> Reference:
        """The reference at a place in the file."""
        section = self.root.at(place)
        if name not in self.plugins:
            section.fail("pluginRef", f"no plugin is named {name!r}; plugins has {sorted(self.plugins)}")
        return Reference(name, section, weight)


def _profiles(file: _File, references: _References) -> tuple[ProfileEntry, ...]:
    profiles: dict[str, ProfileEntry] = {}
    for at, entry in enumerate(file.scheduling_profiles):
        place = f"schedulingProfiles[{at}]"
        section = references.root.at(place)
        if entry.name in profiles:
            section.fail("name", f"there is a profile {entry.name!r} already")
        named = tuple(
            references.of(f"{place}.plugins[{number}]", one.plugin_ref, one.weight)
            for number, one in enumerate(entry.plugins)
        )
        profiles[entry.name] = ProfileEntry(entry.name, named, section)
    return tuple(profiles.values())


def _gates(root: Section, texts: Iterable[str]) -> dict[str, bool]:
    gates = dict(_GATES)
    for text in texts:
        name, _, value = text.partition("=")
        if name not in gates or value not in ("", "true", "false"):
            root.fail("featureGates", f"{text!r} is not understood; there are {', '.join(_GATES)}")
        gates[name] = value != "false"
    return gates


def _discovery(layer: _DataLayer, references: _References) -> DiscoverySettings | None:
    if layer.discovery is None:
        return None
    reference = references.of("dataLayer.discovery", layer.discovery.plugin_ref)
    entry = references.plugins[reference.name]
    if entry.type != _DISCOVERY:
        reference.section.fail("pluginRef", f"{entry.type} is no discovery; there is {_DISCOVERY}")
    return entry.parameters.read(DiscoverySettings)


def _check_sources(layer: _DataLayer, references: _References) -> None:
    """Data sources and their extractors are part of the router: named, they must be there."""
    for at, source in enumerate(layer.sources):
        place = f"dataLayer.sources[{at}]"
        references.of(place, source.plugin_ref)
        for number, extractor in enumerate(source.extractors):
            references.of(f"{place}.extractors[{number}]", extractor.plugin_ref)
