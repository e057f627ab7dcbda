"""The pages for people and Prometheus over plain HTTP: a registry and callables by path in, a server out.

Serves few at a time and closes on whoever comes beyond that; knows nothing of what they show, nor who may see
it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from socket import AF_INET, AF_INET6, socket
from ssl import SSLContext
from threading import BoundedSemaphore, Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from router.errors import ListenError

_log = logging.getLogger(__name__)

_SERVED_AT_ONCE = 8
_IDLE_S = 5.0
_JSON = "application/json"
# Probes bring no token.
_OPEN_TO_ALL = ("/healthz", "/ready")

Query = Mapping[str, str]
Page = Callable[[Query], tuple[int, Any]]
Authorize = Callable[[str, str | None], int | None]
"""A path and the Authorization header in; a status to refuse with, or None, out."""


class DebugServer:
    """An HTTP server on its own threads.

    Args:
        pages: By path: given the query, a status and a value that is answered as JSON, or as text if it is
            text.
        tls: Gives the context for a new connection; None: plaintext.
        authorize: Says who may see a page; None: everybody. Whether the process lives may be asked by all.

    Raises:
        ListenError: The address is in use.
    """

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        pages: Mapping[str, Page],
        *,
        tls: Callable[[], SSLContext] | None = None,
        authorize: Authorize | None = None,
    ) -> None:
        served = {
            "registry": registry,
            "pages": dict(pages),
            "authorize": staticmethod(authorize or _everybody),
        }
        handler = type("Handler", (_Handler,), served)
        try:
            self._server = _PooledServer((host, port), handler, tls)
        except OSError as error:
            raise ListenError(f"--metrics-port {port}: cannot listen on {host}:{port}: {error}") from error
        self._thread = Thread(target=self._server.serve_forever, name="debug-http", daemon=True)

    @property
    def port(self) -> int:
        """The port listened on."""
        return self._server.server_address[1]

    def start(self) -> None:
        """Begins to serve."""
        self._thread.start()

    def close(self) -> None:
        """Ends serving and frees the port."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


def _everybody(_path: str, _authorization: str | None) -> int | None:
    return None


class _PooledServer(HTTPServer):
    request_queue_size = 16

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[BaseHTTPRequestHandler],
        tls: Callable[[], SSLContext] | None,
    ) -> None:
        self.address_family = AF_INET6 if ":" in address[0] else AF_INET
        super().__init__(address, handler)
        self._tls = tls
        self._pool = ThreadPoolExecutor(_SERVED_AT_ONCE, thread_name_prefix="debug-http")
        self._slots = BoundedSemaphore(_SERVED_AT_ONCE)

    def process_request(self, request: socket, client_address: Any) -> None:  # type: ignore[override]
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        self._pool.submit(self._serve, request, client_address)

    def server_close(self) -> None:
        super().server_close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _serve(self, request: socket, client_address: Any) -> None:
        try:
            if self._tls is not None:
                # Here, not where connections are taken: a handshake waits for its client.
                request.settimeout(_IDLE_S)
                request = self._tls().wrap_socket(request, server_side=True)
            self.finish_request(request, client_address)
        except OSError:
            pass  # the client went away, or showed no certificate
        except Exception:
            _log.exception("a debug page failed")
        finally:
            self.shutdown_request(request)
            self._slots.release()


class _Handler(BaseHTTPRequestHandler):
    registry: CollectorRegistry
    pages: Mapping[str, Page]
    authorize: Authorize
    timeout = _IDLE_S
    server_version = "kvroute"
    sys_version = ""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        refusal = self.authorize(url.path, self.headers.get("Authorization"))
        if refusal is not None and url.path not in _OPEN_TO_ALL:
            self._answer(refusal, msgspec.json.encode({"error": "not allowed"}), _JSON)
            return
        if url.path == "/metrics":
            self._answer(200, generate_latest(self.registry), CONTENT_TYPE_LATEST)
            return
        status, value = self._page(url.path, url.query)
        if isinstance(value, str):
            self._answer(status, value.encode("utf-8", "replace"), "text/plain; charset=utf-8")
        else:
            self._answer(status, msgspec.json.encode(value), _JSON)

    def log_message(self, format: str, *args: Any) -> None:
        """Access to these pages is nobody's news."""

    def _page(self, path: str, query: str) -> tuple[int, Any]:
        page = self.pages.get(path)
        if page is None:
            return 404, {"error": f"no such page; there are /metrics, {', '.join(self.pages)}"}
        return page({name: values[-1] for name, values in parse_qs(query).items()})

    def _answer(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
