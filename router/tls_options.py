"""TLS flags and what they mean: flags in, checked options out. Opens no port and makes no certificate."""

from __future__ import annotations

import argparse
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from indexer.flags import flag
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
        "VersionTLS12 or VersionTLS13: the gRPC port refuses older ones (default: %(default)s)",
        metavar="VERSION",
    )
    tls_cipher_suites: tuple[str, ...] = flag(
        TLS,
        "--tls-cipher-suites",
        names,
        (),
        "suites of TLS 1.2 that the gRPC port takes, by their IANA names; those of 1.3 are always on "
        "(default: OpenSSL's own choice)",
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
        least_version: Clients that speak only older ones are refused.
        suites: OpenSSL's names of the suites of TLS 1.2 that are taken; empty: OpenSSL's own choice.
    """

    cert_dir: Path | None = None
    reloads: bool = True
    least_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2
    suites: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MetricsTlsOptions:
    """TLS of the metrics port.

    Attributes:
        cert_dir: Holds tls.crt and tls.key.
        client_ca: Readers must show a certificate of it; None: they need none.
    """

    cert_dir: Path
    client_ca: Path | None = None


def tls_options(flags: argparse.Namespace) -> TlsOptions | None:
    """TLS of the gRPC port; None: plaintext.

    Raises:
        ConfigError: A version or suite that is not known, or files without TLS.
    """
    least, suites = _version(flags.tls_min_version), _suites(flags.tls_cipher_suites)
    if not flags.secure_serving:
        if flags.cert_path is not None:
            raise ConfigError("--cert-path: needs --secure-serving")
        return None
    return TlsOptions(flags.cert_path, flags.enable_cert_reload, least, suites)


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


def _version(name: str) -> ssl.TLSVersion:
    if name not in _VERSIONS:
        raise ConfigError(f"--tls-min-version: {name!r} is not understood; there are {', '.join(_VERSIONS)}")
    return _VERSIONS[name]


def _suites(names: Sequence[str]) -> tuple[str, ...]:
    unknown = [name for name in names if name not in _SUITES and name not in _SUITES_13]
    if unknown:
        raise ConfigError(
            f"--tls-cipher-suites: {unknown[0]!r} is not understood; there are {', '.join(_SUITES)}"
        )
    return tuple(_SUITES[name] for name in names if name in _SUITES)
