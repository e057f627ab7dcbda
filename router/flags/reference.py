"""Flags of the reference picker that say how to answer, or that need not be said here.

Each of its flags is known: it does what it does there, or is taken and its needlessness told, or is refused
with what there is instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

from router.config_file import COMPAT
from router.flags.values import add_switch, positive_duration

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


def add_reference_flags(group: argparse._ArgumentGroup) -> None:
    """Adds the flags of this group."""
    switch = partial(add_switch, group)

    group.add_argument(
        "--compat",
        choices=COMPAT,
        help="off: our own answers; answers: ext_proc answers in the reference's form (default: answers "
        "with a --config-file, else off)",
    )
    switch("--emit-endpoint-scores", False, "ext_proc's metadata tells the scores of all candidates")
    switch("--disable-endpoint-subset-filter", False, "the gateway's subset hint is not looked at")
    switch("--enable-pprof", True, "/debug/pprof/ on the metrics port, free until asked (default: true)")
    switch("--enable-grpc-stream-metrics", False, "metrics of ext_proc streams: open, duration, end by code")
    group.add_argument(
        "--metrics-staleness-threshold",
        type=positive_duration,
        metavar="DURATION",
        help="an older account of a pod's load does not count, and the pod is taken for saturated (default: "
        "three times --refresh-metrics-interval, at least 5s without flow control)",
    )
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
