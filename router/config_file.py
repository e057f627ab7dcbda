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


class PluginEntry(Settings):
    """One entry of `plugins`."""

    type: Text
    name: Text = ""  # by which it is referred to
    parameters: Mapping[str, Any] = {}  # not checked yet; see `told`

    def __post_init__(self) -> None:
        self.name = self.name or self.type

    @property
    def told(self) -> Section:
        """Its parameters, to be read and checked by whoever knows them."""
        return self.section.at("parameters")


class Reference(Settings):
    """A plugin by its name."""

    plugin_ref: Text


class WeightedReference(Reference):
    """The same in a profile."""

    weight: Number = 1.0


class ProfileEntry(Settings):
    """One of `schedulingProfiles`."""

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
    parsers: tuple[Reference, ...] = ()


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
    saturation_detector: Reference | None = None
    enable_eviction: bool = False


class _File(Settings):
    api_version: Literal["llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1"]
    kind: Literal["EndpointPickerConfig"]
    compat: Literal["off", "answers"] | None = None
    feature_gates: tuple[Text, ...] = ()
    plugins: tuple[PluginEntry, ...] = ()
    scheduling_profiles: tuple[ProfileEntry, ...] = ()
    data_layer: _DataLayer = field(default_factory=_DataLayer)
    request_handler: _Handler = field(default_factory=_Handler)
    flow_control: FlowSettings = field(default_factory=FlowSettings)
    saturation_detector: Reference | None = None
    parser: Reference | None = None


class DiscoverySettings(Settings):
    """Parameters of file-discovery."""

    path: Text
    watch_file: bool = False


@dataclass(frozen=True, slots=True)
class PickerConfig:
    """A whole EndpointPickerConfig."""

    source: str
    directory: Path  # where relative paths begin
    root: Section
    compat: str | None  # None where the file does not say
    gates: dict[str, bool]  # feature gates, defaults included
    plugins: dict[str, PluginEntry]  # by name, in the file's order
    profiles: tuple[ProfileEntry, ...]
    parsers: tuple[Reference, ...]  # in the file's order; empty: the default ones
    flow: FlowSettings
    detector: Reference | None  # the saturation detector that is named; None: the default one
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

    Raises:
        ConfigError: Something in it is not understood.
    """
    nodes = documents(text, source)
    if len(nodes) != 1:
        raise ConfigError(f"{source}:1: the file: must be a mapping, and the only one")
    root = Section(source, "", nodes[0])
    file = root.read(_File)
    plugins: dict[str, PluginEntry] = {}
    for entry in file.plugins:
        if entry.name in plugins:
            entry.section.fail(
                "name", f"there is a plugin {entry.name!r} already; give this one a name of its own"
            )
        plugins[entry.name] = entry
    for one in file.inner():
        if isinstance(one, Reference) and one.plugin_ref not in plugins:
            one.section.fail(
                "pluginRef", f"no plugin is named {one.plugin_ref!r}; plugins has {sorted(plugins)}"
            )
    names = [profile.name for profile in file.scheduling_profiles]
    for at, profile in enumerate(file.scheduling_profiles):
        if profile.name in names[:at]:
            profile.section.fail("name", f"there is a profile {profile.name!r} already")
    return PickerConfig(
        source=source,
        directory=directory,
        root=root,
        compat=file.compat,
        gates=_gates(root, file.feature_gates),
        plugins=plugins,
        profiles=file.scheduling_profiles,
        parsers=file.request_handler.parsers or ((file.parser,) if file.parser is not None else ()),
        flow=file.flow_control,
        detector=file.flow_control.saturation_detector or file.saturation_detector,
        discovery=_discovery(file.data_layer.discovery, plugins),
    )


def _gates(root: Section, texts: Iterable[str]) -> dict[str, bool]:
    gates = dict(_GATES)
    for text in texts:
        name, _, value = text.partition("=")
        if name not in gates or value not in ("", "true", "false"):
            root.fail("featureGates", f"{text!r} is not understood; there are {', '.join(_GATES)}")
        gates[name] = value != "false"
    return gates


def _discovery(reference: Reference | None, plugins: Mapping[str, PluginEntry]) -> DiscoverySettings | None:
    if reference is None:
        return None
    entry = plugins[reference.plugin_ref]
    if entry.type != _DISCOVERY:
        reference.section.fail("pluginRef", f"{entry.type} is no discovery; there is {_DISCOVERY}")
    return entry.told.read(DiscoverySettings)
