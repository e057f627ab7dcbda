"""The reference's EndpointPickerConfig: YAML text in, one checked PickerConfig out.

Strict: what is not understood is refused by file, line and field rather than ignored. Knows the format; what
a plugin's parameters mean is the plugin's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from router.config_fields import Fields, documents, read_text
from router.errors import ConfigError

_API_VERSIONS = ("llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1")
_KIND = "EndpointPickerConfig"
_DISCOVERY = "file-discovery"
_GATES = {"flowControl": False, "haPopulateNonLeaderDatastore": True}
_TOP = (
    "apiVersion",
    "kind",
    "compat",
    "featureGates",
    "plugins",
    "schedulingProfiles",
    "dataLayer",
    "requestHandler",
    "flowControl",
    "saturationDetector",
    "parser",
)

COMPAT = ("off", "answers")
"""Form of ext_proc's answers: our own, or the reference's."""


@dataclass(frozen=True, slots=True)
class FileDiscovery:
    """Parameters of the file-discovery plugin."""

    path: Path
    watch: bool


@dataclass(frozen=True, slots=True)
class PluginEntry:
    """One entry of `plugins`.

    Attributes:
        name: By which it is referred to.
        fields: The entry itself, for errors.
        parameters: Not checked yet.
    """

    name: str
    type: str
    fields: Fields
    parameters: Fields


@dataclass(frozen=True, slots=True)
class Reference:
    """A pluginRef, with the place where it stands."""

    name: str
    fields: Fields
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class ProfileEntry:
    """One of `schedulingProfiles`."""

    name: str
    references: tuple[Reference, ...]
    fields: Fields


@dataclass(frozen=True, slots=True)
class PickerConfig:
    """A whole EndpointPickerConfig.

    Attributes:
        directory: Where relative paths begin.
        compat: None where the file does not say.
        gates: Feature gates, defaults included.
        plugins: By name, in the file's order.
        parsers: In the file's order; empty: the default ones.
        flow: The section `flowControl`; empty where there is none.
        detector: The saturation detector that is named; None: the default one.
    """

    source: str
    directory: Path
    root: Fields
    compat: str | None
    gates: dict[str, bool]
    plugins: dict[str, PluginEntry]
    profiles: tuple[ProfileEntry, ...]
    parsers: tuple[Reference, ...]
    flow: Fields
    detector: Reference | None
    discovery: FileDiscovery | None
    data_references: tuple[Reference, ...] = field(default=())

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
    root = Fields(source, "", nodes[0], _TOP)
    root.choice("apiVersion", _API_VERSIONS)
    root.choice("kind", (_KIND,))
    plugins = _plugins(root)
    layer = root.fields(
        "dataLayer",
        (
            "injectDefaults",
            "sources",
            "discovery",
            "peerDiscovery",
            "crossReplicaSyncerPluginRef",
            "crossReplicaSyncInterval",
        ),
    )
    handler = root.fields("requestHandler", ("parsers",))
    parsers = [_reference(item.only("pluginRef"), plugins) for item in handler.each("parsers")]
    if not parsers and "parser" in root:
        parsers = [_reference(root.fields("parser", ("pluginRef",)), plugins)]
    flow = root.fields("flowControl")
    detector = flow if "saturationDetector" in flow else root
    return PickerConfig(
        source=source,
        directory=directory,
        root=root,
        compat=root.choice("compat", COMPAT) if "compat" in root else None,
        gates=_gates(root),
        plugins=plugins,
        profiles=_profiles(root, plugins),
        parsers=tuple(parsers),
        flow=flow,
        detector=_reference(detector.fields("saturationDetector", ("pluginRef",)), plugins)
        if "saturationDetector" in detector
        else None,
        discovery=_discovery(layer, plugins, directory),
        data_references=_data_references(layer, plugins),
    )


def _plugins(root: Fields) -> dict[str, PluginEntry]:
    plugins: dict[str, PluginEntry] = {}
    for entry in root.each("plugins", ("name", "type", "parameters")):
        kind = entry.text("type")
        name = entry.text("name", kind)
        if name in plugins:
            entry.fail("name", f"there is a plugin {name!r} already; give this one a name of its own")
        plugins[name] = PluginEntry(name, kind, entry, entry.fields("parameters"))
    return plugins


def _reference(fields: Fields, plugins: dict[str, PluginEntry], key: str = "pluginRef") -> Reference:
    name = fields.text(key)
    if name not in plugins:
        fields.fail(key, f"no plugin is named {name!r}; plugins has {sorted(plugins)}")
    return Reference(name, fields, fields.number("weight", 1.0) if key == "pluginRef" else 1.0)


def _profiles(root: Fields, plugins: dict[str, PluginEntry]) -> tuple[ProfileEntry, ...]:
    profiles: dict[str, ProfileEntry] = {}
    for entry in root.each("schedulingProfiles", ("name", "plugins")):
        name = entry.text("name")
        if name in profiles:
            entry.fail("name", f"there is a profile {name!r} already")
        references = [_reference(item, plugins) for item in entry.each("plugins", ("pluginRef", "weight"))]
        profiles[name] = ProfileEntry(name, tuple(references), entry)
    return tuple(profiles.values())


def _gates(root: Fields) -> dict[str, bool]:
    gates = dict(_GATES)
    for text in root.texts("featureGates"):
        name, _, value = text.partition("=")
        if name not in gates or value not in ("", "true", "false"):
            root.fail("featureGates", f"{text!r} is not understood; there are {', '.join(_GATES)}")
        gates[name] = value != "false"
    return gates


def _discovery(layer: Fields, plugins: dict[str, PluginEntry], directory: Path) -> FileDiscovery | None:
    if "discovery" not in layer:
        return None
    reference = layer.fields("discovery", ("pluginRef",))
    entry = plugins[_reference(reference, plugins).name]
    if entry.type != _DISCOVERY:
        reference.fail("pluginRef", f"{entry.type} is no discovery; there is {_DISCOVERY}")
    parameters = entry.parameters.only("path", "watchFile")
    return FileDiscovery(directory / parameters.text("path"), parameters.flag("watchFile", False))


def _data_references(layer: Fields, plugins: dict[str, PluginEntry]) -> tuple[Reference, ...]:
    """Data sources and their extractors; what only several replicas or clusters need is refused."""
    for name in ("peerDiscovery", "crossReplicaSyncerPluginRef", "crossReplicaSyncInterval"):
        if name in layer:
            layer.fail(name, "not understood; replicas of this router find each other by --peer")
    layer.flag("injectDefaults", True)
    references = []
    for source in layer.each("sources", ("pluginRef", "extractors")):
        references.append(_reference(source, plugins))
        references += [_reference(item, plugins) for item in source.each("extractors", ("pluginRef",))]
    return tuple(references)
