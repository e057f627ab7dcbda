"""A server with vLLM's render endpoints, over real HTTP: it answers what a test tells it to."""

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
    """What a test tells and learns.

    Attributes:
        answers: Path -> status and body.
        asked: Path and body of every request.
        go: Held back until set.
        address: Where it listens.
    """

    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, object]]] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)
    address: str = ""


@contextmanager
def running_renderer() -> Iterator[Renderer]:
    """A renderer that listens on a free port."""
    told = Renderer()
    told.go.set()

    class Handler(BaseHTTPRequestHandler):
        """Answers from what the test told."""

        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            """Reads, waits, answers."""
            body = self.rfile.read(int(self.headers["content-length"]))
            told.asked.append((self.path, json.loads(body)))
            told.go.wait(60)
            status, answer = told.answers[self.path]
            self.send_response(status)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    told.address = f"127.0.0.1:{server.server_port}"
    try:
        yield told
    finally:
        told.go.set()
        server.shutdown()
        server.server_close()
