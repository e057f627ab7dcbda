"""TLS flags and what they mean: flags in, checked options out. Opens no port and makes no certificate."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from router.errors import ConfigError
from router.flags import flag, names, switch

TLS = "TLS"
"""Title of these flags in the help."""

# Go's names and OpenSSL's of the suites of TLS 1.2 that BoringSSL, which is gRPC's, has.
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
_SUITES_VARIABLE = "GRPC_SSL_CIPHER_SUITES"
_LEAST_VERSIONS = ("VersionTLS12", "1.2")


@dataclass(frozen=True, slots=True)
class TlsFlags:
    """Which ports have TLS, and with which certificates."""

    secure_serving: bool = switch(
        TLS,
        "--secure-serving",
        False,
        "TLS on the gRPC port (the reference's default is true); without --cert-path the certificate is made "
        "at start and signed by itself",
    )
    cert_path: Path | None = flag(
        TLS, "--cert-path", Path, None, "directory with tls.crt and tls.key for the gRPC port", metavar="DIR"
    )
    enable_cert_reload: bool = switch(
        TLS, "--enable-cert-reload", True, "changed files of --cert-path are taken over (default: true)"
    )
    tls_min_version: str = flag(
        TLS,
        "--tls-min-version",
        str,
        "VersionTLS12",
        "VersionTLS12; gRPC's Python server knows no other bound and takes 1.2 and 1.3",
        metavar="VERSION",
    )
    tls_cipher_suites: tuple[str, ...] = flag(
        TLS,
        "--tls-cipher-suites",
        names,
        (),
        "suites of TLS 1.2 by their IANA names; gRPC reads them from the environment only, so this flag "
        "checks that GRPC_SSL_CIPHER_SUITES says the same",
        metavar="NAME,...",
    )
    metrics_cert_dir: Path | None = flag(
        TLS, "--metrics-cert-dir", Path, None, "tls.crt and tls.key: TLS on the metrics port", metavar="DIR"
    )
    metrics_client_ca_file: Path | None = flag(
        TLS,
        "--metrics-client-ca-file",
        Path,
        None,
        "PEM: whoever reads the metrics port must show a certificate of this authority",
        metavar="PATH",
    )


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """TLS of the gRPC port.

    Attributes:
        cert_dir: Holds tls.crt and tls.key; None: a certificate is made, signed by itself.
        reloads: Whether changed files are taken over.
    """

    cert_dir: Path | None = None
    reloads: bool = True


@dataclass(frozen=True, slots=True)
class MetricsTlsOptions:
    """TLS of the metrics port.

    Attributes:
        cert_dir: Holds tls.crt and tls.key.
        client_ca: Readers must show a certificate of it; None: they need none.
    """

    cert_dir: Path
    client_ca: Path | None = None


def tls_options(flags: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> TlsOptions | None:
    """TLS of the gRPC port; None: plaintext.

    Raises:
        ConfigError: A bound that gRPC's Python server does not know, or files without TLS.
    """
    _check_version(flags.tls_min_version)
    _check_suites(flags.tls_cipher_suites, environment)
    if not flags.secure_serving:
        if flags.cert_path is not None:
            raise ConfigError("--cert-path: needs --secure-serving")
        return None
    return TlsOptions(flags.cert_path, flags.enable_cert_reload)


def metrics_tls_options(flags: argparse.Namespace) -> MetricsTlsOptions | None:
    """TLS of the metrics port; None: plaintext.

    Raises:
        ConfigError: Clients shall show certificates, and there is none of the server's.
    """
    if flags.metrics_cert_dir is None:
        if flags.metrics_client_ca_file is not None:
            raise ConfigError("--metrics-client-ca-file: needs --metrics-cert-dir")
        return None
    return MetricsTlsOptions(flags.metrics_cert_dir, flags.metrics_client_ca_file)


def _check_version(least: str) -> None:
    if least not in _LEAST_VERSIONS:
        raise ConfigError(
            f"--tls-min-version {least}: gRPC's Python server takes TLS 1.2 and 1.3 and cannot be told "
            f"another bound; give {_LEAST_VERSIONS[0]}, or end TLS in front of the router"
        )


def _check_suites(names: Sequence[str], environment: Mapping[str, str]) -> None:
    unknown = [name for name in names if name not in _SUITES and name not in _SUITES_13]
    if unknown:
        raise ConfigError(
            f"--tls-cipher-suites: {unknown[0]!r} is not understood; there are {', '.join(_SUITES)}"
        )
    wanted = [_SUITES[name] for name in names if name in _SUITES]
    given = [name for name in environment.get(_SUITES_VARIABLE, "").split(":") if name]
    if wanted and sorted(wanted) != sorted(given):
        raise ConfigError(
            "--tls-cipher-suites: gRPC reads them from the environment, before any flag; start with "
            f"{_SUITES_VARIABLE}={':'.join(wanted)}"
        )
