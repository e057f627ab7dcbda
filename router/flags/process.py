"""Flags of the process itself: its end, traces, verbosity."""

from __future__ import annotations

import argparse

from router.flags.values import add_switch, count, duration, log_level


def add_process_flags(group: argparse._ArgumentGroup) -> None:
    """Adds the flags of this group."""
    group.add_argument(
        "--drain-timeout",
        type=duration,
        default="30s",
        metavar="DURATION",
        help="how long SIGTERM waits for the requests inside the doors (default: %(default)s)",
    )
    add_switch(
        group,
        "--tracing",
        False,
        "send OpenTelemetry spans of the picks to OTEL_EXPORTER_OTLP_ENDPOINT (needs kvroute[tracing])",
    )
    group.add_argument("-v", "--v", type=count, default=0, metavar="LEVEL", help="1 and above: every detail")
    group.add_argument(
        "--zap-log-level",
        type=log_level,
        metavar="LEVEL",
        help="error, info, debug, or a number as for -v (default: info)",
    )
    group.add_argument(
        "--zap-encoder",
        choices=("console", "json"),
        default="console",
        help="json: a log line is a JSON object (default: %(default)s)",
    )
    add_switch(
        group,
        "--print-config",
        False,
        "print what these flags and files come to, and end",
    )
