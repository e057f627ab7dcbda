"""A server that streams a constant chunk a step, woken by another thread: what any stream costs in uvicorn.

In: chat completions that stream, of which only max_tokens counts. Out: that many chunks, written alone. It
has neither router nor engine nor JSON to make; the HTTP server is the model server's own.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from socket import socket

from starlette.types import Receive, Scope, Send

from model_server.serve import _Uvicorn

_CHUNK = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"kvroute-tiny","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,'
    b'"finish_reason":null,"stop_reason":null}]}\n\n'
)


class BareStream:
    """The ASGI application, and the thread that stands for an engine.

    Args:
        loop: Where it is served.
        step_s: Seconds from one chunk to the next.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, step_s: float) -> None:
        self._loop = loop
        self._step_s = step_s
        self._waiting: list[asyncio.Future[None]] = []
        self._stopping = False
        self._server: _Uvicorn | None = None

    async def serve(self, listener: socket, on_ready: Callable[[], None]) -> None:
        """Answer requests until `stop`."""
        self._server = _Uvicorn(self, on_ready, lambda: True)
        ticker = threading.Thread(target=self._tick)
        ticker.start()
        try:
            await self._server.serve(sockets=[listener])
        finally:
            self._stopping = True
            await self._loop.run_in_executor(None, ticker.join)

    def stop(self) -> None:
        """End `serve`; called on the loop."""
        assert self._server is not None
        self._server.should_exit = True

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Stream; the ASGI interface."""
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
            await send({"type": "http.response.body", "body": _CHUNK, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    def _tick(self) -> None:
        while not self._stopping:
            time.sleep(self._step_s)
            if self._waiting:
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for woken in waiting:
            if not woken.done():
                woken.set_result(None)
