"""Strict YAML parser: text in, msgspec structs out, errors that name file, line and field.

Values are read from YAML nodes, which carry line numbers, and as text: a number may be quoted or not. The
allowed fields are declared by structs that inherit from `Settings`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, Self, TypeVar

import msgspec
import yaml
from msgspec import Meta, inspect

from router.errors import ConfigError

_TEXT_BYTES_MAX = 1 << 20
_NODES_MAX = 200_000
# Deeper than any configuration, and far below the parser's own recursion limit.
_DEPTH_MAX = 32
_WHOLE_MAX = 1 << 53
_Kind = TypeVar("_Kind")
_Settings = TypeVar("_Settings", bound="Settings")

Text = Annotated[str, Meta(min_length=1)]
Whole = Annotated[int, Meta(ge=0, le=_WHOLE_MAX)]
Count = Annotated[int, Meta(ge=1, le=_WHOLE_MAX)]
Int32 = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
# An upper bound excludes infinity.
Number = Annotated[float, Meta(ge=0.0, le=sys.float_info.max)]
Positive = Annotated[float, Meta(ge=1e-6, le=sys.float_info.max)]
# Name of a producer of llm-d whose values this router always has.
InFlightProducer = Annotated[Any, Meta(description="the router counts its own requests in flight")]


class Settings(msgspec.Struct, dict=True, forbid_unknown_fields=True, rename="camel"):
    """Base of a mapping's schema: one field per key, with type, bounds and default.

    For checks across fields, define `__post_init__` and raise ValueError("KEY: PROBLEM"). A key of llm-d
    without effect here is annotated with the reason: `Annotated[Any, Meta(description="REASON")]`.
    """

    instead: ClassVar[Mapping[str, str]] = {}  # by unsupported key, the advice for its error message

    @property
    def section(self) -> Section:
        """Location of the mapping in its file."""
        section: Section = self.__dict__["section"]
        return section

    def located(self, section: Section) -> Self:
        """Set the location of this struct and of all nested ones; return self."""
        self.__dict__["section"] = section
        for field in msgspec.structs.fields(self):
            inner, place = getattr(self, field.name), section.at(field.encode_name)
            if isinstance(inner, Settings):
                inner.located(place)
            elif isinstance(inner, tuple):
                for at, item in enumerate(inner):
                    if isinstance(item, Settings):
                        item.located(place.at(f"[{at}]"))
        return self

    def inner(self) -> Iterator[Settings]:
        """Yield all nested settings, at any depth."""
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(one, Settings):
                    yield one
                    yield from one.inner()

    def ignored(self) -> Iterator[str]:
        """Yield a line with location and reason for each given key that has no effect, at any depth."""
        for one in (self, *self.inner()):
            for field in msgspec.structs.fields(one):
                why = next((meta.description for meta in getattr(field.type, "__metadata__", ())), None)
                if why is not None and one.section.at(field.encode_name).node is not None:
                    yield f"{one.section.location(field.encode_name, at_key=True)}: ignored: {why}"


class Duration(float):
    """Duration in seconds, written like "500ms" or "1m30s"."""


class Quantity(int):
    """Integer of at least 1 in Kubernetes' notation: "100", "1G" or "1Gi"."""


@dataclass(frozen=True, slots=True)
class Section:
    """Mapping in a YAML file, with its location."""

    source: str  # file name for errors
    where: str  # path of the mapping within the file; "" for the root
    node: yaml.Node | None  # None for an empty mapping

    def read(self, kind: type[_Settings]) -> _Settings:
        """Parse the mapping as a struct of this kind.

        Raises:
            ConfigError: The mapping does not match the schema; names file, line and field.
        """
        try:
            read = msgspec.convert(self._texts(self.node), kind, strict=False, dec_hook=_custom)
            return read.located(self)
        except msgspec.ValidationError as error:
            place, problem, is_unknown = _explained(str(error), kind)
        return self.fail(place, problem, at_key=is_unknown)

    def at(self, place: str) -> Section:
        """Return a nested mapping by its path, such as "plugins[2].parameters"."""
        node = self.node
        for step in _STEP.findall(place):
            node = _entry(node, step)[1]
        return Section(self.source, _joined(self.where, place), node)

    def value(self) -> dict[str, Any]:
        """Return the mapping as plain Python values, typed by YAML's rules.

        Raises:
            ConfigError: A value cannot be constructed, for example because of an unknown tag.
        """
        if self.node is None:
            return {}
        loader = yaml.SafeLoader("")
        try:
            value = loader.construct_document(self.node)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            self.fail("", f"cannot be parsed: {error}")
        return value if isinstance(value, dict) else {}

    def fail(self, place: str, problem: str, *, at_key: bool = False) -> NoReturn:
        """Raise ConfigError with the location of the field at this path ("" for the mapping itself)."""
        raise ConfigError(f"{self.location(place, at_key=at_key)}: {problem}")

    def location(self, place: str, *, at_key: bool = False) -> str:
        """Return file, line and path of a field; the line of a missing one is that of its mapping."""
        node, key = self.node, None
        for step in _STEP.findall(place):
            key, value = _entry(node, step)
            if value is None:
                break
            node = value
        if at_key and key is not None:
            node = key
        line = node.start_mark.line + 1 if node is not None else 1
        return f"{self.source}:{line}: {_joined(self.where, place) or 'the file'}"

    def _texts(self, node: yaml.Node | None, place: str = "") -> Any:
        """Return a node as dicts, lists and strings, without null entries."""
        if isinstance(node, yaml.MappingNode):
            found: dict[str, Any] = {}
            for key, value in node.value:
                name = str(key.value)
                inner = _joined(place, name)
                if name in found:
                    self.fail(inner, "given twice")
                found[name] = None if _is_null(value) else self._texts(value, inner)
            return {name: value for name, value in found.items() if value is not None}
        if isinstance(node, yaml.SequenceNode):
            return [self._texts(item, f"{place}[{at}]") for at, item in enumerate(node.value)]
        return {} if node is None or _is_null(node) else node.value


def read_text(path: Path) -> str:
    """Return the text of a configuration file.

    Raises:
        ConfigError: The file cannot be read, is not UTF-8, or exceeds 1 MiB.
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
    """Return the root nodes of a text's YAML documents.

    Raises:
        ConfigError: The text is not valid YAML, or is nested too deeply.
    """
    try:
        nodes = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from error
    for node in nodes:
        _check_depth(source, node)
    return nodes


def _check_depth(source: str, root: yaml.Node) -> None:
    """Reject documents that are nested too deeply, too large or recursive, before anything walks them."""
    level, seen = [root], 0
    for _ in range(_DEPTH_MAX):
        # Count before expanding: repeated aliases of one node could exhaust memory.
        seen += sum(len(node.value) for node in level if isinstance(node, yaml.CollectionNode))
        if seen > _NODES_MAX:
            break
        level = [part for node in level for part in _parts(node)]
        if not level:
            return
    problem = f"nested more than {_DEPTH_MAX} levels deep, too large, or contains a reference to itself"
    Section(source, "", root).fail("", problem)


def _parts(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


# Field paths have msgspec's form: names joined by dots, list positions in brackets.
_STEP = re.compile(r"[^.\[\]]+")
_ERROR = re.compile(r"(.*?)(?: - at `(?:key in )?\$\.?(.*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_EXPECTED = re.compile(r"Expected `(.*?)`(?:, got `.*`)?(.*)")
_KEY_FIRST = re.compile(r"(\w+): (.*)", re.DOTALL)
_WORDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "array": "a list",
    "object": "a mapping",
}


def _explained(error: str, kind: Any) -> tuple[str, str, bool]:
    """Translate an error of msgspec to (field path, problem, whether the field itself is unknown)."""
    found = _ERROR.fullmatch(error)
    message, place = (found[1], found[2] or "") if found else (error, "")
    info = inspect.type_info(kind)
    for step in _STEP.findall(place):
        info = _within(info, step)
        info = info.type if isinstance(info, inspect.Metadata) else info
    if unknown := _UNKNOWN.fullmatch(message):
        return _joined(place, unknown[1]), _unknown_problem(info, unknown[1]), True
    if missing := _MISSING.fullmatch(message):
        return _joined(place, missing[1]), "is missing", False
    if message.startswith("Invalid enum value "):
        allowed = ", ".join(map(str, _one_of(info, inspect.LiteralType).values))
        value = message.removeprefix("Invalid enum value ")
        return place, f"unknown value {value}; expected one of: {allowed}", False
    if expected := _EXPECTED.fullmatch(message):
        return place, f"must be {_WORDS.get(expected[1].split(' ')[0], expected[1])}{expected[2]}", False
    if named := _KEY_FIRST.fullmatch(message):
        return _joined(place, named[1]), named[2], False
    return place, message, False


def _unknown_problem(info: inspect.Type, name: str) -> str:
    struct = _one_of(info, inspect.StructType)
    kind = struct.cls
    if issubclass(kind, Settings) and (instead := kind.instead.get(name)):
        return f"unsupported field; {instead}"
    known = (field.encode_name for field in struct.fields)
    return f"unknown field; expected one of: {', '.join(known) or '(none)'}"


def _within(info: inspect.Type, step: str) -> inspect.Type:
    for one in info.types if isinstance(info, inspect.UnionType) else (info,):
        if isinstance(one, inspect.StructType):
            return next((field.type for field in one.fields if field.encode_name == step), one)
        if isinstance(one, inspect.ListType | inspect.VarTupleType):
            return one.item_type
    return info


def _one_of(info: inspect.Type, kind: type[_Kind]) -> _Kind:
    kinds = info.types if isinstance(info, inspect.UnionType) else (info,)
    return next(one for one in kinds if isinstance(one, kind))


def _custom(kind: type, value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("must be a single value")
    return kind(seconds(value) if kind is Duration else quantity(value))


def _entry(node: yaml.Node | None, step: str) -> tuple[yaml.Node | None, yaml.Node | None]:
    """Return key and value of a mapping's entry, or a list's item; for duplicate keys, the last one."""
    if isinstance(node, yaml.MappingNode):
        named = [pair for pair in node.value if str(pair[0].value) == step]
        return named[-1] if named else (None, None)
    if isinstance(node, yaml.SequenceNode) and step.isdecimal() and int(step) < len(node.value):
        return None, node.value[int(step)]
    return None, None


def _joined(where: str, place: str) -> str:
    return f"{where}.{place}" if where and place and not place.startswith("[") else where + place


_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(h|ms|m|us|ns|s)")
_WHOLE = re.compile(rf"(?:{_PART.pattern})+")
_FACTORS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    f"{letter}i": 1 << 10 * power for power, letter in enumerate("KMGT", 1)
}
_QUANTITY = re.compile(r"([0-9]{1,15})(k|Ki|Mi?|Gi?|Ti?)?")


def seconds(text: str) -> float:
    """Parse a duration in Go's notation ("50ms", "1m30s") or in plain seconds.

    Raises:
        ValueError: The text is not a duration, or is negative.
    """
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        return float(text)
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"not a duration: {text!r}; write 500ms, 1s or 1m30s")
    return sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(text))


def quantity(text: str) -> int:
    """Parse a size or count in Kubernetes' notation: "100", "1k" or "10Gi".

    Raises:
        ValueError: The text is not such a quantity, or is 0.
    """
    found = _QUANTITY.fullmatch(text)
    if found is None or not int(found[1]):
        raise ValueError("must be an integer above 0, such as 100, 1G or 1Gi")
    return int(found[1]) * _FACTORS[found[2] or ""]
