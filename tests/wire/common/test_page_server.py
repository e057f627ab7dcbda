"""The page server over real sockets: idle, slow and hostile clients, and slow pages."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
import urllib3
from prometheus_client import CollectorRegistry

from common.page_server import CONNECTIONS_MAX, STREAMS_MAX
from router.app.dashboard import Watch
from router.app.debug_pages import DebugServer, MetricsAuth, Page
from tests.support.router.doors import wait_until

TIMEOUT_S = 300.0


class Reviewer:
    """Cluster that accepts the token "known", and rejects any other once `answers` is set."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.asked = threading.Semaphore(0)

    def review(self, kind: str, spec: Mapping[str, Any]) -> bytes:
        if spec.get("token", "known") == "known":
            return b'{"status": {"authenticated": true, "allowed": true}}'
        self.asked.release()
        self.answers.wait(TIMEOUT_S)
        return b"{}"


@contextmanager
def server(pages: dict[str, Page] | None = None, **settings: Any) -> Iterator[DebugServer]:
    """Run a server with /ready and the given pages."""
    all_pages: dict[str, Page] = {"/ready": lambda _: (200, {"status": "ready"}), **(pages or {})}
    running = DebugServer("127.0.0.1", 0, CollectorRegistry(), all_pages, **settings)
    running.start()
    try:
        yield running
    finally:
        running.close()


def status(running: DebugServer, path: str, method: str = "GET", **headers: str) -> int:
    """Return the status of a page, requested on a new connection."""
    url = f"http://127.0.0.1:{running.port}{path}"
    with urllib3.PoolManager(retries=False, timeout=TIMEOUT_S) as http:
        return http.request(method, url, headers=headers).status


def connected(running: DebugServer, closing: ExitStack) -> socket.socket:
    """Return a client connection."""
    client = socket.create_connection(("127.0.0.1", running.port), TIMEOUT_S)
    return closing.enter_context(client)


def is_open(client: socket.socket) -> bool:
    """Return whether the server keeps this silent connection open."""
    try:
        client.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
    return False


def raw(running: DebugServer, data: bytes) -> bytes:
    """Return everything the server answers to these bytes."""
    with socket.create_connection(("127.0.0.1", running.port), TIMEOUT_S) as client:
        client.sendall(data)
        answer = b""
        while part := client.recv(65536):
            answer += part
        return answer


@pytest.mark.parametrize("start", [b"", b"GET /ready HT"], ids=["idle", "slow"])
def test_silent_connections_delay_no_page(start: bytes) -> None:
    """Pages are served beside more silent connections than the limit, and open ones stay bounded."""
    with server() as running, ExitStack() as closing:
        silent = [connected(running, closing) for _ in range(CONNECTIONS_MAX + 100)]
        for client in silent:
            # A connection above the limit may have been reset.
            with suppress(ConnectionError):
                client.sendall(start)
        assert status(running, "/ready") == 200
        assert status(running, "/metrics") == 200
        assert sum(map(is_open, silent)) <= CONNECTIONS_MAX


def test_the_oldest_silent_connection_makes_room() -> None:
    """A connection above the limit closes the oldest silent one."""
    with server() as running, ExitStack() as closing:
        oldest = connected(running, closing)
        for _ in range(CONNECTIONS_MAX):
            connected(running, closing)
        assert oldest.recv(1) == b""


def test_pages_that_take_long_delay_no_probe() -> None:
    """While the queue of slow pages is full, probes are answered and a further page gets 503."""
    end, begun = threading.Event(), threading.Semaphore(0)

    def slow(_: object) -> tuple[int, Any]:
        begun.release()
        end.wait(TIMEOUT_S)
        return 200, "done"

    with server({"/slow": slow}) as running, ExitStack() as closing:
        closing.callback(end.set)
        asked = [connected(running, closing) for _ in range(65)]
        for client in asked:
            client.sendall(b"GET /slow HTTP/1.1\r\n\r\n")
        for _ in range(8):
            assert begun.acquire(timeout=TIMEOUT_S)
        while status(running, "/slow", "HEAD") != 503:
            pass
        assert status(running, "/ready") == 200
        end.set()
        answers = [client.recv(12) for client in asked]
    assert sorted(set(answers)) in ([b"HTTP/1.1 200"], [b"HTTP/1.1 200", b"HTTP/1.1 503"])


def test_reviews_of_tokens_delay_no_known_token() -> None:
    """While the cluster reviews unknown tokens, probes and known tokens are answered."""
    reviewer: Any = Reviewer()
    with server(authorize=MetricsAuth(reviewer)) as running, ExitStack() as closing:
        closing.callback(reviewer.answers.set)
        assert status(running, "/metrics", authorization="Bearer known") == 200
        strangers = [connected(running, closing) for _ in range(40)]
        for client in strangers:
            client.sendall(b"GET /metrics HTTP/1.1\r\nAuthorization: Bearer unknown\r\n\r\n")
        for _ in range(8):
            assert reviewer.asked.acquire(timeout=TIMEOUT_S)
        assert status(running, "/ready") == 200
        assert status(running, "/metrics", authorization="Bearer known") == 200
        reviewer.answers.set()
        assert {client.recv(12) for client in strangers} == {b"HTTP/1.1 401"}


def test_clients_that_do_not_read_are_closed() -> None:
    """Connections of clients that do not read are closed, oldest first, in favour of others."""
    page = "x" * (16 << 20)
    with server({"/large": lambda _: (200, page)}) as running, ExitStack() as closing:
        deaf = [connected(running, closing) for _ in range(17)]
        for client in deaf:
            client.sendall(b"GET /large HTTP/1.1\r\n\r\n")
            assert client.recv(12) == b"HTTP/1.1 200"
        url = f"http://127.0.0.1:{running.port}/large"
        assert len(urllib3.request("GET", url, retries=False, timeout=TIMEOUT_S).data) == len(page)


def test_a_failing_page_is_an_answer() -> None:
    """A page that raises is answered with 500, and the server keeps serving."""

    def broken(_: object) -> tuple[int, Any]:
        raise ValueError("broken")

    with server({"/broken": broken}) as running:
        assert status(running, "/broken") == 500
        assert status(running, "/ready") == 200


@pytest.mark.parametrize(
    ("data", "first_line"),
    [
        (b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP/1.1 200 OK"),
        (b"GET /ready?x=1&x=2#y HTTP/1.0\r\n\r\n", b"HTTP/1.1 200 OK"),
        (b"GET /ready HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", b"HTTP/1.1 200 OK"),
        (b"GET /nowhere HTTP/1.1\r\n\r\n", b"HTTP/1.1 404 Not Found"),
        (b"POST /ready HTTP/1.1\r\nContent-Length: 0\r\n\r\n", b"HTTP/1.1 405 Method Not Allowed"),
        (b"GET /ready HTTP/1.1\r\nContent-Length: 4\r\n\r\n", b"HTTP/1.1 400 Bad Request"),
        (b"GET //[/ready HTTP/1.1\r\n\r\n", b"HTTP/1.1 400 Bad Request"),
        (b"\x16\x03\x01\r\n\r\n", b"HTTP/1.1 400 Bad Request"),
        (
            b"GET /ready HTTP/1.1\r\nX: " + b"x" * 25_000 + b"\r\n\r\n",
            b"HTTP/1.1 431 Request Header Fields Too Large",
        ),
    ],
)
def test_each_request_gets_one_answer(data: bytes, first_line: bytes) -> None:
    """Valid, unknown, malformed and oversized requests each get one answer, then the connection closes."""
    with server() as running:
        assert raw(running, data).split(b"\r\n", 1)[0] == first_line


def test_head_has_the_length_without_the_body() -> None:
    """HEAD is answered like GET, without a body."""
    with server() as running:
        head, _, body = raw(running, b"HEAD /ready HTTP/1.1\r\n\r\n").partition(b"\r\n\r\n")
        assert b"Content-Length: 18" in head
        assert body == b""


class Flood(Watch):
    """Stream whose parts are large, and that records how many were made."""

    def __init__(self) -> None:
        self.made = 0

    def next_part(self) -> bytes:
        self.made += 1
        return b":" + b"x" * (1 << 20) + b"\n\n"


def stream_head(running: DebugServer, client: socket.socket, method: str = "GET") -> bytes:
    """Request the stream; return the response's first line."""
    client.sendall(f"{method} /debug/stream HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return client.recv(100, socket.MSG_WAITALL).partition(b"\r\n")[0]


def test_streams_are_bounded() -> None:
    """One stream more than the limit is answered 503, until one of the others has ended."""
    with server(watch=Flood) as running, ExitStack() as closing:
        clients = [connected(running, closing) for _ in range(STREAMS_MAX)]
        for client in clients:
            assert stream_head(running, client) == b"HTTP/1.1 200 OK"
        assert status(running, "/debug/stream") == 503
        assert status(running, "/ready") == 200
        clients[0].close()
        wait_until(
            lambda: stream_head(running, connected(running, closing)) == b"HTTP/1.1 200 OK", "room again"
        )


def test_slow_readers_of_a_stream_are_disconnected() -> None:
    """Clients that do not read get what fits into buffers, then lose their connections and places."""
    floods: list[Flood] = []

    def flood() -> Flood:
        floods.append(Flood())
        return floods[-1]

    with server(watch=flood) as running, ExitStack() as closing:
        for _ in range(STREAMS_MAX):
            assert stream_head(running, connected(running, closing)) == b"HTTP/1.1 200 OK"
        wait_until(
            lambda: stream_head(running, connected(running, closing)) == b"HTTP/1.1 200 OK", "room again"
        )
        assert all(each.made < 20 for each in floods)


def test_the_head_of_a_stream_has_no_body() -> None:
    """HEAD of the stream is answered at once, without making a part."""
    flood = Flood()
    with server(watch=lambda: flood) as running:
        answer = raw(running, b"HEAD /debug/stream HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert b"text/event-stream" in answer
        assert answer.endswith(b"\r\n\r\n")
        assert flood.made == 0


def test_the_dashboard_is_public_and_its_data_is_not() -> None:
    """The page needs no token, because browsers send none; the stream and the debug pages do."""
    with server(watch=Flood, authorize=MetricsAuth(Reviewer())) as running:  # type: ignore[arg-type]
        assert status(running, "/") == 200
        for path in ("/debug/stream", "/debug/pods", "/metrics"):
            assert status(running, path) == 401
    with server() as running:
        assert status(running, "/") == 404
