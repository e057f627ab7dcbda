"""Model server for tests: engine, ZMQ and HTTP in a thread of the test's process."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import urllib3
import uvloop
import zmq
from openai import OpenAI

from model_server.cli import main
from model_server.config import EngineConfig
from model_server.engine.build import build_engine
from model_server.engine.core import EngineCore
from model_server.kv_events.publisher import KVEventsConfig, ZmqEventPublisher
from model_server.openai.api_server import ServeOptions, load_tokenizer, reserve
from model_server.openai.app import Server
from tokenization import PromptTokenizer
from tokenization.prompts import chat_prompt

MODEL = "kvroute-tiny"
DEADLINE_S = 300.0
MAX_BODY_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class RunningServer:
    """Running server."""

    url: str
    admin_url: str
    engine: EngineCore
    publisher: ZmqEventPublisher
    tokenizer: PromptTokenizer
    http: urllib3.PoolManager

    def openai(self, **settings: Any) -> OpenAI:
        """Return an OpenAI client."""
        return OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, **{"timeout": 60.0, **settings}
        )

    def chat_ids(self, messages: list[Any]) -> list[int]:
        """Return the expected token ids of a chat."""
        return chat_prompt({"messages": messages}, self.tokenizer).tolist()

    def get(self, path: str) -> urllib3.BaseHTTPResponse:
        """Send a GET request."""
        return self.http.request("GET", self.url + path)

    def admin(self, method: str, path: str, body: object = None, **options: Any) -> urllib3.BaseHTTPResponse:
        """Send a request to the administration port; a body is sent as JSON."""
        raw = None if body is None else msgspec.json.encode(body)
        return self.http.request(method, self.admin_url + path, body=raw, **options)

    def post(self, path: str, body: object, **options: Any) -> urllib3.BaseHTTPResponse:
        """Send a POST request; bytes are sent unchanged, everything else as JSON."""
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return self.http.request("POST", self.url + path, body=raw, **options)

    def metric(self, name: str) -> float:
        """Return the sum of a metric's samples."""
        lines = [
            line for line in self.get("/metrics").data.decode().splitlines() if line.startswith(name + "{")
        ]
        assert lines, f"no metric {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def idle(self) -> bool:
        """Return whether no request has a block."""
        stats = self.engine.stats()
        return (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)


@contextmanager
def running_server(
    *,
    max_body_bytes: int = MAX_BODY_BYTES,
    api_key: str | None = None,
    admin_token: str | None = None,
    runtime_loras: bool = False,
    **engine: Any,
) -> Iterator[RunningServer]:
    """Run a server on free ports; stop it at the end as a signal would."""
    options = ServeOptions(
        engine=EngineConfig(**{"torch_threads": 1, **engine}),
        host="127.0.0.1",
        port=0,
        served_names=(MODEL, "alias"),
        events=None,
        max_body_bytes=max_body_bytes,
        api_key=api_key,
        admin_token=admin_token,
        runtime_loras=runtime_loras,
    )
    tokenizer = load_tokenizer(MODEL)
    publisher = ZmqEventPublisher(KVEventsConfig("tcp://*:0", "tcp://127.0.0.1:0", topic="kv@test"))
    publisher.start()
    built = build_engine(options.engine, publisher.publish)
    built.start()
    with (
        reserve("127.0.0.1", 0) as listener,
        reserve("127.0.0.1", 0) as admin,
        urllib3.PoolManager(maxsize=16, timeout=DEADLINE_S) as http,
    ):
        url, admin_url = (f"http://127.0.0.1:{taken.getsockname()[1]}" for taken in (listener, admin))
        server = Server(options, built, publisher, tokenizer)
        ready = threading.Event()
        loops: list[asyncio.AbstractEventLoop] = []

        async def serve() -> None:
            loops.append(asyncio.get_running_loop())
            await server.serve(listener, ready.set, admin)

        def work() -> None:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve())

        thread = threading.Thread(target=work, name="test-server")
        thread.start()
        try:
            assert ready.wait(DEADLINE_S)
            yield RunningServer(url, admin_url, built, publisher, tokenizer, http)
        finally:
            loops[0].call_soon_threadsafe(server.stop)
            thread.join(DEADLINE_S)
            built.close()
            publisher.close()
    assert not thread.is_alive()


@contextmanager
def subscription(server: RunningServer) -> Iterator[zmq.Socket[bytes]]:
    """Return a replay client of the server's events."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.rcvtimeo = int(DEADLINE_S * 1000)
        client.connect(server.publisher.config.replay_endpoint or "")
        yield client


def exit_code(*flags: str) -> int:
    """Run a command line that fails at start, in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return main(flags)
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def wait_until(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Wait, with a generous deadline, until a condition is true."""
    pause = threading.Event()
    for _ in range(int(deadline_s / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("the condition never held")
