"""TLS of the router's ports: flags, validated options and SSL contexts."""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from common.flags import file_flag, flag, flag_values
from common.tls import FileReloader
from router.config.flags import names, switch
from router.errors import ConfigError

TLS = "TLS"  # title of the flags' group in the help

# OpenSSL's names of TLS 1.2 cipher suites by their IANA names, which Go uses.
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
# TLS 1.3 suites are always enabled, as in Go.
_SUITES_13 = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
_VERSIONS = {
    "VersionTLS12": ssl.TLSVersion.TLSv1_2,
    "1.2": ssl.TLSVersion.TLSv1_2,
    "VersionTLS13": ssl.TLSVersion.TLSv1_3,
    "1.3": ssl.TLSVersion.TLSv1_3,
}

_CERT, _KEY = "tls.crt", "tls.key"
# Validity of a generated certificate, which must outlast the process.
_VALID = datetime.timedelta(days=3650)
# Tolerance for clients whose clocks are behind.
_VALID_BEFORE = datetime.timedelta(hours=1)
_NAME = "kvroute"


def _version(name: str) -> ssl.TLSVersion:
    if name not in _VERSIONS:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(_VERSIONS)}, got {name!r}")
    return _VERSIONS[name]


def _suites(text: str) -> tuple[str, ...]:
    unknown = [name for name in names(text) if name not in _SUITES and name not in _SUITES_13]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(_SUITES)}, got {unknown[0]!r}")
    return tuple(_SUITES[name] for name in names(text) if name in _SUITES)


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """TLS of the gRPC port; without `cert_dir` it uses a generated self-signed certificate."""

    cert_dir: Path | None = file_flag(
        TLS, "--cert-path", "directory with tls.crt and tls.key for the gRPC port", metavar="DIR"
    )
    reloads: bool = switch(
        TLS, "--enable-cert-reload", True, "reload changed files of --cert-path (default: true)"
    )
    least_version: ssl.TLSVersion = flag(
        TLS,
        "--tls-min-version",
        _version,
        ssl.TLSVersion.TLSv1_2,
        "oldest version that the gRPC port accepts: VersionTLS12 or VersionTLS13 (default: VersionTLS12)",
        metavar="VERSION",
    )
    suites: tuple[str, ...] = flag(
        TLS,
        "--tls-cipher-suites",
        _suites,
        (),
        "TLS 1.2 cipher suites that the gRPC port accepts, by IANA name; those of TLS 1.3 are always "
        "enabled (default: OpenSSL's choice)",
        metavar="NAME,...",
    )
    plaintext: bool = True  # whether plaintext is accepted too


@dataclass(frozen=True, slots=True)
class MetricsTlsOptions:
    """TLS of the metrics port."""

    cert_dir: Path  # holds tls.crt and tls.key
    client_ca: Path | None = None  # CA of required client certificates; None: none are required


@dataclass(frozen=True, slots=True)
class TlsFlags:
    """Flags that enable TLS on the ports."""

    secure_serving: bool | None = switch(
        TLS,
        "--secure-serving",
        None,
        "true: the gRPC port accepts TLS only; false: plaintext only (default: both). Without --cert-path "
        "its certificate is self-signed",
    )
    metrics_cert_dir: Path | None = file_flag(
        TLS, "--metrics-cert-dir", "directory with tls.crt and tls.key for the metrics port", metavar="DIR"
    )
    metrics_client_ca: Path | None = file_flag(
        TLS,
        "--metrics-client-ca-file",
        "PEM file: clients of the metrics port must present a certificate of this authority",
        metavar="PATH",
    )


def tls_options(flags: argparse.Namespace) -> tuple[TlsOptions | None, MetricsTlsOptions | None]:
    """Return the TLS options of the gRPC port and of the metrics port; None: plaintext only.

    Raises:
        ConfigError: Files are given for a port without TLS, or peers need plaintext.
    """
    is_tls: bool | None = flags.secure_serving
    options = TlsOptions(**flag_values(TlsOptions, flags), plaintext=not is_tls)
    if options.cert_dir is not None and is_tls is False:
        raise ConfigError("--cert-path: needs TLS, which --secure-serving=false switches off")
    if is_tls and flags.peers and flags.peer_ca is None:
        raise ConfigError("--secure-serving=true: peers use this port too; give --peer-ca, or leave it out")
    if flags.metrics_client_ca is not None and flags.metrics_cert_dir is None:
        raise ConfigError("--metrics-client-ca-file: needs --metrics-cert-dir")
    metrics = flags.metrics_cert_dir and MetricsTlsOptions(flags.metrics_cert_dir, flags.metrics_client_ca)
    return None if is_tls is False else options, metrics


def grpc_tls(options: TlsOptions) -> Callable[[], ssl.SSLContext]:
    """Return a factory of SSL contexts for new connections of the gRPC port.

    Raises:
        ConfigError: A file cannot be read, or has no certificate or key.
    """

    def make() -> ssl.SSLContext:
        context = _bare_context()
        context.minimum_version = options.least_version
        if options.suites:
            context.set_ciphers(":".join(options.suites))
        context.set_alpn_protocols(["h2"])
        return context

    if options.cert_dir is not None:
        followed = _followed("grpc", make, options.cert_dir)
        context = followed()
        return followed if options.reloads else lambda: context

    @cache
    def generated() -> ssl.SSLContext:
        # At the first TLS connection: most routers serve plaintext.
        key, cert = self_signed()
        # OpenSSL loads certificates only from files.
        with TemporaryDirectory(prefix="kvroute-") as name:
            for file, data in ((_KEY, key), (_CERT, cert)):
                Path(name, file).write_bytes(data)
            return _loaded(make(), Path(name))

    return generated


def metrics_tls(options: MetricsTlsOptions) -> Callable[[], ssl.SSLContext]:
    """Return a factory of SSL contexts for new connections of the metrics port.

    Raises:
        ConfigError: A file cannot be read, or has no certificate or key.
    """

    def make() -> ssl.SSLContext:
        context = _bare_context()
        if options.client_ca is not None:
            try:
                context.load_verify_locations(options.client_ca)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"--metrics-client-ca-file {options.client_ca}: {error}") from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    return _followed("metrics", make, options.cert_dir)


def self_signed() -> tuple[bytes, bytes]:
    """Return a new private key and its self-signed certificate, as PEM."""
    # Imported here because it is slow, and most routers have no TLS or have files.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    alternatives = [
        x509.DNSName(_NAME),
        x509.DNSName("localhost"),
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
    ]
    now = datetime.datetime.now(datetime.UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _VALID_BEFORE)
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, cert.public_bytes(serialization.Encoding.PEM)


def _bare_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    return context


def _followed(port: str, make: Callable[[], ssl.SSLContext], directory: Path) -> Callable[[], ssl.SSLContext]:
    files = [directory / name for name in (_CERT, _KEY)]
    # Each reload makes a new context: other threads may use the current one.
    return FileReloader(port, files, lambda: _loaded(make(), directory), (ConfigError,)).current


def _loaded(context: ssl.SSLContext, directory: Path) -> ssl.SSLContext:
    try:
        # Without a password OpenSSL would prompt on the terminal for an encrypted key.
        context.load_cert_chain(directory / _CERT, directory / _KEY, password="")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"TLS: {directory}: cannot load {_CERT} and {_KEY}: {error}") from error
    return context
