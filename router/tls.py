"""TLS of the router's ports: options in, credentials of gRPC and a context of the metrics port out."""

from __future__ import annotations

import datetime
import ipaddress
import logging
import ssl
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from indexer.errors import ConfigError as IndexerConfigError
from indexer.repeated_log import RepeatedLog
from indexer.tls import server_credentials
from router.errors import ConfigError
from router.tls_options import MetricsTlsOptions, TlsOptions

_log = logging.getLogger(__name__)
_repeated = RepeatedLog(_log)

_CERT, _KEY = "tls.crt", "tls.key"
# A certificate that is made at start lives as long as its process, or so it must seem.
_VALID = datetime.timedelta(days=3650)
# Clocks of clients may be behind.
_VALID_BEFORE = datetime.timedelta(hours=1)
_NAME = "kvroute"


def grpc_credentials(options: TlsOptions) -> grpc.ServerCredentials:
    """Credentials for a gRPC server.

    Raises:
        ConfigError: A file cannot be read, or holds no certificate or key.
    """
    if options.cert_dir is None:
        key, cert = self_signed()
        return grpc.ssl_server_credentials([(key, cert)])
    cert_path, key_path = options.cert_dir / _CERT, options.cert_dir / _KEY
    # gRPC itself says nothing of a file that is none, and then fails every connection.
    _loaded(_bare_context(), options.cert_dir)
    if not options.reloads:
        return grpc.ssl_server_credentials([(key_path.read_bytes(), cert_path.read_bytes())])
    try:
        return server_credentials(cert_path, key_path, None)
    except IndexerConfigError as error:
        raise ConfigError(str(error)) from error


class MetricsTls:
    """The metrics port's TLS, which follows its files.

    Raises:
        ConfigError: A file cannot be read, or is none.
    """

    def __init__(self, options: MetricsTlsOptions) -> None:
        self._directory = options.cert_dir
        self._context = _loaded(_bare_context(), options.cert_dir)
        if options.client_ca is not None:
            try:
                self._context.load_verify_locations(options.client_ca)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"--metrics-client-ca-file {options.client_ca}: {error}") from error
            self._context.verify_mode = ssl.CERT_REQUIRED
        self._stamps = self._read_stamps()

    def context(self) -> ssl.SSLContext:
        """For the next connection; while the files cannot be read the last ones stay in use."""
        try:
            stamps = self._read_stamps()
            if stamps != self._stamps:
                _loaded(self._context, self._directory)
                self._stamps = stamps
                _log.info("the metrics port's certificate was read anew")
        except (OSError, ConfigError) as error:
            _repeated.event(
                "certificate_unreadable",
                "metrics",
                "the metrics port's certificate stays as it was: %s",
                error,
            )
        return self._context

    def _read_stamps(self) -> tuple[int, ...]:
        return tuple((self._directory / name).stat().st_mtime_ns for name in (_CERT, _KEY))


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
    return context


def _loaded(context: ssl.SSLContext, directory: Path) -> ssl.SSLContext:
    try:
        # Without a password given OpenSSL would ask the terminal for an encrypted key's.
        context.load_cert_chain(directory / _CERT, directory / _KEY, password="")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"TLS: {directory}: no usable {_CERT} and {_KEY}: {error}") from error
    return context
