"""TLS of the router's ports: options in, contexts for their connections out."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from indexer.tls import FollowedFiles
from router.errors import ConfigError
from router.tls_options import MetricsTlsOptions, TlsOptions

_CERT, _KEY = "tls.crt", "tls.key"
# A certificate that is made at start lives as long as its process, or so it must seem.
_VALID = datetime.timedelta(days=3650)
# Clocks of clients may be behind.
_VALID_BEFORE = datetime.timedelta(hours=1)
_NAME = "kvroute"


def grpc_tls(options: TlsOptions) -> Callable[[], ssl.SSLContext]:
    """Return what makes the context of the gRPC port's next connection.

    Raises:
        ConfigError: A file cannot be read, or holds no certificate or key.
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
    key, cert = self_signed()
    # OpenSSL reads them from files alone.
    with TemporaryDirectory(prefix="kvroute-") as name:
        for file, data in ((_KEY, key), (_CERT, cert)):
            Path(name, file).write_bytes(data)
        context = _loaded(make(), Path(name))
    return lambda: context


def metrics_tls(options: MetricsTlsOptions) -> Callable[[], ssl.SSLContext]:
    """Return what makes the context of the metrics port's next connection.

    Raises:
        ConfigError: A file cannot be read, or is none.
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
    """A new key and a certificate of its own, as PEM; clients that check it must be given it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NAME)])
    names = [
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
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
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
    # Always another context: threads may use the one so far.
    return FollowedFiles(port, files, lambda: _loaded(make(), directory), (ConfigError,)).current


def _loaded(context: ssl.SSLContext, directory: Path) -> ssl.SSLContext:
    try:
        # Without a password given OpenSSL would ask the terminal for an encrypted key's.
        context.load_cert_chain(directory / _CERT, directory / _KEY, password="")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"TLS: {directory}: no usable {_CERT} and {_KEY}: {error}") from error
    return context
