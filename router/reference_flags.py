"""Flags of the reference picker that need not be said here.

Each of its flags is known: it does what it does there, or is taken and its needlessness told, or is refused
with what there is instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

_UNNEEDED = {
    "--allow-experimental-plugins": "no plugin here is held back",
    "--ha-enable-leader-election": "all replicas serve, each from its own exact view; no lease is taken",
    "--health-checking": "gRPC health is always served, on the gRPC port too",
    "--refresh-prometheus-metrics-interval": "gauges are computed when they are read",
    "--zap-devel": "logs have one form; see --zap-encoder",
    "--zap-stacktrace-level": "an error's trace is logged with the error",
    "--zap-time-encoding": "times are written as ISO 8601",
}
_REFUSED = (
    "--total-queued-requests-metric",
    "--total-running-requests-metric",
    "--kv-cache-usage-percentage-metric",
    "--lora-info-metric",
    "--cache-info-metric",
)


def add_reference_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that change nothing, and those that are refused."""
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
