"""What flags may say: a flag's text in, its checked value out; argparse tells the user what was wrong."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from typing import Any

from common.flags import bounded, flag
from router.config.fields import quantity, seconds

_BOOLEANS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}


def switch(group: str, name: str, default: bool, text: str, **options: Any) -> Any:
    """A field that is true or false; its flag named without a value is true, as with Go's flags."""
    options = {"nargs": "?", "const": True, "metavar": "BOOL", **options}
    return flag(group, name, boolean, default, text, **options)


def count(text: str) -> int:
    """A whole number from 0 up."""
    return bounded(text, 0, 1_000_000_000)


def positive_number(text: str) -> float:
    """A finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return number


def milliseconds(text: str) -> float:
    """Milliseconds above 0, in seconds."""
    return positive_number(text) / 1000


def duration(text: str) -> float:
    """A duration in Go's form (`1m30s`), in seconds."""
    try:
        return seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def positive_duration(text: str) -> float:
    """A duration longer than 0, in seconds."""
    if not (value := duration(text)) > 0.0:
        raise argparse.ArgumentTypeError("must be longer than 0")
    return value


def objective(text: str) -> tuple[str, int]:
    """NAME=PRIORITY."""
    name, equals, priority = text.rpartition("=")
    digits = priority.removeprefix("-")
    if not (name and equals and digits.isdecimal() and len(digits) < 10):
        raise argparse.ArgumentTypeError(f"must be NAME=PRIORITY with a whole number, not {text!r}")
    return name, int(priority)


def names(text: str) -> tuple[str, ...]:
    """Names between commas; none where the text is empty."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def boolean(text: str) -> bool:
    """true or false, or one of the short forms that Go's flags know."""
    if text.lower() not in _BOOLEANS:
        raise argparse.ArgumentTypeError(f"must be true or false, not {text!r}")
    return _BOOLEANS[text.lower()]


def size_bytes(text: str) -> int:
    """A size such as 4194304, 10MiB or 25MB; the B may be missing."""
    try:
        size = quantity(text.strip().removesuffix("B").removesuffix("b"))
    except ValueError:
        size = 0
    if not 0 < size < 1 << 31:
        raise argparse.ArgumentTypeError(f"must be a size below 2GiB, such as 10MiB or 25MB, not {text!r}")
    return size


def log_level(text: str) -> int:
    """A level by zap's name or number, as one of `logging`."""
    named = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}
    if text.lower() in named:
        return named[text.lower()]
    if text.lower() == "panic":
        return logging.CRITICAL
    return logging.DEBUG if bounded(text, 0, 127) else logging.INFO


def model_source(text: str) -> tuple[str, str]:
    """MODEL=SOURCE."""
    model, equals, source = text.partition("=")
    if not (model and equals and source):
        raise argparse.ArgumentTypeError(f"must be MODEL=SOURCE, not {text!r}")
    return model, source


# Flags of the reference picker that change nothing here: taken, and why is told.
_UNNEEDED = {
    "--allow-experimental-plugins": "no plugin here is held back",
    "--ha-enable-leader-election": "all replicas serve, each from its own exact view; no lease is taken",
    "--health-checking": "gRPC health is always served, on the gRPC port too",
    "--refresh-prometheus-metrics-interval": "gauges are computed when they are read",
    "--zap-devel": "logs have one form; see --zap-encoder",
    "--zap-stacktrace-level": "an error's trace is logged with the error",
    "--zap-time-encoding": "times are written as ISO 8601",
}
# Its flags that are refused with what there is instead.
_REFUSED = (
    "--total-queued-requests-metric",
    "--total-running-requests-metric",
    "--kv-cache-usage-percentage-metric",
    "--lora-info-metric",
    "--cache-info-metric",
)


def add_reference_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the reference picker that change nothing, and those that are refused."""
    group = parser.add_argument_group("of the reference picker, not needed")
    for name, why in _UNNEEDED.items():
        group.add_argument(name, nargs="?", const="true", metavar="VALUE", help=f"not needed: {why}")
    for name in _REFUSED:
        group.add_argument(name, type=_refuse, help=argparse.SUPPRESS)


def told_in_vain(flags: argparse.Namespace) -> Iterator[str]:
    """A line for each given flag that changes nothing here."""
    for name, why in _UNNEEDED.items():
        value = getattr(flags, name.removeprefix("--").replace("-", "_"))
        if value is not None:
            yield f"{name}={value}: not needed here: {why}"


def _refuse(_text: str) -> str:
    raise argparse.ArgumentTypeError(
        "is of no use: metrics have the names of the pod's engine, which its label llm-d.ai/engine-type tells"
    )
