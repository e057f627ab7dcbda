"""Floor of the streaming benchmark: a uvicorn server that streams constant chunks, woken by another thread.

A streamed chat completion gets max_tokens chunks, each in a write of its own. There is no router, engine or
JSON encoding; the HTTP server is the model server's own.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sized
from socket import socket

from starlette.types import Receive, Scope, Send

from model_server.openai.http_server import HttpServer

CHUNK = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"kvroute-tiny","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,'
    b'"finish_reason":null,"stop_reason":null}]}\n\n'
)
END = b"data: [DONE]\n\n"


class BareStream:
    """ASGI application with a thread in place of an engine.

    Args:
        loop: Event loop that serves the application.
        step_s: Seconds from one chunk to the next.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, step_s: float) -> None:
        self._loop = loop
        self._step_s = step_s
        self._waiting: list[asyncio.Future[None]] = []
        self._server: HttpServer | None = None

    async def serve(self, listener: socket, on_ready: Callable[[], None]) -> None:
        """Answer requests until `stop`."""
        self._server = HttpServer(self, on_ready, lambda: True)
        with Ticker(self._loop, self._step_s, self._waiting, self._wake):
            await self._server.serve(sockets=[listener])

    def stop(self) -> None:
        """Stop `serve`; call it on the loop."""
        assert self._server is not None
        self._server.stop()

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Stream constant chunks; the ASGI interface."""
        body = b""
        while True:
            message = await receive()
            body += message["body"]
            if not message["more_body"]:
                break
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(json.loads(body)["max_tokens"]):
            woken = self._loop.create_future()
            self._waiting.append(woken)
            await woken
            await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
        await send({"type": "http.response.body", "body": END, "more_body": False})

    def _wake(self) -> None:
        waiting = self._waiting.copy()
        self._waiting.clear()
        for woken in waiting:
            if not woken.done():
                woken.set_result(None)


class Ticker:
    """Thread that schedules a callback on an event loop at every step while a request waits.

    Args:
        loop: The event loop.
        step_s: Seconds from one call to the next.
        waiting: Requests that wait for chunks.
        call: Callback to schedule.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, step_s: float, waiting: Sized, call: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._step_s = step_s
        self._waiting = waiting
        self._call = call
        self._stopping = False
        self._thread = threading.Thread(target=self._tick)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._thread.join()

    def _tick(self) -> None:
        while not self._stopping:
            time.sleep(self._step_s)
            if self._waiting:
                self._loop.call_soon_threadsafe(self._call)
