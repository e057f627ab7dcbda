"""Command-line flags declared as dataclass fields: parser, flag values and readers of common value types."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

ADMIN_TOKEN_VARIABLE = "KVROUTE_ADMIN_TOKEN"
_ADMIN_TOKEN_CHARS_MAX = 4096

_Value = TypeVar("_Value")


class CommandParser(argparse.ArgumentParser):
    """Argument parser that reports an error in one line, without argparse's usage text.

    Abbreviated flags are rejected: an abbreviation could match another flag in a later version.
    """

    def __init__(self, prog: str, description: str, **settings: Any) -> None:
        super().__init__(prog, description=description, allow_abbrev=False, **settings)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        if "_ARGCOMPLETE" in os.environ:
            # Installed where a shell asks; it prints the completions and exits.
            import argcomplete

            argcomplete.autocomplete(self)
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def flag(
    group: str, names: str, kind: Any, default: Any, text: str, *, repr: bool = True, **options: Any
) -> Any:
    """Declare a dataclass field that a flag sets.

    Args:
        group: Heading of the flag in `--help`.
        names: Names of the flag, separated by spaces.
        kind: Function that parses the value. `bool` declares a flag without a value, a `Literal` its choices.
        default: Default of the field; `dataclasses.MISSING` makes the flag required.
        text: Help text. A plain default is appended, unless the text states one itself.
        repr: Whether the value appears in the field's repr; False for secrets.
        options: Further arguments of `add_argument`. With `nargs` or action="append" the value is a tuple.
    """
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction if default else "store_true"
    elif get_origin(kind) is Literal:
        options["choices"] = get_args(kind)
    else:
        options["type"] = kind
        if kind is not str:
            options.setdefault("metavar", "N")
    if default is dataclasses.MISSING:
        options["required"] = True
    shown = f"{default:g}" if isinstance(default, float) else default
    is_shown = type(default) in (int, float, str) and default != "" and "default: " not in text
    default_text = f" (default: {shown})" if is_shown else ""
    declared = {"group": group, "names": names.split(), "help": (text, default_text), "options": options}
    if isinstance(default, Mapping):
        # Dataclasses reject mutable defaults.
        return dataclasses.field(default_factory=lambda: default, metadata=declared)
    return dataclasses.field(default=default, repr=repr, metadata=declared)


def file_flag(group: str, names: str, text: str, metavar: str = "FILE", **options: Any) -> Any:
    """Declare a dataclass field that a flag sets to a path; None without the flag."""
    return flag(group, names, Path, None, text, metavar=metavar, **options)


def add_flags(
    parser: argparse.ArgumentParser, *settings: type, computed: Mapping[str, str] | None = None
) -> None:
    """Add the flags of dataclasses to a parser, with groups in the order of their first flag.

    Args:
        computed: Help text, by field, of defaults that the command computes where the value is None.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in (field for kind in settings for field in dataclasses.fields(kind)):
        if declared := field.metadata:
            group = declared["group"]
            if group not in groups:
                groups[group] = parser.add_argument_group(group)
            options = {"default": field.default, **declared["options"]}
            computed_text = computed and computed.get(field.name)
            # argparse passes a string default through `type`.
            is_parsed = isinstance(field.default, str) and options.get("type", str) is not str
            if computed_text or is_parsed or options.get("action") == "append":
                options["default"] = None
            text, shown = declared["help"]
            shown = f" (default: {computed_text})" if computed_text else shown
            groups[group].add_argument(*declared["names"], dest=field.name, help=text + shown, **options)


def flag_values(kind: type, flags: argparse.Namespace) -> dict[str, Any]:
    """Return the values of a dataclass's flags by field, without those that are None."""
    values = {field.name: getattr(flags, field.name) for field in dataclasses.fields(kind) if field.metadata}
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return {name: value for name, value in {**values, **lists}.items() if value is not None}


def pair(read: Callable[[str], _Value]) -> Callable[[str], tuple[str, _Value]]:
    """Return a parser of NAME=VALUE. The value may contain further "=" signs."""

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
    """Parse a TCP port; 0 lets the operating system choose one."""
    return bounded(text, 0, 65_535)


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    return bounded(text, 1, 1 << 40)


def bounded(text: str, least: int, most: int) -> int:
    """Parse a whole number from `least` to `most`."""
    if not text.isdecimal() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, not {text!r}")
    return int(text)


def admin_token(path: Path | None) -> str | None:
    """Return the bearer token of administration ports, from a file or else from KVROUTE_ADMIN_TOKEN.

    Raises:
        ValueError: The file cannot be read, or the token is not one line of printable ASCII.
    """
    source = f"${ADMIN_TOKEN_VARIABLE}" if path is None else f"--admin-token-file {path}"
    try:
        text = os.environ.get(ADMIN_TOKEN_VARIABLE, "") if path is None else path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{source}: cannot be read: {error}") from error
    token = text.strip()
    if not token and path is None:
        return None
    if not (token.isascii() and token.isprintable() and 0 < len(token) <= _ADMIN_TOKEN_CHARS_MAX):
        raise ValueError(
            f"{source}: must contain one line of 1 to {_ADMIN_TOKEN_CHARS_MAX} printable ASCII characters"
        )
    return token
