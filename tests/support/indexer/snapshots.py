"""HTTP server of snapshots and of any other answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec


def body(sequence: int, *payloads: bytes, **fields: Any) -> bytes:
    """Return the body of a snapshot."""
    told = {"schema": 1, "boot_id": "b", "sequence": sequence, "block_size": 4, "blocks": len(payloads)}
    return msgspec.msgpack.encode({**told, "batches": list(payloads), **fields})


class SnapshotServer:
    """HTTP on a free port.

    Attributes:
        answer: Function from the request's number, from 0, to status and body. With a body of None the server
            sends nothing and waits until it is closed.
        asked: Number of requests so far.
        secrets: Authorization header of each request.
    """

    def __init__(self, answer: Callable[[int], tuple[int, bytes | None]]) -> None:
        self.answer = answer
        self.asked = 0
        self.secrets: list[str | None] = []
        self.closing = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                number, outer.asked = outer.asked, outer.asked + 1
                outer.secrets.append(self.headers.get("authorization"))
                status, data = outer.answer(number)
                self.send_response(status)
                self.send_header("content-length", str(1 << 40 if data is None else len(data)))
                self.end_headers()
                if data is None:
                    outer.closing.wait(60)
                else:
                    self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/kv_events/snapshot"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def __enter__(self) -> SnapshotServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
