"""The reference's EndpointPickerConfig: YAML text in, one checked PickerConfig out.

Strict: what is not understood is refused by file, line and field rather than ignored. Knows the format; what
a plugin's parameters mean is the plugin's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from msgspec import field

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

COMPAT = ("off", "answers")  # form of ext_proc's answers: our own, or the reference's
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
    requests_max: Quantity = field(default=Quantity(5000), name="maxRequests")  # what may wait
    bytes_max: Quantity = field(default=Quantity(1_000_000_000), name="maxBytes")
    # A key of flow_queue.ORDERS, or the name of a plugin of that type.
    order: Text = field(default="fcfs-ordering-policy", name="orderingPolicyRef")
    # One of flow_queue.FAIRNESS: the first of all flows by order, or the flows' first ones in turn.
    fairness: Text = field(default="global-strict-fairness-policy", name="fairnessPolicyRef")


class FlowSettings(Settings):
    """The section `flowControl`: how long requests wait, and for what."""

    # Limits of what waits in all bands; None: no limit of its own.
    requests_max: Quantity | None = field(default=None, name="maxRequests")
    bytes_max: Quantity | None = field(default=None, name="maxBytes")
    ttl_s: Duration = field(default=Duration(60.0), name="defaultRequestTTL")  # a request waits no longer
    # Nor longer than this while there is no pod; None: as long as any.
    no_endpoint_ttl_s: Duration | None = field(default=None, name="noEndpointRequestTTL")
    default_priority_band: BandSettings = field(default_factory=BandSettings)
    default_negative_priority_band: BandSettings = field(default_factory=BandSettings)
    priority_bands: tuple[BandSettings, ...] = ()
    usage_limit_policy_plugin_ref: Text | None = None
    saturation_detector: Reference | None = None
    # Whether requests in flight below priority 0 are taken back for those that wait.
    evicts: bool = field(default=False, name="enableEviction")


class DiscoverySettings(Settings):
    """Parameters of file-discovery."""

    path: Text
    watch_file: bool = False


class PickerConfig(Settings):
    """A whole EndpointPickerConfig."""

    api_version: Literal["llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1"]
    kind: Literal["EndpointPickerConfig"]
    compat: Literal["off", "answers"] | None = None
    feature_gates: tuple[Text, ...] = ()
    entries: tuple[PluginEntry, ...] = field(default=(), name="plugins")
    profiles: tuple[ProfileEntry, ...] = field(default=(), name="schedulingProfiles")
    data_layer: _DataLayer = field(default_factory=_DataLayer)
    request_handler: _Handler = field(default_factory=_Handler)
    flow: FlowSettings = field(default_factory=FlowSettings, name="flowControl")
    saturation_detector: Reference | None = None
    parser: Reference | None = None

    def __post_init__(self) -> None:
        self.plugins = {entry.name: entry for entry in self.entries}
        self.gates = dict(_GATES)
        for text in self.feature_gates:
            name, _, value = text.partition("=")
            if name not in self.gates or value not in ("", "true", "false"):
                raise ValueError(f"featureGates: {text!r} is not understood; there are {', '.join(_GATES)}")
            self.gates[name] = value != "false"

    @property
    def directory(self) -> Path:
        """Folder that relative paths begin at."""
        return Path(self.section.source).parent

    @property
    def parsers(self) -> tuple[Reference, ...]:
        """In the file's order; empty: the default ones."""
        return self.request_handler.parsers or ((self.parser,) if self.parser is not None else ())

    @property
    def detector(self) -> Reference | None:
        """The saturation detector that is named; None: the default one."""
        return self.flow.saturation_detector or self.saturation_detector

    @property
    def picks(self) -> bool:
        """Whether the file says anything about how to pick; else it is the cost policy's."""
        return bool(self.profiles) or any(entry.type != _DISCOVERY for entry in self.entries)

    @property
    def discovery(self) -> DiscoverySettings | None:
        """The pods' file.

        Raises:
            ConfigError: Another plugin is named for it, or its parameters are not understood.
        """
        if (reference := self.data_layer.discovery) is None:
            return None
        entry = self.plugins[reference.plugin_ref]
        if entry.type != _DISCOVERY:
            reference.section.fail("pluginRef", f"{entry.type} is no discovery; there is {_DISCOVERY}")
        return entry.told.read(DiscoverySettings)


def read_config(path: Path) -> PickerConfig:
    """Reads a configuration file.

    Raises:
        ConfigError: It cannot be read, or something in it is not understood.
    """
    return parse_config(read_text(path), str(path))


def parse_config(text: str, source: str) -> PickerConfig:
    """Reads a configuration; relative paths in it begin where `source` lies.

    Raises:
        ConfigError: Something in it is not understood.
    """
    nodes = documents(text, source)
    if len(nodes) != 1:
        raise ConfigError(f"{source}:1: the file: must be a mapping, and the only one")
    config = Section(source, "", nodes[0]).read(PickerConfig)
    for kind, entries in (("plugin", config.entries), ("profile", config.profiles)):
        names = set()
        for entry in entries:
            if entry.name in names:
                entry.section.fail(
                    "name", f"there is a {kind} {entry.name!r} already; give this one a name of its own"
                )
            names.add(entry.name)
    for one in config.inner():
        if isinstance(one, Reference) and one.plugin_ref not in config.plugins:
            one.section.fail(
                "pluginRef", f"no plugin is named {one.plugin_ref!r}; plugins has {sorted(config.plugins)}"
            )
    return config
