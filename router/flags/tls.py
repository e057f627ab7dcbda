"""Flags of TLS: which ports have it, with which certificates, and who may read the metrics."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from router.flags.values import add_switch, names


def add_tls_flags(group: argparse._ArgumentGroup) -> None:
    """Adds the flags of this group."""
    switch = partial(add_switch, group)

    switch(
        "--secure-serving",
        False,
        "TLS on the gRPC port (the reference's default is true); without --cert-path the certificate is made "
        "at start and signed by itself",
    )
    group.add_argument(
        "--cert-path", type=Path, metavar="DIR", help="directory with tls.crt and tls.key for the gRPC port"
    )
    switch("--enable-cert-reload", True, "changed files of --cert-path are taken over (default: true)")
    group.add_argument(
        "--tls-min-version",
        default="VersionTLS12",
        metavar="VERSION",
        help="VersionTLS12 or VersionTLS13: the gRPC port refuses older ones (default: %(default)s)",
    )
    group.add_argument(
        "--tls-cipher-suites",
        type=names,
        default=(),
        metavar="NAME,...",
        help="suites of TLS 1.2 that the gRPC port takes, by their IANA names; those of 1.3 are always on "
        "(default: OpenSSL's own choice)",
    )
    group.add_argument(
        "--metrics-cert-dir", type=Path, metavar="DIR", help="tls.crt and tls.key: TLS on the metrics port"
    )
    group.add_argument(
        "--metrics-client-ca-file",
        type=Path,
        metavar="PATH",
        help="PEM: whoever reads the metrics port must show a certificate of this authority",
    )
    switch(
        "--metrics-endpoint-auth",
        False,
        "the metrics port asks the cluster who reads it, by bearer token (the reference's default is true)",
    )
