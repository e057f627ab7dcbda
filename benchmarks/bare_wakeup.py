"""Floor of the streaming benchmark without an HTTP server: one loop wake-up and one socket write per chunk.

A request of `benchmarks.stream_client` gets max_tokens chunks. Each is written by a callback that another
thread schedules on the loop: no task, no parser, no ASGI.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from socket import socket

from benchmarks.bare_stream import CHUNK, END, Ticker

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_FRAMED = b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK)
_FRAMED_END = b"%x\r\n%b\r\n0\r\n\r\n" % (len(END), END)


class BareWakeup:
    """Server with a thread in place of an engine.

    Args:
        loop: Event loop that serves the connections.
        step_s: Seconds from one chunk to the next.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, step_s: float) -> None:
        self._loop = loop
        self._step_s = step_s
        self._streams: dict[_Stream, None] = {}
        self._stopping = asyncio.Event()

    async def serve(self, listener: socket, on_ready: Callable[[], None]) -> None:
        """Answer requests until `stop`."""
        async with await self._loop.create_server(lambda: _Stream(self._streams), sock=listener):
            on_ready()
            with Ticker(self._loop, self._step_s, self._streams, self._write_all):
                await self._stopping.wait()

    def stop(self) -> None:
        """Stop `serve`; call it on the loop."""
        self._stopping.set()

    def _write_all(self) -> None:
        for stream in list(self._streams):
            stream.write_next()


class _Stream(asyncio.Protocol):
    """One connection with one request."""

    def __init__(self, streams: dict[_Stream, None]) -> None:
        self._streams = streams
        self._received = b""
        self._left = 0

    def connection_made(self, transport: asyncio.WriteTransport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        _, _, body = self._received.partition(b"\r\n\r\n")
        if body.endswith(b"}"):  # a body this short arrives in one read
            self._left = json.loads(body)["max_tokens"]
            self._transport.write(_HEAD)
            self._streams[self] = None

    def write_next(self) -> None:
        if self._left:
            self._left -= 1
            self._transport.write(_FRAMED)
        else:
            del self._streams[self]
            self._transport.write(_FRAMED_END)
