"""HTTP below the API: uvicorn with caps on heads and bodies, bearer secrets, streams, its life until a stop.

What is not HTTP, or lacks its secret, is answered in the shape of the API's other errors. Signals are left to
the caller.
"""

import asyncio
import hmac
import logging
import signal
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import uvicorn
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from model_server.errors import StartError
from model_server.openai.types import ApiError

HEAD_BYTES_MAX = 256 << 10
# After a refusal this much more is read and thrown away, so that a client still sending can read the answer.
_DISCARD_BYTES_MAX = 64 << 20
_DISCARD_TIMEOUT_S = 5.0
_DIRECT = "kvroute.direct"  # ASGI extension: the connection's protocol, to write chunks of a body with
logger = logging.getLogger(__name__)
# After `stop`, running requests get this long to finish before they are ended.
GRACE_S = 2.0
_ABORT_S = 1
# Longer than common proxies keep idle connections, so that it is they who close them.
KEEP_ALIVE_S = 120
_BACKLOG = 2048
_LOOK_S = 1.0  # also how often answers get a new date

_T = TypeVar("_T")


class ModelServerProtocol(HttpToolsProtocol):
    """Ends a connection whose request head does not end; uvicorn alone would wait for it for ever."""

    _head_bytes = 0
    _head_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first head is awaited from here on; later ones from their first byte."""
        super().connection_made(transport)
        self._open_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._close_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came; it counts only if the head is still open after it."""
        super().data_received(data)
        if self._head_deadline is not None:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
                self.send_400_response("the request's headers are too large")

    def on_message_begin(self) -> None:
        """The parser's callback: a head begins."""
        self._open_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The parser's callback: what follows is the body, which has its own caps."""
        self._close_head()
        super().on_headers_complete()
        self.scope["extensions"] = {_DIRECT: {"protocol": self}}

    @property
    def writable(self) -> bool:
        """Whether the client is there and keeps up; if not, ASGI's `send` waits until it does."""
        return not (self.flow.write_paused or self.transport.is_closing())

    def write_chunk(self, chunk: bytes) -> None:
        """Write a chunk, not empty, of a body whose head was sent by ASGI and whose end will be.

        To be called on the loop while it is writable and no `send` runs. ASGI's `send` is awaited, by a task
        that must be woken first; that costs more than the write.
        """
        self.transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be parsed, and hang up."""
        body = ApiError(400, msg).body()
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        self.transport.close()

    def _open_head(self) -> None:
        if self._head_deadline is None:
            self._head_bytes = 0
            self._head_deadline = self.loop.call_later(self.timeout_keep_alive, self.transport.close)

    def _close_head(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None


class HttpServer(uvicorn.Server):
    """Serves one application; `alive` is asked once a second whether to go on."""

    def __init__(self, app: ASGIApp, on_ready: Callable[[], None], alive: Callable[[], bool]) -> None:
        config = uvicorn.Config(
            app,
            http=ModelServerProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(GRACE_S) + _ABORT_S,
        )
        super().__init__(config)
        self._on_ready = on_ready
        self._alive = alive
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Accept nothing more, and end once running requests have; called on the loop."""
        self.should_exit = True
        self._stopping.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; a StartError where the sockets cannot."""
        try:
            await super().startup(sockets)
        except OSError as error:
            raise StartError(f"cannot listen: {error.strerror or error}") from error
        self._on_ready()

    async def main_loop(self) -> None:
        """Wait for the end. uvicorn's own loop wakes ten times a second, which costs as much as tokens do."""
        while not await self.on_tick(0) and self._alive():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _LOOK_S)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: uvicorn's own handling would end the process with the signal's exit code."""
        yield


def stop_by_signals(stop: Callable[[], None]) -> None:
    """Have the running loop call `stop` on SIGTERM and SIGINT, where this thread may handle signals."""
    try:
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signal_number, stop)
    except (ValueError, RuntimeError):
        logger.debug("not the main thread: signals are someone else's")


def bearer_gate(app: ASGIApp, secret: str, name: str, open_paths: frozenset[str]) -> ASGIApp:
    """Return an application that wants a secret as `Authorization: Bearer SECRET`, but for open paths."""
    expected = f"Bearer {secret}".encode()

    async def gate(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in open_paths:
            given = Headers(scope=scope).get("authorization", "").encode()
            if not hmac.compare_digest(given, expected):
                await send_error(send, ApiError(401, f"send {name} as Authorization: Bearer SECRET"))
                return
        await app(scope, receive, send)

    return gate


def by_port(number: int, there: ASGIApp, elsewhere: ASGIApp) -> ASGIApp:
    """Return an application that is `there` for connections to one port, and `elsewhere` for all others.

    The port is the accepted socket's own: no header can name another.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        server = scope.get("server")
        at_port = server is not None and server[1] == number
        await (there if at_port else elsewhere)(scope, receive, send)

    return app


async def send_error(send: Send, error: ApiError) -> None:
    """Answer with an error, and hang up."""
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": error.body(), "more_body": False})


@dataclass(eq=False)
class BodyReader:
    """Reads request bodies, none larger than a cap, nor all that are held at once larger than another."""

    max_bytes: int
    total_max_bytes: int
    timeout_s: float = 60.0
    _total_bytes: int = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Read one body; it counts against the total until the caller is done with it.

        An ApiError where it is too large (413), too slow (408), or too much is held at once (503).
        """
        body = bytearray()
        try:
            await self._fill(body, request)
            yield bytes(body)
        finally:
            self._total_bytes -= len(body)

    async def _fill(self, body: bytearray, request: Request) -> None:
        chunks = request.stream()
        try:
            if int(request.headers.get("content-length", "0")) > self.max_bytes:
                raise self._too_large()
            async with asyncio.timeout(self.timeout_s):
                async for chunk in chunks:
                    self._take(body, chunk)
        except TimeoutError as error:
            raise ApiError(408, f"the body did not arrive within {self.timeout_s:g} s") from error
        except ApiError:
            await _discard(chunks)
            raise

    def _take(self, body: bytearray, chunk: bytes) -> None:
        if len(body) + len(chunk) > self.max_bytes:
            raise self._too_large()
        if self._total_bytes + len(chunk) > self.total_max_bytes:
            raise ApiError(503, "the server is receiving too much at once; send the request again later")
        body += chunk
        self._total_bytes += len(chunk)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.max_bytes} bytes")


async def _discard(chunks: AsyncIterator[bytes]) -> None:
    discarded = 0
    try:
        async with asyncio.timeout(_DISCARD_TIMEOUT_S):
            async for chunk in chunks:
                discarded += len(chunk)
                if discarded > _DISCARD_BYTES_MAX:
                    return
    except TimeoutError:
        return


async def unless_disconnected(receive: Receive, work: Awaitable[_T]) -> _T:
    """Run `work` once the body is read; cancel it with a ClientDisconnect if the client goes away first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A body that is sent piece by piece: server-sent events, unless another type is named.

    `on_close` is called when it ends, in whatever way; `write_to` gets the connection once the first piece is
    sent, to write chunks while `rest` is awaited.
    """

    def __init__(
        self,
        first: bytes,
        rest: AsyncGenerator[bytes],
        on_close: Callable[[], None],
        media_type: str = "text/event-stream",
        write_to: Callable[[ModelServerProtocol], None] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self._first = first
        self._rest = rest
        self._on_close = on_close
        self._write_to = write_to
        self.init_headers({"cache-control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send_all(scope, send))
        finally:
            self._on_close()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        if self._write_to is not None and (direct := scope.get("extensions", {}).get(_DIRECT)):
            self._write_to(direct["protocol"])
        async with aclosing(self._rest):
            async for piece in self._rest:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def quiet_end(app: ASGIApp) -> ASGIApp:
    """Return the outermost layer: a client that went away, or the server's stop, is no error to log."""

    async def outermost(scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await app(scope, receive, watched_send)
        except ClientDisconnect:
            pass
        except asyncio.CancelledError:
            if not started:
                await send_error(send, ApiError(503, "the server is shutting down; send the request again"))

    return outermost


def json_response(value: object, status: int = 200) -> Response:
    """An answer in JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")
