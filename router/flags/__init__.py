"""The router's command line: one module for each group of flags, one parser for all of them."""

from __future__ import annotations

import argparse
from importlib.metadata import version

from indexer.flags import CommandParser, add_index_flags
from router.flags.kube import add_kube_flags
from router.flags.picking import add_picking_flags
from router.flags.pods import add_pods_flags
from router.flags.process import add_process_flags
from router.flags.reference import add_reference_flags
from router.flags.serving import add_serving_flags
from router.flags.tls import add_tls_flags

__all__ = ["router_parser"]


def router_parser() -> argparse.ArgumentParser:
    """All flags, with the names of the reference picker where it has them too."""
    parser = CommandParser(
        prog="kvroute router",
        description="Endpoint picker: Envoy (ext_proc) or any gateway (PickEndpoint) asks which pod to use.",
    )
    parser.add_argument("--version", action="version", version=f"kvroute {version('kvroute')}")
    add_pods_flags(parser.add_argument_group("pods and models"))
    add_kube_flags(parser.add_argument_group("pods in Kubernetes"))
    add_serving_flags(parser.add_argument_group("serving"))
    add_tls_flags(parser.add_argument_group("TLS"))
    add_picking_flags(parser.add_argument_group("picking"))
    add_reference_flags(parser.add_argument_group("as the reference picker"))
    add_index_flags(parser.add_argument_group("index"))
    add_process_flags(parser.add_argument_group("process"))
    return parser
