"""TLS of the router's ports: flags in, checked options out. Opens no port and makes no certificate."""

from __future__ import annotations

import argparse
import ssl
from dataclasses import dataclass
from pathlib import Path

from indexer.flags import file_flag, flag, said
from router.errors import ConfigError
from router.flags import names, switch

TLS = "TLS"
"""Title of these flags in the help."""

# Go's names and OpenSSL's of suites of TLS 1.2.
_SUITES = {
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
    "TLS_RSA_WITH_AES_128_GCM_SHA256": "AES128-GCM-SHA256",
    "TLS_RSA_WITH_AES_256_GCM_SHA384": "AES256-GCM-SHA384",
}
# Those of TLS 1.3 are always on, here as in Go.
_SUITES_13 = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
_VERSIONS = {
    "VersionTLS12": ssl.TLSVersion.TLSv1_2,
    "1.2": ssl.TLSVersion.TLSv1_2,
    "VersionTLS13": ssl.TLSVersion.TLSv1_3,
    "1.3": ssl.TLSVersion.TLSv1_3,
}


def _version(name: str) -> ssl.TLSVersion:
    if name not in _VERSIONS:
        raise argparse.ArgumentTypeError(f"{name!r} is not understood; there are {', '.join(_VERSIONS)}")
    return _VERSIONS[name]


def _suites(text: str) -> tuple[str, ...]:
    unknown = [name for name in names(text) if name not in _SUITES and name not in _SUITES_13]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not understood; there are {', '.join(_SUITES)}")
    return tuple(_SUITES[name] for name in names(text) if name in _SUITES)


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """TLS of the gRPC port.

    Attributes:
        cert_dir: Holds tls.crt and tls.key; None: a certificate is made, signed by itself.
        suites: OpenSSL's names of the suites of TLS 1.2 that are taken; empty: OpenSSL's own choice.
    """

    cert_dir: Path | None = file_flag(
        TLS, "--cert-path", "directory with tls.crt and tls.key for the gRPC port", metavar="DIR"
    )
    reloads: bool = switch(
        TLS, "--enable-cert-reload", True, "changed files of --cert-path are taken over (default: true)"
    )
    least_version: ssl.TLSVersion = flag(
        TLS,
        "--tls-min-version",
        _version,
        ssl.TLSVersion.TLSv1_2,
        "VersionTLS12 or VersionTLS13: the gRPC port refuses older ones (default: VersionTLS12)",
        metavar="VERSION",
    )
    suites: tuple[str, ...] = flag(
        TLS,
        "--tls-cipher-suites",
        _suites,
        (),
        "suites of TLS 1.2 that the gRPC port takes, by their IANA names; those of 1.3 are always on "
        "(default: OpenSSL's own choice)",
        metavar="NAME,...",
    )


@dataclass(frozen=True, slots=True)
class MetricsTlsOptions:
    """TLS of the metrics port."""

    cert_dir: Path  # holds tls.crt and tls.key
    client_ca: Path | None = None  # readers must show a certificate of it; None: they need none


@dataclass(frozen=True, slots=True)
class TlsFlags:
    """Which ports have TLS."""

    secure_serving: bool = switch(
        TLS,
        "--secure-serving",
        False,
        "TLS on the gRPC port (the reference's default is true); without --cert-path the certificate is made "
        "at start and signed by itself",
    )
    metrics_cert_dir: Path | None = file_flag(
        TLS, "--metrics-cert-dir", "tls.crt and tls.key: TLS on the metrics port", metavar="DIR"
    )
    metrics_client_ca: Path | None = file_flag(
        TLS,
        "--metrics-client-ca-file",
        "PEM: whoever reads the metrics port must show a certificate of this authority",
        metavar="PATH",
    )


def tls_options(flags: argparse.Namespace) -> tuple[TlsOptions | None, MetricsTlsOptions | None]:
    """Return TLS of the gRPC port and of the metrics port; None: plaintext.

    Raises:
        ConfigError: Files are named for a port that is to have no TLS.
    """
    options = TlsOptions(**said(TlsOptions, flags))
    if options.cert_dir is not None and not flags.secure_serving:
        raise ConfigError("--cert-path: needs --secure-serving")
    if flags.metrics_client_ca is not None and flags.metrics_cert_dir is None:
        raise ConfigError("--metrics-client-ca-file: needs --metrics-cert-dir")
    metrics = flags.metrics_cert_dir and MetricsTlsOptions(flags.metrics_cert_dir, flags.metrics_client_ca)
    return options if flags.secure_serving else None, metrics
