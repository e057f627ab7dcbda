"""The reference's EndpointPickerConfig: a YAML file in, the pods file that it names out.

Strict: of the whole format only file discovery is understood so far, and anything else is refused by file,
    line and field rather than ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import yaml

from router.errors import ConfigError

_API_VERSIONS = ("llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1")
_KIND = "EndpointPickerConfig"
_DISCOVERY = "file-discovery"
_FILE_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class FileDiscovery:
    """Parameters of the file-discovery plugin."""

    path: Path
    watch: bool


def discovery_of(path: Path) -> FileDiscovery:
    """Reads the configuration.

    Raises:
        ConfigError: It cannot be read, names what is not understood, or names no file discovery.
    """
    root = _Fields(str(path), "", _compose(path), ("apiVersion", "kind", "plugins", "dataLayer"))
    root.choice("apiVersion", _API_VERSIONS)
    root.choice("kind", (_KIND,))
    plugins = {}
    for at, node in enumerate(root.items("plugins")):
        plugin = _Fields(str(path), f"plugins[{at}]", node, ("name", "type", "parameters"))
        plugin.choice("type", (_DISCOVERY,))
        plugins[plugin.text("name", _DISCOVERY)] = plugin
    layer = root.fields("dataLayer", ("discovery",))
    reference = layer.fields("discovery", ("pluginRef",))
    name = reference.text("pluginRef")
    if name not in plugins:
        reference.fail("pluginRef", f"no plugin is named {name!r}; plugins has {sorted(plugins)}")
    parameters = plugins[name].fields("parameters", ("path", "watchFile"))
    pods_file = Path(parameters.text("path"))
    return FileDiscovery(path.parent / pods_file, parameters.flag("watchFile", False))


class _Fields:
    """A mapping of the file whose keys are checked and whose errors say where."""

    def __init__(self, file: str, where: str, node: yaml.Node | None, known: tuple[str, ...]) -> None:
        self._file = file
        self._where = where
        self._node = node
        self._values: dict[str, yaml.Node] = {}
        if not isinstance(node, yaml.MappingNode):
            self._fail_at(node, where or "the file", "must be a mapping")
        for key, value in node.value:
            name = str(key.value)
            if name not in known:
                self._fail_at(key, self._path(name), f"not understood; here may be {', '.join(known)}")
            if name in self._values:
                self._fail_at(key, self._path(name), "given twice")
            self._values[name] = value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        node = self._values.get(name)
        if node is None and default is not None:
            return default
        if not isinstance(node, yaml.ScalarNode) or not node.value:
            self.fail(name, "must be a string")
        return str(node.value)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        node = self._values.get(name)
        if node is None:
            return default
        if not isinstance(node, yaml.ScalarNode) or node.value not in ("true", "false"):
            self.fail(name, "must be true or false")
        return bool(node.value == "true")

    def choice(self, name: str, allowed: tuple[str, ...]) -> None:
        """A string out of a few."""
        value = self.text(name)
        if value not in allowed:
            self.fail(name, f"{value!r} is not understood; here may be {', '.join(allowed)}")

    def items(self, name: str) -> list[yaml.Node]:
        """A list."""
        node = self._values.get(name)
        if not isinstance(node, yaml.SequenceNode):
            self.fail(name, "must be a list")
        return list(node.value)

    def fields(self, name: str, known: tuple[str, ...]) -> _Fields:
        """A mapping within."""
        if name not in self._values:
            self.fail(name, "is missing")
        return _Fields(self._file, self._path(name), self._values[name], known)

    def fail(self, name: str, problem: str) -> NoReturn:
        """Refuses a field."""
        self._fail_at(self._values.get(name, self._node), self._path(name), problem)

    def _path(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name

    def _fail_at(self, node: yaml.Node | None, where: str, problem: str) -> NoReturn:
        line = node.start_mark.line + 1 if node is not None else 1
        raise ConfigError(f"{self._file}:{line}: {where}: {problem}")


def _compose(path: Path) -> yaml.Node | None:
    try:
        with path.open("rb") as file:
            data = file.read(_FILE_BYTES_MAX + 1)
        if len(data) > _FILE_BYTES_MAX:
            raise ConfigError(f"{path}: larger than {_FILE_BYTES_MAX} bytes")
        return yaml.compose(data, Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
