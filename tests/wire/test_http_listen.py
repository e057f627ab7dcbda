"""The HTTP server on real sockets: whoever waits, fails or goes away holds up nobody."""

from __future__ import annotations

import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router import http_desk
from router.http_listen import HttpServer
from router.steps import AT_ONCE_MAX
from tests.wire.http_support import (
    CONNECTIONS_MAX,
    INLINE_BYTES,
    LARGE,
    Waits,
    ask,
    bound,
    http_threads,
    request,
    served,
)
from tests.wire.raw_http_support import Client
from tests.wire.router_wire_support import TIMEOUT_S, wait_until


@pytest.mark.parametrize(
    ("path", "body", "inline_bytes_max"),
    [
        ("/wait-told", b"", INLINE_BYTES),
        ("/wait", b"x" * (INLINE_BYTES + 1), INLINE_BYTES),
        ("/wait", b"x" * 500_000, INLINE_BYTES),
        ("/wait", b"", -1),
    ],
    ids=["it says so", "large", "larger than what is received at once", "none is served inline"],
)
def test_a_request_that_waits_holds_up_nobody(path: str, body: bytes, inline_bytes_max: int) -> None:
    """While some wait all others are served, and then those get their answers, too."""
    with served(inline_bytes_max=inline_bytes_max) as (server, waits), ExitStack() as opened:
        waiting = [opened.enter_context(Client(server.port)) for _ in range(20)]
        for number, client in enumerate(waiting):
            client.send(request(f"{path}/{number}", body))
        assert len({waits.entered.get(timeout=TIMEOUT_S) for _ in waiting}) == 20
        with Client(server.port) as other:
            for _ in range(3):
                other.send(request("/quick"))
                assert other.answer().body == b"/quick"
        waits.may_go.set()
        answers = [client.answer().body for client in waiting]
        assert answers == [f"{path}/{number}".encode() for number in range(20)]
        for client in waiting:
            client.send(request("/again"))
            assert client.answer().body == b"/again"


def test_connections_are_shared_out_among_the_desks() -> None:
    """Whoever waits without saying so holds up those of its own desk, and nobody of another one."""
    with served(desks=4) as (server, waits), ExitStack() as opened:
        clients = [opened.enter_context(Client(server.port)) for _ in range(8)]
        for client in clients:
            # So the server has taken it, and the next one goes to the next desk.
            client.send(request("/quick"))
            assert client.answer().body == b"/quick"
        clients[0].send(request("/wait"))
        assert waits.entered.get(timeout=TIMEOUT_S) == "/wait"
        for number in (1, 2, 3, 5, 6, 7):
            clients[number].send(request("/quick"))
            assert clients[number].answer().body == b"/quick"
        clients[4].send(request("/behind"))
        waits.may_go.set()
        assert clients[0].answer().body == b"/wait"
        assert clients[4].answer().body == b"/behind"


def test_requests_that_come_at_once_take_each_step_together() -> None:
    """Each takes a step before any takes its next one, no more at once than fit the caches."""
    with served() as (server, waits), ExitStack() as opened:
        clients = [opened.enter_context(Client(server.port)) for _ in range(AT_ONCE_MAX + 3)]
        for client in clients:
            client.send(request("/quick"))
            assert client.answer().body == b"/quick"
        with Client(server.port) as keeps:
            keeps.send(request("/wait"))
            waits.entered.get(timeout=TIMEOUT_S)
            paths = [f"/steps/{at}" for at in range(len(clients))]
            for client, path in zip(clients, paths, strict=True):
                client.send(request(path))
            waits.may_go.set()
            assert [client.answer().body.decode() for client in clients] == paths
        first, rest = waits.steps[: 3 * AT_ONCE_MAX], waits.steps[3 * AT_ONCE_MAX :]
        assert first == first[:AT_ONCE_MAX] * 3
        assert rest == rest[:3] * 3
        assert sorted(first[:AT_ONCE_MAX] + rest[:3]) == sorted(paths)


def test_requests_of_many_bytes_go_fewer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few they are, no more go together than their bytes allow."""
    monkeypatch.setattr(http_desk, "AT_ONCE_BYTES", 1000)
    with served() as (server, waits), ExitStack() as opened:
        clients = [opened.enter_context(Client(server.port)) for _ in range(3)]
        for client in clients:
            client.send(request("/quick"))
            assert client.answer().body == b"/quick"
        with Client(server.port) as keeps:
            keeps.send(request("/wait"))
            waits.entered.get(timeout=TIMEOUT_S)
            for at, client in enumerate(clients):
                client.send(request(f"/steps/{at}", b"x" * 600))
            waits.may_go.set()
            assert [client.answer().body for client in clients] == [b"/steps/0", b"/steps/1", b"/steps/2"]
        together, last = waits.steps[:2], waits.steps[-1:]
        assert waits.steps == together * 3 + last * 3
        assert len({*together, *last}) == 3


def test_pipelined_answers_keep_their_order_behind_one_that_waits() -> None:
    """What a connection asks next is answered behind what waits, while others are served."""
    with served() as (server, waits), Client(server.port) as client:
        client.send(request("/wait-told") + request("/second") + request("/third", b"x" * 5000))
        waits.entered.get(timeout=TIMEOUT_S)
        client.send(request("/fourth"))
        assert ask(server) == b"/"
        client.socket.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.socket.recv(1)
        client.socket.settimeout(TIMEOUT_S)
        waits.may_go.set()
        assert [client.answer().body for _ in range(4)] == [b"/wait-told", b"/second", b"/third", b"/fourth"]


def test_several_requests_at_once_hold_up_nobody() -> None:
    """What a client pipelines is its own time, not that of others, even where nobody says that it waits."""
    with served() as (server, waits), Client(server.port) as client:
        client.send(request("/first") + request("/wait"))
        waits.entered.get(timeout=TIMEOUT_S)
        assert client.answer().body == b"/first"
        assert ask(server) == b"/"
        waits.may_go.set()
        assert client.answer().body == b"/wait"


@pytest.mark.parametrize("how", ["closes", "resets", "asks no more"])
def test_a_client_that_goes_away_while_its_request_waits_is_seen(how: str) -> None:
    """Who serves the request can ask for it; whoever stays, or asks its next question, has not gone."""
    with served() as (server, waits), ExitStack() as opened:
        stays, asks, goes = (opened.enter_context(Client(server.port)) for _ in range(3))
        for client, name in ((stays, "stays"), (asks, "asks"), (goes, "goes")):
            client.send(request(f"/wait-told/{name}"))
            assert waits.entered.get(timeout=TIMEOUT_S) == f"/wait-told/{name}"
        asks.send(request("/next"))
        if how == "asks no more":
            goes.socket.shutdown(socket.SHUT_WR)
        else:
            linger = struct.pack("ii", how == "resets", 0)
            goes.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            goes.socket.close()
        wait_until(lambda: not waits.active["/wait-told/goes"](), "its leaving")
        assert ask(server) == b"/"
        assert waits.active["/wait-told/stays"]()
        assert waits.active["/wait-told/asks"]()
        waits.may_go.set()
        assert stays.answer().body == b"/wait-told/stays"
        assert [asks.answer().body for _ in range(2)] == [b"/wait-told/asks", b"/next"]
        if how == "asks no more":
            assert goes.answer().body == b"/wait-told/goes"
            assert goes.is_closed()


def test_clients_that_come_and_go_get_their_own_answers_and_leave_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whenever a client goes away, before its answer or while it is made, the others do not notice."""

    def come_and_go(server: HttpServer, seed: int) -> None:
        random = Random(seed)
        for number in range(150):
            with Client(server.port) as client:
                for part in range(3):
                    path = f"/{random.choice(['plain', 'wait-told'])}/{seed}-{number}-{part}"
                    client.send(request(path, b"x" * random.choice([0, INLINE_BYTES + 1])))
                    if random.random() < 0.3:
                        break
                    assert client.answer().body == path.encode()

    with served(desks=2) as (server, waits), ThreadPoolExecutor(12) as pool:
        waits.may_go.set()
        assert len(list(pool.map(partial(come_and_go, server), range(12)))) == 12
        # Each of them has its place again.
        with ExitStack() as opened:
            wait_until(lambda: _are_served(server, opened), "free places")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def _are_served(server: HttpServer, opened: ExitStack) -> bool:
    """Whether as many clients as there may be are served at once."""
    opened.close()
    clients = [opened.enter_context(Client(server.port)) for _ in range(CONNECTIONS_MAX)]
    try:
        for client in clients:
            client.send(request("/"))
        return {client.answer().body for client in clients} == {b"/"}
    except (AssertionError, OSError):
        return False


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=60, deadline=None)
@given(data=st.data())
def test_however_requests_come_all_are_answered_in_order(data: st.DataObject) -> None:
    """Several clients, any pieces in any order, some requests handed over: each gets its own answers."""
    sizes, pieces = st.sampled_from([0, 10, INLINE_BYTES + 1, 70_000]), st.integers(1, 80_000)
    kinds = st.lists(st.tuples(st.sampled_from(["plain", "wait-told"]), sizes), min_size=1, max_size=5)
    asked = data.draw(st.lists(kinds, min_size=1, max_size=4))
    with served() as (server, waits), ExitStack() as opened:
        waits.may_go.set()
        clients = [opened.enter_context(Client(server.port)) for _ in asked]
        paths = [[f"/{kind}/{place}" for place, (kind, _) in enumerate(kinds)] for kinds in asked]
        left = [
            b"".join(request(path, b"x" * size) for path, (_, size) in zip(own, kinds, strict=True))
            for own, kinds in zip(paths, asked, strict=True)
        ]
        while any(left):
            place = data.draw(st.sampled_from([place for place, rest in enumerate(left) if rest]))
            size = data.draw(pieces)
            clients[place].send(left[place][:size])
            left[place] = left[place][size:]
        for client, own in zip(clients, paths, strict=True):
            assert [client.answer().body.decode() for _ in own] == own


def test_an_answer_that_ends_a_connection_is_sent_whole() -> None:
    """Behind `connection: close` the connection ends, but not before all of the answer has gone."""
    with served() as (server, _), Client(server.port) as client:
        client.send(request("/large").replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
        assert len(client.answer().body) == LARGE + len("/large")
        assert client.is_closed()


def test_a_request_that_fails_ends_its_own_connection_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever `serve` trips over is told, and others go on."""
    with served() as (server, _), Client(server.port) as other, Client(server.port) as client:
        client.send(request("/fail"))
        assert client.is_closed()
        other.send(request("/"))
        assert other.answer().body == b"/"
    assert "a plugin tripped" in caplog.text


def test_the_close_waits_for_requests_that_wait() -> None:
    """What waits on another thread when the server closes is still answered, and then all threads end."""
    with served() as (server, waits), Client(server.port) as client, Client(server.port) as idle:
        client.send(request("/wait-told"))
        waits.entered.get(timeout=TIMEOUT_S)
        closing = threading.Thread(target=server.close)
        closing.start()
        assert idle.is_closed()
        waits.may_go.set()
        assert client.answer().body == b"/wait-told"
        assert client.is_closed()
        closing.join()
    wait_until(lambda: http_threads() == 0, "the end of all threads")


def test_what_never_began_is_closed_at_once() -> None:
    """A server that was bound and not started leaves its port to others, however often it is closed."""
    server = bound(Waits(), inline_bytes_max=INLINE_BYTES, connections_max=1, desks=1)
    server.close()
    server.close()
    with socket.create_server(("127.0.0.1", server.port)):
        pass
