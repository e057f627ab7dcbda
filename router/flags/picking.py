"""Flags that say how pods are picked and requests accounted."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from router.flags.values import duration, objective, positive, positive_duration, positive_number


def add_picking_flags(group: argparse._ArgumentGroup) -> None:
    """Adds the flags of this group."""

    def number(name: str, kind: Callable[[str], float], default: float, text: str) -> None:
        group.add_argument(
            name, type=kind, default=default, metavar="N", help=f"{text} (default: {default:g})"
        )

    number("--prefill-tokens-per-s", positive_number, 15_000.0, "a pod's speed until it is learnt")
    group.add_argument(
        "--objective",
        type=objective,
        action="append",
        default=[],
        metavar="NAME=PRIORITY",
        help="priority of the requests whose x-llm-d-inference-objective is NAME; below 0 they are answered "
        "with 429 while the pods are saturated; may be repeated",
    )
    group.add_argument(
        "--session-header", default="", metavar="NAME", help="header that carries a session's id"
    )
    group.add_argument("--session-cookie", default="", metavar="NAME", help="cookie that carries it")
    group.add_argument(
        "--session-stay",
        type=duration,
        default="1s",
        metavar="DURATION",
        help="how much later an answer may come so that a session stays at its pod (default: %(default)s)",
    )
    number("--decisions-kept", positive, 1000, "decisions behind /debug/decisions")
    group.add_argument(
        "--request-lifetime",
        type=positive_duration,
        default="10m",
        metavar="DURATION",
        help="a request not heard of again is taken for ended after this (default: %(default)s)",
    )
