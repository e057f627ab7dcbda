"""Paths and headers that clients can send through a real Envoy while no router rejects anything."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvroute.envoy_config import INFERENCE_PATHS, EnvoySettings, bootstrap
from router.doors.boundary import GATEWAY_ONLY_HEADERS
from tests.support.loopback import HERE, free_ports
from tests.support.router.envoy import running_envoy
from tests.support.router.paths import ADMINISTRATION, TRICKS, send

LISTENERS = ["gateway", "round_robin", "least_requests"]


@dataclass
class Edge:
    """An Envoy that fails open, its log, its three listeners, and the requests that reached its pods."""

    log: Path
    ports: tuple[int, int, int]
    reached: list[tuple[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    """Run an Envoy without a router, where requests reach a pod unseen: the weakest protection."""
    directory = tmp_path_factory.mktemp("edge")
    gateway, round_robin, least_requests, admin, nobody = free_ports(5)
    running = Edge(directory / "envoy.log", (gateway, round_robin, least_requests))
    with _pod(running) as pod:
        settings = EnvoySettings(
            gateway=(HERE, gateway),
            routers=[(HERE, nobody)],
            pods=[(HERE, pod)],
            round_robin=(HERE, round_robin),
            least_requests=(HERE, least_requests),
            failure_mode_allow=True,
        )
        with running_envoy(directory, bootstrap(settings), round_robin, admin):
            yield running


@pytest.mark.parametrize("listener", range(3), ids=LISTENERS)
def test_inference_paths_pass(edge: Edge, listener: int) -> None:
    """Every inference path reaches a pod with its own method, also with a query or unusual spelling."""
    for method, path in INFERENCE_PATHS:
        for target in (path, f"{path}?x=/../../metrics", f"/{path}"):
            edge.reached.clear()
            status, _ = send((HERE, edge.ports[listener]), method.encode(), target.encode())
            assert status == 200, (method, target)
            assert [(method, path)] == [(sent, at.partition("?")[0]) for sent, at in edge.reached]


@pytest.mark.parametrize("listener", range(3), ids=LISTENERS)
def test_administration_is_an_openai_404(edge: Edge, listener: int) -> None:
    """Envoy rejects other paths itself with 404 in OpenAI's format; no pod receives them."""
    edge.reached.clear()
    for method, path in ADMINISTRATION:
        status, body = send((HERE, edge.ports[listener]), method.encode(), path.encode())
        assert (status, json.loads(body)["error"]["code"]) == (404, 404), (method, path)
    assert edge.reached == []


@pytest.mark.parametrize("listener", range(3), ids=LISTENERS)
@pytest.mark.parametrize("method", [b"GET", b"POST"])
def test_no_spelling_reaches_another_path(edge: Edge, listener: int, method: bytes) -> None:
    """Whatever the request line, a pod receives only paths of the list in their plain spelling."""
    edge.reached.clear()
    for target in TRICKS:
        send((HERE, edge.ports[listener]), method, target)
    for name in (b"x-envoy-original-path", b"x-original-url", b"x-rewrite-url", b"x-forwarded-path"):
        send((HERE, edge.ports[listener]), method, b"/", b"%b: /v1/completions\r\n" % name)
    assert {(sent, at.partition("?")[0]) for sent, at in edge.reached} <= set(INFERENCE_PATHS)


@pytest.mark.parametrize("listener", range(3), ids=LISTENERS)
def test_gateway_only_headers_do_not_pass(edge: Edge, listener: int) -> None:
    """A client can set neither pod nor rank nor a host to which an engine connects."""
    edge.headers.clear()
    forged = "".join(f"{name.title()}: 127.0.0.1:1\r\n" for name in GATEWAY_ONLY_HEADERS)
    status, _ = send(
        (HERE, edge.ports[listener]), b"POST", b"/v1/completions", f"{forged}Hi: mom\r\n".encode()
    )
    assert status == 200
    (seen,) = edge.headers
    assert seen["hi"] == "mom"
    assert not seen.keys() & set(GATEWAY_ONLY_HEADERS)


def test_envoy_finds_nothing_deprecated(edge: Edge) -> None:
    """The configuration has no field that Envoy reports as deprecated."""
    assert "deprecated" not in edge.log.read_text().lower()


@contextmanager
def _pod(edge: Edge) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            edge.reached.append((self.command, self.path))
            edge.headers.append({name.lower(): value for name, value in self.headers.items()})
            self.send_response(200)
            self.send_header("content-length", "0")
            self.send_header("connection", "close")
            self.end_headers()
            self.close_connection = True

        do_GET = do_POST = do_DELETE = answer  # noqa: N815 (the names are the library's)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer((HERE, 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
