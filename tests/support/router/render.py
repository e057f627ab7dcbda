"""HTTP server with vLLM's render endpoints, whose responses a test sets."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CHAT = "/v1/chat/completions/render"
COMPLETIONS = "/v1/completions/render"
RESPONSES = "/v1/responses/render"
MESSAGES = "/v1/messages/render"


@dataclass
class Renderer:
    """Responses of the server, and the requests that it received.

    Attributes:
        answers: Status and body of the response, by path.
        asked: Path and body of every request.
        go: Event that responses wait for.
        address: "host:port" of the server.
    """

    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, object]]] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)
    address: str = ""


@contextmanager
def running_renderer() -> Iterator[Renderer]:
    """Run a server on a free port."""
    renderer = Renderer()
    renderer.go.set()

    class Handler(BaseHTTPRequestHandler):
        """Handler that sends the responses of the test."""

        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            """Record the request and respond once `go` is set."""
            body = self.rfile.read(int(self.headers["content-length"]))
            renderer.asked.append((self.path, json.loads(body)))
            renderer.go.wait(60)
            status, answer = renderer.answers[self.path]
            self.send_response(status)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    renderer.address = f"127.0.0.1:{server.server_port}"
    try:
        yield renderer
    finally:
        renderer.go.set()
        server.shutdown()
        server.server_close()
