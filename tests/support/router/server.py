"""A whole router in this process, over small fake pods that can stop and return on their port."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import urllib3

from indexer import IndexerConfig
from indexer.pod_entry import pod_address
from router.app.config import RouterConfig
from router.app.server import RouterServer
from tests.support.loopback import HERE, free_port

STREAM_PIECE_BYTES = 700
CUT = b"event: cut"
METRICS = """vllm:num_requests_waiting{engine="0"} 0.0
vllm:num_requests_running{engine="0"} 0.0
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0
"""


class FakePod:
    """HTTP side of a model server: health, models, metrics, and an echo of posted bodies.

    Attributes:
        healthy: Whether /health reports success.
        may_answer: While cleared, no response is sent.
        may_finish: While cleared, responses to POSTs are started and not completed.
        metrics: Content of the metrics page.
        metrics_path: Path of the metrics page.
        pages: Number of requests for the metrics page.
        host: Address to listen on.
        models: Ids on /v1/models, as (id, parent).
        sources: Content of /kv_event_sources; None: 404.
        seen: Headers of the posted requests.
        bodies: Bodies of the posted requests.
        paths: Paths of the posted requests.
        ended: Number of connections closed after a request was posted on them.
        status: Status of responses to POSTs that are not streamed.
        answer: Response to a POST; sent as events in pieces if the request asks for a stream. One that begins
            like gzip is sent as such, and a stream that ends with `CUT` breaks off.
        answer_of: Returns the response to a POST by its body; None: `answer`.
    """

    def __init__(self, port: int | None = None, host: str = HERE) -> None:
        self.host = host
        self.healthy = True
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.may_finish = threading.Event()
        self.may_finish.set()
        self.metrics = METRICS
        self.metrics_path = "/metrics"
        self.pages = 0
        self.models: list[tuple[str, str | None]] = [("kvroute-tiny", None)]
        self.seen: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.paths: list[str] = []
        self.ended = 0
        self.status = 200
        self.answer = b'{"ok": true}'
        self.answer_of: Callable[[bytes], bytes] | None = None
        self.sources: dict[str, dict[str, Any]] | None = None
        # A stopped pod must be able to bind its port again.
        self._server = self._start(free_port() if port is None else port)

    @property
    def port(self) -> int:
        """The port, which stays the same after a restart."""
        return int(self._server.server_address[1])

    @property
    def address(self) -> str:
        """The pod's address."""
        return pod_address(self.host, self.port)

    def stop(self) -> None:
        """Stop the pod: close its port."""
        self.may_answer.set()
        self.may_finish.set()
        self._server.shutdown()
        self._server.server_close()

    def restart(self) -> None:
        """Start the pod again on its port."""
        self._server = self._start(self.port)

    def page(self, path: str) -> tuple[int, bytes]:
        """Return the response to a GET."""
        if path == "/health":
            return (200 if self.healthy else 503), b""
        if path == "/v1/models":
            cards = [{"id": name, "parent": parent, "max_model_len": 4096} for name, parent in self.models]
            return 200, json.dumps({"data": cards}).encode()
        if path == self.metrics_path:
            self.pages += 1
            return 200, self.metrics.encode()
        if path == "/kv_event_sources" and self.sources is not None:
            return 200, json.dumps(self.sources).encode()
        return 404, b""

    def _start(self, port: int) -> ThreadingHTTPServer:
        server = (_Ipv6Server if ":" in self.host else _Server)((self.host, port), _handler(self))
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return server


@contextmanager
def fake_pods(count: int, host: str = HERE) -> Iterator[list[FakePod]]:
    """Run this many fake pods."""
    pods = [FakePod(host=host) for _ in range(count)]
    try:
        yield pods
    finally:
        for pod in pods:
            pod.stop()


def write_pods(path: Path, addresses: Sequence[str], **labels: str) -> Path:
    """Write a pods file, each pod with these labels."""
    endpoints = []
    for number, address in enumerate(addresses):
        host, _, port = address.rpartition(":")
        endpoints.append(
            {"name": f"pod-{number}", "address": host.strip("[]"), "port": port, "labels": labels}
        )
    path.write_text(json.dumps({"endpoints": endpoints}), encoding="utf-8")
    return path


@contextmanager
def running_router(pods_file: Path | None, **settings: Any) -> Iterator[RouterServer]:
    """Run a router on free ports; without a pods file the settings must configure discovery."""
    ports = dict.fromkeys(("grpc_port", "grpc_health_port", "metrics_port"), 0)
    # The pods publish no events, so nothing is waited for.
    quick: dict[str, Any] = {
        "refresh_interval_s": 0.1,
        "sync_timeout_s": 1.0,
        "index": IndexerConfig(bootstrap_s=1.0),
    }
    config = RouterConfig(pods_file=pods_file, host="127.0.0.1", **{**ports, **quick, **settings})
    router = RouterServer(config)
    try:
        router.start()
        yield router
    finally:
        router.close()


def get(router: RouterServer, path: str) -> tuple[int, bytes]:
    """Get a debug page."""
    response = urllib3.request("GET", f"http://127.0.0.1:{router.ports['metrics']}{path}", retries=False)
    return response.status, response.data


def ready_pods(router: RouterServer) -> set[str]:
    """Return the addresses of ready pods."""
    return {pod.address for pod in router.pods.current.values() if pod.ready}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of clients that disconnect, which tests do on purpose."""


class _Ipv6Server(_Server):
    address_family = socket.AF_INET6


def _handler(pod: FakePod) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        posted = False
        body = b""

        def do_GET(self) -> None:
            pod.may_answer.wait()
            self._answer(*pod.page(self.path))

        def do_POST(self) -> None:
            self.posted = True
            self.body = self._body()
            pod.bodies.append(self.body)
            pod.paths.append(self.path)
            pod.seen.append({name.lower(): value for name, value in self.headers.items()})
            if b'"stream": true' in self.body or not pod.may_finish.is_set():
                self._stream(self._reply())
            else:
                self._answer(pod.status, self._reply())

        def _reply(self) -> bytes:
            return pod.answer if pod.answer_of is None else pod.answer_of(self.body)

        def _stream(self, data: bytes) -> None:
            self.send_response(200)
            self.send_header("transfer-encoding", "chunked")
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            for start in range(0, len(data), STREAM_PIECE_BYTES):
                piece = data[start : start + STREAM_PIECE_BYTES]
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                pod.may_finish.wait()
            if not data.endswith(CUT):
                self.wfile.write(b"0\r\n\r\n")
            self.close_connection = True

        def _body(self) -> bytes:
            if self.headers.get("transfer-encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("content-length", 0)))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size + 2)[:-2]
            self.rfile.readline()
            return body

        def finish(self) -> None:
            super().finish()
            pod.ended += self.posted

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

        def _answer(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.send_header("content-type", "application/json")
            if data.startswith(b"\x1f\x8b"):
                self.send_header("content-encoding", "gzip")
            # Persistent connections would outlive the fake pod's stop.
            self.send_header("connection", "close")
            self.end_headers()
            self.wfile.write(data)
            self.close_connection = True

    return Handler
