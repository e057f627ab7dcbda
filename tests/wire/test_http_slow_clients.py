"""The HTTP server's clients that send or take slowly, or not at all: they hold up nobody, and have an end."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack

import pytest

from router import http_connection
from tests.wire.http_support import LARGE, ask, http_threads, request, served
from tests.wire.raw_http_support import Client
from tests.wire.router_wire_support import wait_until


def test_slow_clients_take_no_threads() -> None:
    """Any number of requests that come piece by piece are read by the one thread that serves all."""
    bodies = [b"", b"x" * 300_000]
    with served() as (server, _), ExitStack() as opened:
        ask(server)
        slow = [opened.enter_context(Client(server.port)) for _ in range(60)]
        for number, client in enumerate(slow):
            client.send(request("/slow", bodies[number % 2])[:40])
        for _ in range(3):
            assert ask(server) == b"/"
        assert http_threads() == 1
        for number, client in enumerate(slow):
            data = request("/slow", bodies[number % 2])[40:]
            client.send(data[: len(data) // 2])
            client.send(data[len(data) // 2 :])
        assert {client.answer().body for client in slow} == {b"/slow"}


def test_whoever_takes_no_answer_holds_up_nobody() -> None:
    """An answer that does not fit goes on when there is room, whole and before the next one."""
    with served() as (server, _), Client(server.port) as client:
        client.send(request("/large") + request("/large") + request("/next"))
        for _ in range(3):
            assert ask(server) == b"/"
        sizes = [len(client.answer().body) for _ in range(3)]
        assert sizes == [LARGE + len("/large")] * 2 + [len("/next")]
        client.send(request("/after"))
        assert client.answer().body == b"/after"


@pytest.mark.parametrize("line", [b"", b"connection: close\r\n"], ids=["it stays", "it ends with it"])
def test_whoever_takes_no_answer_for_long_is_closed_on(line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection whose answer is not taken in time gives its place to another."""
    monkeypatch.setattr(http_connection, "_REQUEST_S", 1.0)
    with served(connections_max=1) as (server, _), Client(server.port) as client:
        client.send(request("/large").replace(b"content-length", line + b"content-length"))

        def is_served() -> bool:
            try:
                return ask(server) == b"/"
            except (AssertionError, OSError):
                return False

        wait_until(is_served, "a free place")


def test_whoever_goes_on_after_a_refusal_is_closed_on() -> None:
    """Of what follows a refused request some is read, that the answer is not lost, but not all there is."""
    with served() as (server, _), Client(server.port) as client:
        client.send(b"NONSENSE\r\n\r\n")
        assert client.answer().status == 400
        more = iter(lambda: client.send(b"x" * (1 << 20)), 0)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            deque(more, maxlen=0)
