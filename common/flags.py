"""Settings that flags make: a dataclass's fields with their flags in, argparse's arguments and values out."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

_Value = TypeVar("_Value")


class CommandParser(argparse.ArgumentParser):
    """Parser of a command whose errors are one line: argparse's usage text would bury them.

    Takes no abbreviated flags: one cut short could be another flag's in a later version.
    """

    def __init__(self, prog: str, description: str, **settings: Any) -> None:
        super().__init__(prog, description=description, allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def flag(
    group: str,
    name: str,
    kind: Callable[[str], Any],
    default: Any,
    text: str,
    *,
    repr: bool = True,
    **options: Any,
) -> Any:
    """A field of a dataclass that a flag sets.

    Args:
        text: Help; of numbers in N the default is added.
        repr: Whether the setting may be shown; secrets may not.
        options: Further ones of `argparse`; with action="append" the values are a tuple.
    """
    options.setdefault("metavar", "N")
    if options["metavar"] == "N" and default is not None:
        text += f" (default: {default:g})" if isinstance(default, float) else f" (default: {default})"
    told = {"group": group, "names": name.split(), "options": {"type": kind, "help": text, **options}}
    if isinstance(default, Mapping):
        # A dataclass takes no default that may be changed.
        return dataclasses.field(default_factory=lambda: default, metadata=told)
    return dataclasses.field(default=default, repr=repr, metadata=told)


def file_flag(group: str, name: str, text: str, metavar: str = "FILE", **options: Any) -> Any:
    """A field that a flag sets to a path; None without it."""
    return flag(group, name, Path, None, text, metavar=metavar, **options)


def add_flags(parser: argparse.ArgumentParser, *settings: type) -> None:
    """Add the flags of some dataclasses; groups come in the order in which they are first named."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in (field for kind in settings for field in dataclasses.fields(kind)):
        if told := field.metadata:
            if told["group"] not in groups:
                groups[told["group"]] = parser.add_argument_group(told["group"])
            options = {"default": field.default, **told["options"]}
            # argparse would read a default that is text as it reads the flag's value.
            is_read = isinstance(field.default, str) and options["type"] is not str
            if is_read or options.get("action") == "append":
                options["default"] = None
            groups[told["group"]].add_argument(*told["names"], dest=field.name, **options)


def said(kind: type, flags: argparse.Namespace) -> dict[str, Any]:
    """The values of a dataclass's fields that have flags."""
    values = {field.name: getattr(flags, field.name) for field in dataclasses.fields(kind) if field.metadata}
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return {name: value for name, value in {**values, **lists}.items() if value is not None}


def pair(read: Callable[[str], _Value]) -> Callable[[str], tuple[str, _Value]]:
    """A reader of NAME=VALUE; a value may hold further signs."""

    def named(text: str) -> tuple[str, _Value]:
        name, sign, value = text.partition("=")
        try:
            if not (name and sign and value):
                raise ValueError("must be NAME=VALUE")
            return name, read(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text}: {error}") from None

    return named


def port(text: str) -> int:
    """A TCP port; 0 lets the system choose."""
    return bounded(text, 0, 65_535)


def bounded(text: str, least: int, most: int) -> int:
    """A whole number within bounds."""
    if not text.isdecimal() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, not {text!r}")
    return int(text)
