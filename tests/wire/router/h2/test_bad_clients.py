"""Clients that violate HTTP/2 repeatedly: one log line, and all of them in the metric."""

from __future__ import annotations

import logging
import socket

import pytest
from prometheus_client import CollectorRegistry

from common.repeated_log import REPEATED_EVENTS
from router.h2.server import GrpcServer

CLIENTS = 50


def broken() -> float:
    """Return how many connections violated HTTP/2 in this process."""
    registry = CollectorRegistry()
    registry.register(REPEATED_EVENTS)
    return registry.get_sample_value("kvroute_repeated_events_total", {"event": "http2_error"}) or 0.0


def test_violations_of_one_client_are_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    """Fifty invalid connections of one client give at most one warning and count fifty times."""
    before = broken()
    server = GrpcServer(
        "--grpc-port",
        "127.0.0.1",
        0,
        threads=1,
        requests_max=1,
        message_bytes_max=0,
        services=(),
        inline={},
    )
    server.start()
    try:
        with caplog.at_level(logging.WARNING, "router.h2"):
            for _ in range(CLIENTS):
                with socket.create_connection(("127.0.0.1", server.port), 300) as client:
                    client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(64))
                    while client.recv(65536):
                        pass
    finally:
        server.close()
    assert broken() - before == CLIENTS
    # Another test of this process may have used this minute's log line.
    assert len([line for line in caplog.messages if "HTTP/2 violation" in line]) <= 1
