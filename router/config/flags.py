"""Parsers of flag values for argparse: text in, checked value out; errors are ArgumentTypeError."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Iterator
from typing import Any

from common.flags import bounded, flag
from router.config.fields import quantity, seconds

_BOOLEANS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}


def switch(group: str, name: str, default: bool | None, text: str, **options: Any) -> Any:
    """Declare a boolean field and its flag; like Go's flags, the flag without a value means true."""
    options = {"nargs": "?", "const": True, "metavar": "BOOL", **options}
    return flag(group, name, boolean, default, text, **options)


def count(text: str) -> int:
    """Parse an integer from 0 to 1e9."""
    return bounded(text, 0, 1_000_000_000)


def positive_number(text: str) -> float:
    """Parse a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return number


def milliseconds(text: str) -> float:
    """Parse a number of milliseconds above 0 and return it in seconds."""
    return positive_number(text) / 1000


def duration(text: str) -> float:
    """Parse a duration in Go's notation (`1m30s`) and return it in seconds."""
    try:
        return seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def positive_duration(text: str) -> float:
    """Parse a duration above 0 and return it in seconds."""
    if not (value := duration(text)) > 0.0:
        raise argparse.ArgumentTypeError(f"must be longer than 0, not {text!r}")
    return value


def objective(text: str) -> tuple[str, int]:
    """Parse NAME=PRIORITY."""
    name, equals, priority = text.rpartition("=")
    digits = priority.removeprefix("-")
    if not (name and equals and digits.isdecimal() and len(digits) < 10):
        raise argparse.ArgumentTypeError(f"must be NAME=PRIORITY with an integer, not {text!r}")
    return name, int(priority)


def salt_header(text: str) -> str:
    """Parse header:NAME and return the header's name in lower case."""
    source, _, name = text.partition(":")
    if source != "header" or not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,256}", name):
        raise argparse.ArgumentTypeError(f"must be header:NAME, such as header:x-tenant, not {text!r}")
    return name.lower()


def names(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of names; an empty text gives none."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def boolean(text: str) -> bool:
    """Parse true or false, or one of the short forms of Go's flags."""
    if text.lower() not in _BOOLEANS:
        raise argparse.ArgumentTypeError(f"must be true or false, not {text!r}")
    return _BOOLEANS[text.lower()]


def size_bytes(text: str) -> int:
    """Parse a size in bytes such as 4194304, 10MiB or 25MB; the B is optional."""
    try:
        size = quantity(text.strip().removesuffix("B").removesuffix("b"))
    except ValueError:
        size = 0
    if not 0 < size < 1 << 31:
        raise argparse.ArgumentTypeError(f"must be a size below 2GiB, such as 10MiB or 25MB, not {text!r}")
    return size


def log_level(text: str) -> int:
    """Parse a level of zap, by name or number, and return the level of `logging`."""
    named = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}
    if text.lower() in named:
        return named[text.lower()]
    if text.lower() == "panic":
        return logging.CRITICAL
    return logging.DEBUG if bounded(text, 0, 127) else logging.INFO


# Flags of llm-d's endpoint picker that are accepted without effect, with the reason that is logged.
_UNNEEDED = {
    "--allow-experimental-plugins": "all plugins are always available",
    "--ha-enable-leader-election": "all replicas are active, each with its own exact view; no lease is used",
    "--health-checking": "gRPC health is always served, on the gRPC port too",
    "--refresh-prometheus-metrics-interval": "gauges are computed when they are scraped",
    "--zap-devel": "logs have one format; see --zap-encoder",
    "--zap-stacktrace-level": "an error is always logged with its stack trace",
    "--zap-time-encoding": "times are always ISO 8601",
}
# Its flags that are rejected with advice.
_REFUSED = (
    "--total-queued-requests-metric",
    "--total-running-requests-metric",
    "--kv-cache-usage-percentage-metric",
    "--lora-info-metric",
    "--cache-info-metric",
)


def add_reference_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of llm-d's endpoint picker that have no effect here, and those that are rejected."""
    group = parser.add_argument_group("flags of llm-d's endpoint picker without effect")
    for name, why in _UNNEEDED.items():
        group.add_argument(name, nargs="?", const="true", metavar="VALUE", help=f"not needed: {why}")
    for name in _REFUSED:
        group.add_argument(name, type=_refuse, help=argparse.SUPPRESS)


def ignored_flags(flags: argparse.Namespace) -> Iterator[str]:
    """Yield a log line for each given flag that has no effect."""
    for name, why in _UNNEEDED.items():
        value = getattr(flags, name.removeprefix("--").replace("-", "_"))
        if value is not None:
            yield f"{name}={value}: not needed here: {why}"


def _refuse(_text: str) -> str:
    raise argparse.ArgumentTypeError(
        "not supported: metric names follow from the pod's engine; set its label llm-d.ai/engine-type"
    )
