"""Command line flags made from a dataclass: a setting is declared once, with its default and its help."""

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from model_server.errors import ConfigError

_EXIT_USAGE = 2
_METAVARS = {int: "N", float: "GIB"}


@dataclass(frozen=True, slots=True)
class Flag:
    """How a field is set from the command line."""

    text: str  # what it means, for `--help`
    names: tuple[str, ...] = ()  # of the flag; none: that of the field
    default_text: str | None = None  # what `--help` shows as the default; None: the value, if there is one
    read: Callable[[str], Any] | None = None  # reads the value; None: as the field's type tells
    least: int | None = None  # values below it are refused
    metavar: str | None = None  # what `--help` shows for the value; None: as the field's type tells


def flag(default: Any, text: str, names: str = "", *, repr: bool = True, **options: Any) -> Any:
    """Declare a field that a flag sets; `options` are those of `Flag`. Secrets have no repr."""
    return field(default=default, repr=repr, metadata={"flag": Flag(text, tuple(names.split()), **options)})


class OneLineParser(argparse.ArgumentParser):
    """argparse with errors of one line."""

    def error(self, message: str) -> NoReturn:
        """End the program with exit code 2."""
        self.exit(_EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def add_flags(
    group: argparse._ArgumentGroup,
    settings: type,
    defaults: Mapping[str, tuple[Any, str]] | None = None,
) -> None:
    """Add the flags of a dataclass; `defaults` are others by field, with what is shown for them."""
    for declared, kind, flag in _flags(settings):
        default, shown = (defaults or {}).get(declared.name, (declared.default, flag.default_text))
        is_required = default is MISSING
        default = None if is_required else default
        if shown is None and default is not None and default is not False:
            shown = "%(default)s"
        group.add_argument(
            *(flag.names or (f"--{declared.name.replace('_', '-')}",)),
            dest=declared.name,
            default=default,
            required=is_required,
            help=flag.text if shown is None else f"{flag.text} (default: {shown})",
            **_reading(kind, default, flag),
        )


def given(args: argparse.Namespace, settings: type) -> dict[str, Any]:
    """Return the fields of a dataclass that have flags, with their values."""
    return {declared.name: getattr(args, declared.name) for declared, _, _ in _flags(settings)}


def check(settings: object) -> None:
    """Refuse values that their declarations do not allow by a ConfigError."""
    for declared, kind, flag in _flags(type(settings)):
        name, value = declared.name, getattr(settings, declared.name)
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise ConfigError(f"{name} is {value!r}; use one of {', '.join(get_args(kind))}")
        if flag.least is not None and value is not None and value < flag.least:
            if NoneType in get_args(kind):
                raise ConfigError(f"{name} is {value}; give at least {flag.least}, or leave it out")
            raise ConfigError(f"{name} is {value}; it must be at least {flag.least}")


def tcp_port(text: str) -> int:
    """Read a TCP port; 0 lets the system choose."""
    number = int(text)
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{number} is not a port (0 to 65535)")
    return number


def positive(text: str) -> int:
    """Read a number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _flags(settings: type) -> Iterator[tuple["Field[Any]", Any, Flag]]:
    hints = get_type_hints(settings)
    for declared in fields(settings):
        if declared.metadata:
            yield declared, hints[declared.name], declared.metadata["flag"]


def _reading(kind: Any, default: object, flag: Flag) -> dict[str, Any]:
    """Return how argparse reads a value of a type."""
    if NoneType in get_args(kind):
        (kind,) = (one for one in get_args(kind) if one is not NoneType)
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction if default else "store_true"}
    if get_origin(kind) is tuple:
        return {"nargs": "+", "metavar": flag.metavar}
    metavar = flag.metavar or _METAVARS.get(kind)
    return {"type": flag.read or kind, **({} if metavar is None else {"metavar": metavar})}
