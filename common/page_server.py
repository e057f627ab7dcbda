"""HTTP/1.1 server for small pages such as /metrics, with bounded connections.

One event loop on its own thread serves all connections, so idle and slow clients delay nobody. A connection
serves one request, bounded in size and time: GET or HEAD, unless further methods are named. The body of a
response may be a stream, such as server-sent events: a client that does not take it in time is disconnected.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from http import HTTPStatus
from ssl import SSLContext
from threading import Thread
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import httptools

from common.repeated_log import RepeatedLog

_log = logging.getLogger(__name__)

CONNECTIONS_MAX = 512
_ACCEPTED_AT_ONCE = 16
_RETRY_S = 1.0
# A bearer token of a cluster is at most 16 KiB.
_HEAD_BYTES_MAX = 24 << 10
# Large bodies are read a few at a time, since clients may send them before they are authorized.
_BODY_BYTES_MAX, _LARGE_BYTES, _LARGE_BODIES_MAX = 1 << 20, 64 << 10, 4
_HEAD_S, _SEND_S = 5.0, 10.0
_SENDING_MAX = 16
STREAMS_MAX = 8
# Bytes that a stream's client has not taken yet; one part more is outside of this limit.
_STREAM_BYTES_MAX = 256 << 10
_THREADS, _WAITING_MAX = 8, 64
_TEXT = "text/plain; charset=utf-8"

_T = TypeVar("_T")
_Connection = asyncio.Task[None]


@dataclass(frozen=True, slots=True)
class Response:
    """HTTP response."""

    status: int
    # A generator's parts are sent as they come, to at most STREAMS_MAX clients at once.
    body: bytes | AsyncGenerator[bytes, None]
    content_type: str = _TEXT
    headers: Mapping[str, str] = field(default_factory=dict)  # besides those of every response


@dataclass(frozen=True, slots=True)
class Request:
    """Request. Header names are in lower case."""

    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    method: str = "GET"
    body: bytes = b""


class BusyError(Exception):
    """The queue of a `BoundedExecutor` is full; the server answers 503."""


class BoundedExecutor:
    """Thread pool with a bounded queue, for one kind of blocking work."""

    def __init__(self, name: str) -> None:
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=name)
        self._waiting = 0

    async def run(self, work: Callable[[], _T]) -> _T:
        """Run `work` on a thread of the pool.

        Raises:
            BusyError: The queue is full.
        """
        if self._waiting >= _WAITING_MAX:
            raise BusyError
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.threads, work)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        self.threads.shutdown(wait=True, cancel_futures=True)


@dataclass(eq=False)
class PageServer:
    """HTTP server that accepts connections after `start`."""

    listener: socket.socket  # closed by the server
    # Coroutine that answers a request, on the event loop: run blocking work in a `BoundedExecutor`.
    answer: Callable[[Request], Awaitable[Response]]
    tls: Callable[[], SSLContext] | None = None  # returns the context of a new connection; None: plaintext
    methods: Collection[str] = ()  # besides GET and HEAD; requests of these may have a body

    def __post_init__(self) -> None:
        self.listener.setblocking(False)
        self.port: int = self.listener.getsockname()[1]
        self._connections: set[_Connection] = set()
        # Oldest first: connections with an incomplete request, and connections that receive a response.
        self._asking: dict[_Connection, None] = {}
        self._sending: dict[_Connection, None] = {}
        self._streams = 0
        self._failures = RepeatedLog(_log)
        self._large = asyncio.Semaphore(_LARGE_BODIES_MAX)
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._run, name="pages", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the server and free the port. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self.listener.close()
        self._loop.close()

    def _run(self) -> None:
        # Connection errors outside of `_serve` are caused by clients.
        self._loop.set_exception_handler(lambda _loop, context: _log.debug("%s", context))
        self._loop.add_reader(self.listener, self._accept)
        self._loop.run_forever()
        self._loop.remove_reader(self.listener)
        # A task that is cancelled before its first turn would leave its socket open.
        self._loop.run_until_complete(asyncio.sleep(0))
        for connection in self._connections:
            connection.cancel()
        if self._connections:
            self._loop.run_until_complete(asyncio.wait(set(self._connections)))
        # Sockets are closed in the turn of the loop after their connection's end.
        self._loop.run_until_complete(asyncio.sleep(0))

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, _ = self.listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                # For example, no free file descriptor. Waiting clients are served once there is one again.
                self._failures.event(
                    "accept_failed", "accept", "accept failed: port=%d error=%s", self.port, error
                )
                self._loop.remove_reader(self.listener)
                self._loop.call_later(_RETRY_S, self._loop.add_reader, self.listener, self._accept)
                return
            if len(self._connections) >= CONNECTIONS_MAX and not _cut_oldest(self._asking):
                accepted.close()
                continue
            accepted.setblocking(False)
            connection = self._loop.create_task(self._serve(accepted))
            self._connections.add(connection)
            self._asking[connection] = None
            connection.add_done_callback(self._forget)

    def _forget(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        self._asking.pop(connection, None)
        self._sending.pop(connection, None)

    async def _serve(self, accepted: socket.socket) -> None:
        connection: Any = asyncio.current_task()
        reader = asyncio.StreamReader(_HEAD_BYTES_MAX)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport: Any = None
        # The client disconnected, is too slow, or has no certificate.
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            try:
                async with asyncio.timeout(_HEAD_S):
                    transport, _ = await self._loop.connect_accepted_socket(
                        lambda: protocol, accepted, ssl=self.tls and self.tls()
                    )
                    request = await self._read(reader)
                self._asking.pop(connection, None)
                response = await self._respond(request)
                writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
                if not isinstance(response.body, bytes):
                    await self._stream(writer, request, response, response.body)
                    return
                if len(self._sending) >= _SENDING_MAX:
                    _cut_oldest(self._sending)
                self._sending[connection] = None
                async with asyncio.timeout(_SEND_S):
                    writer.write(_head(response, len(response.body)))
                    if not request.is_head:
                        writer.write(response.body)
                    writer.close()
                    await writer.wait_closed()
            finally:
                if transport is None:
                    accepted.close()
                else:
                    transport.abort()

    async def _read(self, reader: asyncio.StreamReader) -> _Reading:
        try:
            read = _Reading(await reader.readuntil(b"\r\n\r\n"), self.methods)
            async with self._large if read.body_bytes > _LARGE_BYTES else nullcontext():
                read.request = replace(read.request, body=await reader.readexactly(read.body_bytes))
            return read
        except asyncio.LimitOverrunError:
            too_large = _Reading(b"")
            too_large.error = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            return too_large

    async def _respond(self, read: _Reading) -> Response:
        if read.error is not None:
            return _error(read.error)
        try:
            response = await self.answer(read.request)
        except BusyError:
            return _error(HTTPStatus.SERVICE_UNAVAILABLE)
        except Exception as error:
            self._failed(read, error)
            return _error(HTTPStatus.INTERNAL_SERVER_ERROR)
        if isinstance(response.body, bytes) or self._streams < STREAMS_MAX:
            return response
        return Response(HTTPStatus.SERVICE_UNAVAILABLE, f"already {STREAMS_MAX} streams are open\n".encode())

    async def _stream(
        self,
        writer: asyncio.StreamWriter,
        read: _Reading,
        response: Response,
        parts: AsyncGenerator[bytes, None],
    ) -> None:
        """Send a response of unknown length; its end is that of the connection.

        Raises:
            TimeoutError: The client takes too long to receive a part.
        """
        writer.transport.set_write_buffer_limits(_STREAM_BYTES_MAX)
        writer.write(_head(response, None))
        self._streams += 1
        try:
            async with aclosing(parts):
                if not read.is_head:
                    async for part in parts:
                        writer.write(part)
                        async with asyncio.timeout(_SEND_S):
                            await writer.drain()
        except OSError:
            raise
        except Exception as error:
            # The head has been sent: only the end of the connection can tell the client.
            self._failed(read, error)
        finally:
            self._streams -= 1
        async with asyncio.timeout(_SEND_S):
            writer.close()
            await writer.wait_closed()

    def _failed(self, read: _Reading, error: Exception) -> None:
        path = read.request.path[:100]
        self._failures.event(
            "page_failed", path, "page failed: path=%s", path, level=logging.ERROR, error=error
        )


class _Reading:
    def __init__(self, head: bytes, methods: Collection[str] = ()) -> None:
        self.request = Request("", {}, {})
        self.error: HTTPStatus | None = None
        self._url = b""
        self._headers: dict[str, str] = {}
        self._is_whole = False
        parser = httptools.HttpRequestParser(self)
        try:
            # Ignore an offer to upgrade the protocol.
            with suppress(httptools.HttpParserUpgrade):
                parser.feed_data(head)
            url = urlsplit(self._url.decode("latin-1"))
            query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        except (httptools.HttpParserError, ValueError):
            self.error = HTTPStatus.BAD_REQUEST
            return
        method = parser.get_method().decode("latin-1")
        self.is_head = method == "HEAD"
        self.request = Request(url.path, query, self._headers, method)
        if method in methods:
            length = self._headers.get("content-length", "0")
            if not length.isdecimal() or len(length) > 9 or int(length) > _BODY_BYTES_MAX:
                self.error = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
            else:
                self.body_bytes = int(length)
        elif method not in ("GET", "HEAD"):
            self.error = HTTPStatus.METHOD_NOT_ALLOWED
        elif not self._is_whole:
            self.error = HTTPStatus.BAD_REQUEST

    is_head, body_bytes = False, 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_message_complete(self) -> None:
        self._is_whole = True


def _error(status: HTTPStatus) -> Response:
    return Response(status, f"{status.phrase}\n".encode())


def _head(response: Response, length: int | None) -> bytes:
    headers = {"Content-Type": response.content_type, **response.headers}
    if length is not None:
        headers["Content-Length"] = str(length)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return (
        f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}\r\n"
        f"Server: kvroute\r\nDate: {formatdate(usegmt=True)}\r\nConnection: close\r\n{lines}\r\n"
    ).encode("latin-1")


def _cut_oldest(connections: dict[_Connection, None]) -> bool:
    oldest = next(iter(connections), None)
    if oldest is None:
        return False
    del connections[oldest]
    oldest.cancel()
    return True
