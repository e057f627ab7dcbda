"""A YAML mapping read strictly: nodes in, typed values out, errors that name file, line and field.

Reads nodes, not values: they know their lines, and a number is the same text quoted or not. Knows no
configuration.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from router.duration import seconds
from router.errors import ConfigError
from router.quantity import quantity

_TEXT_BYTES_MAX = 1 << 20
_NODES_MAX = 200_000
# Deeper than any configuration, and far from where YAML's own recursion ends.
_DEPTH_MAX = 32
_WHOLE_MAX = 1 << 53


class Fields:
    """A mapping whose keys are checked.

    Args:
        source: The file's name, for errors.
        where: The mapping's own place in it; "" for the whole.
        node: None stands for an empty mapping.
        known: The keys that may be there; None: not checked yet.
    """

    def __init__(
        self, source: str, where: str, node: yaml.Node | None, known: Sequence[str] | None = None
    ) -> None:
        self._source = source
        self._where = where
        self._node = node
        self._values: dict[str, yaml.Node] = {}
        if node is None or _is_null(node):
            return
        if not isinstance(node, yaml.MappingNode):
            _fail_at(source, node, where or "the file", "must be a mapping")
        for key, value in node.value:
            name = str(key.value)
            if known is not None and name not in known:
                self._fail_unknown(key, name, known)
            if name in self._values:
                _fail_at(source, key, self._path(name), "given twice")
            self._values[name] = value

    @property
    def source(self) -> str:
        """The file's name."""
        return self._source

    def __contains__(self, name: str) -> bool:
        return name in self._values and not _is_null(self._values[name])

    def only(self, *known: str) -> Fields:
        """The same, with keys checked."""
        return Fields(self._source, self._where, self._node, known)

    def text(self, name: str, default: str | None = None) -> str:
        """A string; without a default it must be there."""
        if default is not None and name not in self:
            return default
        node = self._values.get(name)
        if not isinstance(node, yaml.ScalarNode) or not node.value:
            self.fail(name, "must be a string")
        return str(node.value)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        if name not in self:
            return default
        node = self._values[name]
        if not isinstance(node, yaml.ScalarNode) or node.value not in ("true", "false"):
            self.fail(name, "must be true or false")
        return bool(node.value == "true")

    def number(self, name: str, default: float, *, least: float = 0.0, most: float = math.inf) -> float:
        """A finite number."""
        if name not in self:
            return default
        try:
            value = float(self.text(name))
        except ValueError:
            value = math.nan
        if not least <= value <= most or math.isinf(value):
            self.fail(name, f"must be a number from {least:g} to {most:g}")
        return value

    def whole(self, name: str, default: int, *, least: int = 0, most: int = _WHOLE_MAX) -> int:
        """A whole number."""
        if name not in self:
            return default
        text = self.text(name)
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 17 and least <= int(text) <= most):
            self.fail(name, f"must be a whole number from {least} to {most}")
        return int(text)

    def quantity(self, name: str, default: int) -> int:
        """A whole number in Kubernetes' notation: "100", "1G" or "1Gi"; at least 1."""
        if name not in self:
            return default
        try:
            return quantity(self.text(name))
        except ValueError as error:
            self.fail(name, str(error))

    def duration_s(self, name: str, default_s: float) -> float:
        """A duration as "500ms" or "1m30s"."""
        if name not in self:
            return default_s
        try:
            return seconds(self.text(name))
        except ValueError as error:
            self.fail(name, str(error))

    def choice(self, name: str, allowed: Sequence[str], default: str | None = None) -> str:
        """A string out of a few."""
        value = self.text(name, default)
        if value not in allowed:
            self.fail(name, f"{value!r} is not understood; here may be {', '.join(allowed)}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; absent: none."""
        found = []
        for at, node in enumerate(self._items(name)):
            if not isinstance(node, yaml.ScalarNode) or not node.value:
                _fail_at(self._source, node, f"{self._path(name)}[{at}]", "must be a string")
            found.append(str(node.value))
        return tuple(found)

    def pairs(self, name: str) -> dict[str, str]:
        """A mapping of strings; absent: none."""
        inner = self.fields(name)
        return {key: inner.text(key) for key in inner}

    def fields(self, name: str, known: Sequence[str] | None = None, *, required: bool = False) -> Fields:
        """A mapping within; absent: an empty one, unless required."""
        if required and name not in self:
            self.fail(name, "is missing")
        return Fields(self._source, self._path(name), self._values.get(name), known)

    def each(self, name: str, known: Sequence[str] | None = None) -> Iterator[Fields]:
        """A list of mappings; absent: none."""
        for at, node in enumerate(self._items(name)):
            yield Fields(self._source, f"{self._path(name)}[{at}]", node, known)

    def value(self) -> dict[str, Any]:
        """Everything as plain Python values."""
        if self._node is None:
            return {}
        # A made-up tag is refused by the loader; the types are those of YAML's own rules.
        loader = yaml.SafeLoader("")
        try:
            value = loader.construct_document(self._node)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            _fail_at(self._source, self._node, self._where, f"cannot be read: {error}")
        return value if isinstance(value, dict) else {}

    def fail(self, name: str, problem: str) -> NoReturn:
        """Refuses a field; "" refuses the mapping itself."""
        node = self._values.get(name) or self._node
        _fail_at(self._source, node, self._path(name) if name else self._where, problem)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def _items(self, name: str) -> list[yaml.Node]:
        if name not in self:
            return []
        node = self._values[name]
        if not isinstance(node, yaml.SequenceNode):
            self.fail(name, "must be a list")
        return list(node.value)

    def _path(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name

    def _fail_unknown(self, key: yaml.Node, name: str, known: Sequence[str]) -> NoReturn:
        here = ", ".join(known) or "nothing"
        _fail_at(self._source, key, self._path(name), f"not understood; here may be {here}")


def read_text(path: Path) -> str:
    """A configuration file's text.

    Raises:
        ConfigError: It cannot be read, or is too large.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_TEXT_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > _TEXT_BYTES_MAX:
        raise ConfigError(f"{path}: larger than {_TEXT_BYTES_MAX} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid UTF-8: {error}") from error


def documents(text: str, source: str) -> list[yaml.Node]:
    """The YAML documents of a text.

    Raises:
        ConfigError: It is not valid YAML, or nested too deep.
    """
    try:
        nodes = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from error
    for node in nodes:
        _check_depth(source, node)
    return nodes


def _check_depth(source: str, root: yaml.Node) -> None:
    """Refuses what refers to itself, or is nested too deep, before anybody walks it."""
    level, seen = [root], 0
    for _ in range(_DEPTH_MAX):
        # Counted first: names for the same node, over and over, would make more than can be held.
        seen += sum(len(node.value) for node in level if isinstance(node, yaml.CollectionNode))
        if seen > _NODES_MAX:
            break
        level = [part for node in level for part in _parts(node)]
        if not level:
            return
    _fail_at(source, root, "the file", f"is nested deeper than {_DEPTH_MAX}, too large, or refers to itself")


def _parts(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _fail_at(source: str, node: yaml.Node | None, where: str, problem: str) -> NoReturn:
    line = node.start_mark.line + 1 if node is not None else 1
    raise ConfigError(f"{source}:{line}: {where}: {problem}")
