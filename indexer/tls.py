"""TLS of a gRPC server: files in, credentials out that follow the files when they change."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import grpc

from indexer.errors import ConfigError
from indexer.repeated_log import RepeatedLog

_log = logging.getLogger(__name__)
_repeated = RepeatedLog(_log)


def server_credentials(cert: Path, key: Path, client_ca: Path | None) -> grpc.ServerCredentials:
    """Makes credentials from PEM files; with `client_ca`, clients must show a certificate of it.

    The files are looked at with each new connection, so that a renewed certificate needs no restart. While
    they cannot be read the last ones stay in use.

    Raises:
        ConfigError: A file cannot be read.
    """
    files = [path for path in (cert, key, client_ca) if path is not None]
    seen: list[tuple[int, ...]] = []

    def stamps() -> tuple[int, ...]:
        return tuple(path.stat().st_mtime_ns for path in files)

    def load() -> grpc.ServerCertificateConfiguration:
        ca = None if client_ca is None else client_ca.read_bytes()
        return grpc.ssl_server_certificate_configuration([(key.read_bytes(), cert.read_bytes())], ca)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        try:
            now = stamps()
            if now == seen[-1]:
                return None
            configuration = load()
        except OSError as error:
            _repeated.event(
                "certificate_unreadable",
                "grpc",
                "TLS files cannot be read, the last ones stay in use: %s",
                error,
            )
            return None
        seen[:] = [now]
        _log.info("TLS files were read anew")
        return configuration

    try:
        seen.append(stamps())
        first = load()
    except OSError as error:
        raise ConfigError(f"TLS: {error.filename}: cannot be read: {error.strerror}") from error
    # The stubs do not know that None means unchanged.
    fetcher: Any = changed
    return grpc.dynamic_ssl_server_credentials(
        first, fetcher, require_client_authentication=client_ca is not None
    )
