"""TLS and plaintext on one port: the client's first byte decides, and neither blocks the other."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import grpc
import pytest
import trustme
from prometheus_client import CollectorRegistry

from common.repeated_log import REPEATED_EVENTS
from tests.support.router.doors import TIMEOUT_S
from tests.support.router.h2 import TRANSPORTS, Served, caller, serving

AUTHORITY = trustme.CA()


def context_of(least: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2) -> ssl.SSLContext:
    """Return the server's context."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = least
    context.set_alpn_protocols(["h2"])
    AUTHORITY.issue_cert("localhost", "127.0.0.1").configure_cert(context)
    return context


def client_context(**bounds: ssl.TLSVersion) -> ssl.SSLContext:
    """Return a client's context for these TLS versions."""
    context = ssl.create_default_context()
    AUTHORITY.configure_trust(context)
    for name, version in bounds.items():
        setattr(context, name, version)
    return context


@pytest.fixture(scope="module", params=TRANSPORTS)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """Return a plain service that accepts TLS and plaintext."""
    context = context_of()
    with serving(request.param, tls=lambda: context) as served:
        yield served


def secure(served: Served) -> grpc.Channel:
    """Return a TLS client that accepts large messages."""
    sizes = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    credentials = grpc.ssl_channel_credentials(AUTHORITY.cert_pem.bytes())
    return grpc.secure_channel(served.address, credentials, [("grpc.use_local_subchannel_pool", 1), *sizes])


def test_tls_and_plaintext_clients_are_served_together(served: Served) -> None:
    """Concurrent calls of TLS and plaintext clients, small and large, get their own responses."""
    with secure(served) as safe, served.channel() as plain, ThreadPoolExecutor(16) as pool:

        def call(number: int) -> bool:
            message = b"%d " % number * (1 + number * 997 % 40_000)
            channel = safe if number % 2 else plain
            if number % 3:
                answer: Any = caller(channel, "unary")(message, timeout=TIMEOUT_S)
                return bool(answer == message)
            said = [message, b"x" * 1_000_000, b"end"]
            return list(caller(channel, "exchange")(iter(said), timeout=TIMEOUT_S)) == said

        assert all(pool.map(call, range(120)))
    served.assert_sound()


def test_records_may_be_split_anywhere(served: Served) -> None:
    """A handshake and records that arrive byte by byte are served."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context()
    client.set_alpn_protocols(["h2"])
    secured = client.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with socket.create_connection(("127.0.0.1", served.server.port)) as connection:
        connection.settimeout(TIMEOUT_S)
        while secured.version() is None or outgoing.pending:
            with suppress(ssl.SSLWantReadError):
                secured.do_handshake()
            for byte in outgoing.read():
                connection.sendall(bytes([byte]))
            if secured.version() is None:
                incoming.write(connection.recv(1 << 16))
        assert secured.selected_alpn_protocol() == "h2"
        received = b""
        while len(received) < 9:
            try:
                received += secured.read(1 << 16)
            except ssl.SSLWantReadError:
                incoming.write(connection.recv(1 << 16))
        # SETTINGS of the server.
        assert received[3:5] == b"\x04\x00"
    served.assert_sound()


@pytest.mark.parametrize(
    "said", [b"\x16", b"\x16\x03\x01\xff\xff" + b"x" * 70_000, b"\x16" * 1000, b"GET / HTTP/1.1\r\n\r\n"]
)
def test_a_failed_handshake_ends_only_its_connection(served: Served, said: bytes) -> None:
    """A broken or abandoned handshake affects no other connection."""
    with served.channel() as channel:
        assert caller(channel, "unary")(b"before", timeout=TIMEOUT_S) == b"before"
        with socket.create_connection(("127.0.0.1", served.server.port)) as connection:
            connection.sendall(said)
        assert caller(channel, "unary")(b"after", timeout=TIMEOUT_S) == b"after"
    served.assert_sound()


def failures() -> float:
    """Return how many connections have failed by TLS, as counted by the metric."""
    registry = CollectorRegistry()
    registry.register(REPEATED_EVENTS)
    return registry.get_sample_value("kvroute_repeated_events_total", {"event": "tls_failed"}) or 0.0


def test_plaintext_is_closed_where_tls_is_required() -> None:
    """A server for TLS only closes a plaintext connection, counts it, and serves TLS clients."""
    context, before = context_of(), failures()
    with serving("native", tls=lambda: context, plaintext=False) as served:
        with socket.create_connection(("127.0.0.1", served.server.port)) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            assert connection.recv(1) == b""
        assert failures() == before + 1
        with secure(served) as channel:
            assert caller(channel, "unary")(b"hi", timeout=TIMEOUT_S) == b"hi"


def negotiated_version(served: Served, client: ssl.SSLContext) -> str | None:
    """Return the TLS version that a handshake with the server negotiates; None if it fails."""
    with (
        socket.create_connection(("127.0.0.1", served.server.port)) as connection,
        client.wrap_socket(connection, server_hostname="localhost") as secured,
    ):
        return secured.version()


def test_an_old_tls_version_is_rejected() -> None:
    """A client below the minimum TLS version is rejected with a TLS alert."""
    context = context_of(ssl.TLSVersion.TLSv1_3)
    with serving("native", tls=lambda: context) as served:
        with pytest.raises(ssl.SSLError, match=r"(?i)alert"):
            negotiated_version(served, client_context(maximum_version=ssl.TLSVersion.TLSv1_2))
        assert negotiated_version(served, client_context()) == "TLSv1.3"
        served.assert_sound()


def test_tls_on_a_plaintext_port_is_not_http2() -> None:
    """A port without TLS ends a connection that starts with a handshake."""
    with serving("native") as served:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            negotiated_version(served, client_context())
        served.assert_sound()
