"""Stand-alone indexer with TLS: certificate files, renewal without a restart, client certificates."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import trustme

from indexer import ConfigError
from indexer._pb import indexer_pb2 as pb
from indexer._pb import indexer_pb2_grpc as pb_grpc
from indexer.service.grpc_server import IndexerServer, server_credentials
from tests.support.indexer.engine_publisher import DEADLINE_S
from tests.support.indexer.subscriber import Watched


class Files:
    """PEM files of a server."""

    def __init__(self, folder: Path) -> None:
        self.cert, self.key = folder / "tls.crt", folder / "tls.key"
        self.client_ca = folder / "ca.crt"

    def write(self, authority: trustme.CA, number: int = 0) -> None:
        """Write a certificate of this authority; each number has another modification time."""
        issued = authority.issue_cert("localhost")
        issued.cert_chain_pems[0].write_to_path(self.cert)
        issued.private_key_pem.write_to_path(self.key)
        authority.cert_pem.write_to_path(self.client_ca)
        for path in (self.cert, self.key, self.client_ca):
            os.utime(path, (10**9 + number, 10**9 + number))


@contextmanager
def serving(files: Files, *, clients: bool = False) -> Iterator[int]:
    """Start a server with these files; yield its port."""
    watched = Watched()
    credentials = server_credentials(files.cert, files.key, files.client_ca if clients else None)
    server = IndexerServer(watched.indexer, [], "127.0.0.1", 0, credentials)
    server.start()
    try:
        yield server.port
    finally:
        server.close(0)
        watched.indexer.close()


def ask(port: int, trusted: trustme.CA, client: trustme.CA | None = None) -> None:
    """Send a request on a new connection that trusts one authority and presents the other's certificate."""
    shown = None if client is None else client.issue_cert("client")
    credentials = grpc.ssl_channel_credentials(
        trusted.cert_pem.bytes(),
        None if shown is None else shown.private_key_pem.bytes(),
        None if shown is None else shown.cert_chain_pems[0].bytes(),
    )
    # A subchannel pool of its own, because channels share connections by default.
    with grpc.secure_channel(
        f"localhost:{port}", credentials, [("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        pb_grpc.IndexerServiceStub(channel).Stats(pb.StatsRequest(), timeout=DEADLINE_S)


def test_a_renewed_certificate_is_used_without_a_restart(tmp_path: Path) -> None:
    """New connections use the renewed certificate; while a file is missing the last one stays in use."""
    old, new, files = trustme.CA(), trustme.CA(), Files(tmp_path)
    files.write(old)
    with serving(files) as port:
        ask(port, old)
        with pytest.raises(grpc.RpcError):
            ask(port, new)
        files.write(new, 1)
        ask(port, new)
        files.cert.unlink()
        ask(port, new)


def test_clients_must_show_a_certificate_where_that_is_asked(tmp_path: Path) -> None:
    """Clients without a certificate of the configured authority are rejected."""
    authority, files = trustme.CA(), Files(tmp_path)
    files.write(authority)
    with serving(files, clients=True) as port:
        ask(port, authority, authority)
        for client in (None, trustme.CA()):
            with pytest.raises(grpc.RpcError):
                ask(port, authority, client)


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    """A missing TLS file is a start-up error that names it."""
    files = Files(tmp_path)
    with pytest.raises(ConfigError, match=r"tls\.crt"):
        server_credentials(files.cert, files.key, None)
