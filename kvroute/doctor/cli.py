"""The command line of `kvroute doctor`."""

from __future__ import annotations

import argparse
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from common.flags import CommandParser
from kvroute.doctor.cluster import check_cluster
from kvroute.doctor.engine import Card, check_engine
from kvroute.doctor.envoy_admin import check_envoy
from kvroute.doctor.findings import Finding, Report, exit_status, print_findings
from kvroute.doctor.gateway import GatewayCheck
from kvroute.doctor.router import Pods, check_router
from kvroute.engines import ENGINE_METAVAR, declared_engine, engine_argument
from kvroute.http_client import Http
from kvroute.router_pages import RouterPages
from router.config.flags import positive_number

STREAM_S = 20.0  # above Envoy's default route timeout of 15 s


def doctor_parser() -> argparse.ArgumentParser:
    """Return the parser of all flags."""
    parser = CommandParser(
        prog="kvroute doctor",
        description="Check router, engines and gateway; name the flag or command that mends each fault.",
        epilog="exit status: 0 no check failed, 1 a check failed, 2 nothing could be checked",
    )
    what = parser.add_argument_group("what to check").add_argument
    what("--router-url", type=_url, metavar="URL", help="the router's metrics port, and its pods")
    what("--router-grpc", metavar="HOST:PORT", help="its gRPC port")
    text = "a model server, instead of the router's pods; may be repeated (default: events=5557, no replay)"
    what("--engine", type=engine_argument, action="append", metavar=ENGINE_METAVAR, help=text)
    what("--gateway-url", type=_url, metavar="URL", help="the gateway, by a few real requests")
    what("--envoy-admin", type=_url, metavar="URL", help="Envoy's administration port")
    what("--namespace", metavar="NAME", help="namespace in Kubernetes: rights, pools, pods, Events")
    how = parser.add_argument_group("how").add_argument
    how("--model", metavar="NAME", help="model of the requests (default: an engine's first one)")
    text = f"longest stream through the gateway (default: {STREAM_S:g})"
    how("--stream-s", type=positive_number, default=STREAM_S, metavar="SECONDS", help=text)
    how("--ca-file", type=Path, metavar="FILE", help="PEM of the authorities for https")
    how("--token-file", type=Path, metavar="FILE", help="bearer token of the router's metrics port")
    how("--api-key-file", type=Path, metavar="FILE", help="bearer token that the gateway asks for")
    how("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = doctor_parser()
    flags = parser.parse_args(argv)
    if not (flags.router_url or flags.engine or flags.gateway_url or flags.envoy_admin or flags.namespace):
        parser.error("give --router-url, --engine, --gateway-url, --envoy-admin or --namespace")
    try:
        findings = run_checks(flags)
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    if flags.json:
        print(msgspec.json.encode({"findings": findings, "status": exit_status(findings)}).decode())
    else:
        print_findings(findings)
    return exit_status(findings)


def run_checks(flags: argparse.Namespace) -> list[Finding]:
    """Check what the flags of `doctor_parser` name, from the router to the engines to the gateway.

    Raises:
        OSError, ValueError: A file of the flags cannot be read.
    """
    findings: list[Finding] = []
    http, router = Http(flags.ca_file), Pods()
    pages = RouterPages(flags.router_url, flags.token_file, flags.ca_file)
    if flags.router_url:
        report = Report(flags.router_url, findings)
        router = check_router(flags.router_url, flags.router_grpc, pages.http, report)
    engines = [declared_engine(entry) for entry in flags.engine or ()] or router.pods
    found = [
        check_engine(one, http, Report(one.address, findings), flags.model, router.block_tokens)
        for one in engines
    ]
    cards = [card for card in found if card is not None]
    if flags.model and not engines:
        cards.append(Card(flags.model))
    if flags.envoy_admin:
        check_envoy(flags.envoy_admin, http, Report(flags.envoy_admin, findings))
    if flags.gateway_url and cards:
        report, decides = Report(flags.gateway_url, findings), pages if router.pods else None
        pods = sum(card.id == cards[0].id for card in cards)
        client = Http(flags.ca_file, flags.api_key_file)
        GatewayCheck(flags.gateway_url, decides, client, report, cards[0], pods, flags.stream_s).run()
    elif flags.gateway_url:
        Report(flags.gateway_url, findings).add("gateway", "no_engine")
    if flags.namespace:
        check_cluster(flags.namespace, Report(flags.namespace, findings))
    return findings


def _url(text: str) -> str:
    with suppress(ValueError):
        parts = urlsplit(text)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return text.rstrip("/")
    raise ArgumentTypeError(f"must be http://HOST:PORT or https://HOST:PORT, not {text!r}")
