"""Flags that say how the router listens and answers."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from router.flags.values import count, names, port, positive, size_bytes
from router.gateway_only import GATEWAY_ONLY_FIELDS


def add_serving_flags(group: argparse._ArgumentGroup) -> None:
    """Adds the flags of this group."""

    def number(name: str, kind: Callable[[str], int], default: int, text: str) -> None:
        group.add_argument(name, type=kind, default=default, metavar="N", help=f"{text} (default: {default})")

    group.add_argument("--host", default="0.0.0.0", help="address to listen on (default: %(default)s)")
    number("--grpc-port", port, 9002, "ext_proc, PickEndpoint, access log, health, reflection")
    number("--grpc-health-port", port, 9003, "gRPC health alone")
    number("--metrics-port", port, 9090, "/metrics, /healthz, /ready, /debug/decisions, /debug/pods")
    group.add_argument(
        "--responses",
        choices=("skip", "full"),
        help="skip: ext_proc ends with the request, for an Envoy whose response modes are SKIP and NONE; "
        "full: responses pass through it too (default: skip; full with a --config-file)",
    )
    number("--fallback-endpoints", count, 0, "further pods in the destination, for gateways that try several")
    number("--max-request-bytes", positive, 8 << 20, "larger bodies are answered with 413")
    group.add_argument(
        "--forbidden-body-fields",
        type=names,
        default=GATEWAY_ONLY_FIELDS,
        metavar="NAME,...",
        help="fields that a client's body must not have: ext_proc takes them out, ext_authz answers 400; "
        "empty: none (default: " + ",".join(GATEWAY_ONLY_FIELDS) + ")",
    )
    group.add_argument(
        "--kv-connector",
        choices=("auto", "true", "false"),
        default="auto",
        help="whether engines have a KV connector (vLLM's --kv-transfer-config): a body that cannot be "
        "checked for forbidden fields is then refused; auto: if pods have the label llm-d.ai/role or a "
        "plugin disaggregates (default: %(default)s)",
    )
    number("--max-streams", positive, 256, "requests inside the doors at once")
    for way in ("recv", "send"):
        group.add_argument(
            f"--grpc-max-{way}-msg-size",
            type=size_bytes,
            metavar="SIZE",
            help="largest gRPC message, such as 10MiB (default: --max-request-bytes and 1 MiB)",
        )
