"""The HTTP server on real sockets: who waits, who is slow and who takes nothing hold up nobody."""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from queue import SimpleQueue
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router import http_connection, http_desk
from router.http_listen import HttpServer
from router.http_requests import HttpRequest, HttpRequestError
from router.steps import AT_ONCE_MAX, GOES_ON, MAY_WAIT, Steps
from tests.wire.raw_http_support import Client
from tests.wire.router_wire_support import TIMEOUT_S, wait_until

_INLINE_BYTES = 1000
_CONNECTIONS_MAX = 100
_LARGE = 8 << 20


class Waits:
    """Serves: /wait... waits until it may go, /steps... takes three steps, /large gives much, /fail fails.

    Attributes:
        entered: One path for each request that waits.
        active: By path, whether its client still waits.
        may_go: Lets all go.
        steps: The path of each step that was taken.
    """

    def __init__(self) -> None:
        self.entered: SimpleQueue[str] = SimpleQueue()
        self.active: dict[str, Callable[[], bool]] = {}
        self.may_go = threading.Event()
        self.steps: list[str] = []

    def serve(self, request: HttpRequest, closes: bool, is_active: Callable[[], bool]) -> Steps[bytes]:
        """The path comes back as the body."""
        path = request.path
        if path.startswith("/steps"):
            for _ in range(3):
                self.steps.append(path)
                yield GOES_ON
        if path.startswith("/wait"):
            if path.startswith("/wait-told"):
                yield MAY_WAIT
            self.active[path] = is_active
            self.entered.put(path)
            assert self.may_go.wait(TIMEOUT_S)
        if path == "/fail":
            raise ValueError("a plugin tripped")
        return _answer(200, path.encode() + (b"x" * _LARGE if path == "/large" else b""), closes=closes)

    def refuse(self, error: HttpRequestError) -> bytes:
        """Says why."""
        return _answer(error.status, str(error).encode(), closes=True)


@contextmanager
def served(
    *, inline_bytes_max: int = _INLINE_BYTES, connections_max: int = _CONNECTIONS_MAX, desks: int = 1
) -> Iterator[tuple[HttpServer, Waits]]:
    """A server on a free port."""
    waits = Waits()
    server = _bound(waits, inline_bytes_max=inline_bytes_max, connections_max=connections_max, desks=desks)
    server.start()
    try:
        yield server, waits
    finally:
        waits.may_go.set()
        server.close()


def _bound(waits: Waits, *, inline_bytes_max: int, connections_max: int, desks: int) -> HttpServer:
    return HttpServer(
        "--port",
        "127.0.0.1",
        0,
        waits.serve,
        waits.refuse,
        body_bytes_max=1 << 20,
        inline_bytes_max=inline_bytes_max,
        connections_max=connections_max,
        refused=lambda: None,
        desks=desks,
    )


def _answer(status: int, body: bytes, *, closes: bool) -> bytes:
    end = b"connection: close\r\n" if closes else b""
    return b"HTTP/1.1 %d -\r\ncontent-length: %d\r\n%b\r\n%b" % (status, len(body), end, body)


def request(path: str, body: bytes = b"") -> bytes:
    """A request."""
    return b"POST %b HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(body), body)


def ask(server: HttpServer, path: str = "/") -> bytes:
    """What is answered on a connection of its own."""
    with Client(server.port) as client:
        client.send(request(path))
        return client.answer().body


def http_threads() -> int:
    """Threads that serve."""
    return sum(thread.name == "http" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("path", "body", "inline_bytes_max"),
    [
        ("/wait-told", b"", _INLINE_BYTES),
        ("/wait", b"x" * (_INLINE_BYTES + 1), _INLINE_BYTES),
        ("/wait", b"x" * 500_000, _INLINE_BYTES),
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
                    client.send(request(path, b"x" * random.choice([0, _INLINE_BYTES + 1])))
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
    clients = [opened.enter_context(Client(server.port)) for _ in range(_CONNECTIONS_MAX)]
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
    sizes, pieces = st.sampled_from([0, 10, _INLINE_BYTES + 1, 70_000]), st.integers(1, 80_000)
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
        assert sizes == [_LARGE + len("/large")] * 2 + [len("/next")]
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


def test_an_answer_that_ends_a_connection_is_sent_whole() -> None:
    """Behind `connection: close` the connection ends, but not before all of the answer has gone."""
    with served() as (server, _), Client(server.port) as client:
        client.send(request("/large").replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
        assert len(client.answer().body) == _LARGE + len("/large")
        assert client.is_closed()


def test_a_request_that_fails_ends_its_own_connection_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever `serve` trips over is told, and others go on."""
    with served() as (server, _), Client(server.port) as other, Client(server.port) as client:
        client.send(request("/fail"))
        assert client.is_closed()
        other.send(request("/"))
        assert other.answer().body == b"/"
    assert "a plugin tripped" in caplog.text


def test_whoever_goes_on_after_a_refusal_is_closed_on() -> None:
    """Of what follows a refused request some is read, that the answer is not lost, but not all there is."""
    with served() as (server, _), Client(server.port) as client:
        client.send(b"NONSENSE\r\n\r\n")
        assert client.answer().status == 400
        more = iter(lambda: client.send(b"x" * (1 << 20)), 0)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            deque(more, maxlen=0)


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
    server = _bound(Waits(), inline_bytes_max=_INLINE_BYTES, connections_max=1, desks=1)
    server.close()
    server.close()
    with socket.create_server(("127.0.0.1", server.port)):
        pass
