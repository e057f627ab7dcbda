"""YAML files read strictly: text in, msgspec structs out, errors that name file, line and field.

Values are taken from YAML's nodes, which know their lines, and as text: a number is the same quoted or not.
Knows no configuration; what may be there is declared by structs that inherit `Settings`.
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
# Deeper than any configuration, and far from where YAML's own recursion ends.
_DEPTH_MAX = 32
_WHOLE_MAX = 1 << 53
_Kind = TypeVar("_Kind")
_Settings = TypeVar("_Settings", bound="Settings")

Text = Annotated[str, Meta(min_length=1)]
Whole = Annotated[int, Meta(ge=0, le=_WHOLE_MAX)]
Count = Annotated[int, Meta(ge=1, le=_WHOLE_MAX)]
Int32 = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
# As finite as a float can be.
Number = Annotated[float, Meta(ge=0.0, le=sys.float_info.max)]
Positive = Annotated[float, Meta(ge=1e-6, le=sys.float_info.max)]


class Settings(msgspec.Struct, dict=True, forbid_unknown_fields=True, rename="camel"):
    """Base of what a mapping may hold: a field for each key, with its type, bounds and default.

    A check over several fields is a `__post_init__` that raises ValueError("KEY: PROBLEM").
    """

    instead: ClassVar[Mapping[str, str]] = {}  # by a key that is refused, what there is in its place

    @property
    def section(self) -> Section:
        """Where it stands in its file."""
        section: Section = self.__dict__["section"]
        return section

    def located(self, section: Section) -> Self:
        """Take a place, also all within; return itself."""
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
        """All settings within, at any depth."""
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(one, Settings):
                    yield one
                    yield from one.inner()


class Duration(float):
    """Seconds, written as "500ms" or "1m30s"."""


class Quantity(int):
    """A whole number of at least 1 in Kubernetes' notation: "100", "1G" or "1Gi"."""


@dataclass(frozen=True, slots=True)
class Section:
    """A mapping in a file, and where it stands."""

    source: str
    where: str  # its own place in the file; "" for the whole
    node: yaml.Node | None  # None stands for an empty mapping

    def read(self, kind: type[_Settings]) -> _Settings:
        """Read and check all of it.

        Raises:
            ConfigError: Something is not as `kind` has it; names the place.
        """
        try:
            read = msgspec.convert(self._texts(self.node), kind, strict=False, dec_hook=_custom)
            return read.located(self)
        except msgspec.ValidationError as error:
            place, problem, is_unknown = _told(str(error), kind)
        return self.fail(place, problem, at_key=is_unknown)

    def at(self, place: str) -> Section:
        """A mapping within, by its place as "plugins[2].parameters"."""
        node = self.node
        for step in _STEP.findall(place):
            node = _entry(node, step)[1]
        return Section(self.source, _joined(self.where, place), node)

    def value(self) -> dict[str, Any]:
        """Everything as plain Python values, of the types that YAML's own rules give."""
        if self.node is None:
            return {}
        # A made-up tag is refused by the loader.
        loader = yaml.SafeLoader("")
        try:
            value = loader.construct_document(self.node)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            self.fail("", f"cannot be read: {error}")
        return value if isinstance(value, dict) else {}

    def fail(self, place: str, problem: str, *, at_key: bool = False) -> NoReturn:
        """Refuse what stands at a place, "" for the mapping itself; what is missing, at what it misses in."""
        node, key = self.node, None
        for step in _STEP.findall(place):
            key, value = _entry(node, step)
            if value is None:
                break
            node = value
        if at_key and key is not None:
            node = key
        line = node.start_mark.line + 1 if node is not None else 1
        where = _joined(self.where, place) or "the file"
        raise ConfigError(f"{self.source}:{line}: {where}: {problem}")

    def _texts(self, node: yaml.Node | None, place: str = "") -> Any:
        """Mappings, lists and texts; a null is as if it were not there."""
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
    Section(source, "", root).fail("", f"is nested deeper than {_DEPTH_MAX}, too large, or refers to itself")


def _parts(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


# A place is written as msgspec writes it: names with dots, numbers of a list's items in brackets.
_STEP = re.compile(r"[^.\[\]]+")
_ERROR = re.compile(r"(.*?)(?: - at `(?:key in )?\$\.?(.*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_EXPECTED = re.compile(r"Expected `(.*?)`(?:, got `.*`)?(.*)")
_KEY_FIRST = re.compile(r"(\w+): (.*)", re.DOTALL)
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "array": "a list",
    "object": "a mapping",
}


def _told(error: str, kind: Any) -> tuple[str, str, bool]:
    """Where msgspec finds what, in our words, and whether it is a key that may not be there."""
    found = _ERROR.fullmatch(error)
    message, place = (found[1], found[2] or "") if found else (error, "")
    info = inspect.type_info(kind)
    for step in _STEP.findall(place):
        info = _within(info, step)
    if unknown := _UNKNOWN.fullmatch(message):
        return _joined(place, unknown[1]), _unknown_problem(info, unknown[1]), True
    if missing := _MISSING.fullmatch(message):
        return _joined(place, missing[1]), "is missing", False
    if message.startswith("Invalid enum value "):
        allowed = ", ".join(map(str, _one_of(info, inspect.LiteralType).values))
        return (
            place,
            f"{message.removeprefix('Invalid enum value ')} is not understood; here may be {allowed}",
            False,
        )
    if expected := _EXPECTED.fullmatch(message):
        return place, f"must be {_WORDS.get(expected[1].split(' ')[0], expected[1])}{expected[2]}", False
    if named := _KEY_FIRST.fullmatch(message):
        return _joined(place, named[1]), named[2], False
    return place, message, False


def _unknown_problem(info: inspect.Type, name: str) -> str:
    struct = _one_of(info, inspect.StructType)
    kind = struct.cls
    if issubclass(kind, Settings) and (instead := kind.instead.get(name)):
        return f"is not understood; {instead}"
    known = (field.encode_name for field in struct.fields)
    return f"not understood; here may be {', '.join(known) or 'nothing'}"


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
    """Key and value of a mapping's entry, or a list's item; of what is named twice, the later one."""
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
    """Read a duration as the reference's flags write it: "50ms", "1m30s", or plain seconds.

    Raises:
        ValueError: It is none, or negative.
    """
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        return float(text)
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"not a duration: {text!r}; write 500ms, 1s or 1m30s")
    return sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(text))


def quantity(text: str) -> int:
    """Read a size or count in Kubernetes' notation: "100", "1k" or "10Gi".

    Raises:
        ValueError: It is none, or 0.
    """
    found = _QUANTITY.fullmatch(text)
    if found is None or not int(found[1]):
        raise ValueError("must be a whole number above 0, such as 100, 1G or 1Gi")
    return int(found[1]) * _FACTORS[found[2] or ""]
