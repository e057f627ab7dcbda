"""The HTTP server on a real socket, serving what waits, fails, or gives much, as its path says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

from router.http_listen import HttpServer
from router.http_requests import HttpRequest, HttpRequestError
from router.steps import GOES_ON, MAY_WAIT, Steps
from tests.wire.raw_http_support import Client
from tests.wire.router_wire_support import TIMEOUT_S

INLINE_BYTES = 1000
CONNECTIONS_MAX = 100
LARGE = 8 << 20


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
        return _answer(200, path.encode() + (b"x" * LARGE if path == "/large" else b""), closes=closes)

    def refuse(self, error: HttpRequestError) -> bytes:
        """Says why."""
        return _answer(error.status, str(error).encode(), closes=True)


@contextmanager
def served(
    *, inline_bytes_max: int = INLINE_BYTES, connections_max: int = CONNECTIONS_MAX, desks: int = 1
) -> Iterator[tuple[HttpServer, Waits]]:
    """A server on a free port."""
    waits = Waits()
    server = bound(waits, inline_bytes_max=inline_bytes_max, connections_max=connections_max, desks=desks)
    server.start()
    try:
        yield server, waits
    finally:
        waits.may_go.set()
        server.close()


def bound(waits: Waits, *, inline_bytes_max: int, connections_max: int, desks: int) -> HttpServer:
    """A server on a free port that has not begun."""
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
