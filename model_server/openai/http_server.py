"""HTTP layer of the API: uvicorn with limits on heads and bodies, bearer tokens, streams and shutdown."""

import asyncio
import hmac
import logging
import signal
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import uvicorn
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from model_server.errors import StartError
from model_server.openai.types import ApiError

HEAD_BYTES_MAX = 256 << 10
# After a rejection this much of the body is read and discarded, so that the client can read the answer.
_DISCARD_BYTES_MAX = 64 << 20
_DISCARD_TIMEOUT_S = 5.0
_DIRECT = "kvroute.direct"  # ASGI extension with the connection's protocol
logger = logging.getLogger(__name__)
# Time for running requests to finish after `stop`, before they are aborted.
GRACE_S = 2.0
_ABORT_S = 1
# Longer than the idle timeout of common proxies, so that proxies close idle connections first.
KEEP_ALIVE_S = 120
_BACKLOG = 2048
_TICK_S = 1.0  # also the interval of the Date header

_CLOSE = {"connection": "close"}  # header that ends the connection after a response

_T = TypeVar("_T")


class ModelServerProtocol(HttpToolsProtocol):
    """HTTP protocol with a size limit and a timeout for request heads, which uvicorn lacks."""

    _head_bytes = 0
    _head_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout of the first head. For later heads it starts at their first byte."""
        super().connection_made(transport)
        self._open_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._close_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data, and check the size of an unfinished head."""
        super().data_received(data)
        if self._head_deadline is not None:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
                self.send_400_response("the request's headers are too large")

    def on_message_begin(self) -> None:
        """Start the head timeout (parser callback)."""
        self._open_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Stop the head timeout (parser callback). Bodies have their own limits."""
        self._close_head()
        super().on_headers_complete()
        self.scope["extensions"] = {_DIRECT: {"protocol": self}}

    @property
    def writable(self) -> bool:
        """Return whether the client is connected and reads fast enough. If not, ASGI's `send` waits."""
        return not (self.flow.write_paused or self.transport.is_closing())

    def write_chunk(self, chunk: bytes) -> None:
        """Write a non-empty chunk of a body whose head and end are sent by ASGI.

        Call it on the loop, while `writable` and while no `send` runs. It is cheaper than ASGI's `send`,
        which needs a task switch.
        """
        self.transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))

    def send_400_response(self, msg: str) -> None:
        """Answer an unparsable request with an API error, and close the connection."""
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
    """Server of one application, which also stops when `alive` returns False (checked every second)."""

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
        """Stop accepting, and end after the running requests. Call it on the loop."""
        self.should_exit = True
        self._stopping.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the sockets; raises a StartError."""
        try:
            await super().startup(sockets)
        except OSError as error:
            raise StartError(f"cannot listen: {error.strerror or error}") from error
        self._on_ready()

    async def main_loop(self) -> None:
        """Wait for the stop with one wake-up per second (uvicorn: ten, which cost as much as tokens)."""
        while not await self.on_tick(0) and self._alive():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _TICK_S)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do not handle signals: uvicorn would end the process with the signal's exit status."""
        yield


def stop_by_signals(stop: Callable[[], None]) -> None:
    """Call `stop` on SIGTERM and SIGINT, if this is the main thread."""
    try:
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signal_number, stop)
    except (ValueError, RuntimeError):
        logger.debug("signal handlers not installed: not the main thread")


def bearer_gate(app: ASGIApp, secret: str, name: str, open_paths: frozenset[str]) -> ASGIApp:
    """Return an application that requires `Authorization: Bearer SECRET`, except on open paths."""
    expected = f"Bearer {secret}".encode()
    rejection = error_response(ApiError(401, f"send {name} as Authorization: Bearer SECRET"), _CLOSE)

    async def gate(scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["path"] in open_paths
        given = "" if is_open else Headers(scope=scope).get("authorization", "")
        is_allowed = is_open or hmac.compare_digest(given.encode(), expected)
        await (app if is_allowed else rejection)(scope, receive, send)

    return gate


def by_port(number: int, there: ASGIApp, elsewhere: ASGIApp) -> ASGIApp:
    """Return an application that dispatches by local port: `there` for port `number`, else `elsewhere`.

    The port is that of the accepted socket, which clients cannot forge.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        server = scope.get("server")
        at_port = server is not None and server[1] == number
        await (there if at_port else elsewhere)(scope, receive, send)

    return app


@dataclass(eq=False)
class BodyReader:
    """Reader of request bodies with limits per body and for all bodies in memory."""

    max_bytes: int
    total_max_bytes: int
    timeout_s: float = 60.0
    _total_bytes: int = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Read one body, which counts towards the total until the context ends.

        Raises:
            ApiError: The body is too large (413) or too slow (408), or the total limit is reached (503).
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
                    self._append(body, chunk)
        except TimeoutError as error:
            raise ApiError(408, f"the body did not arrive within {self.timeout_s:g} s") from error
        except ApiError:
            await _discard(chunks)
            raise

    def _append(self, body: bytearray, chunk: bytes) -> None:
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
    """Run `work` after the body is read; cancel it and raise ClientDisconnect if the client disconnects."""
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


END_OF_EVENTS = b"data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """Streamed response of server-sent events.

    Args:
        first: First piece of the body.
        rest: Further pieces; the last one is `END_OF_EVENTS`.
        on_close: Called at the end of the response, also after an error.
        write_to: Called with the connection after the first piece; it may write chunks while `rest` waits.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        rest: AsyncGenerator[bytes],
        on_close: Callable[[], None],
        write_to: Callable[[ModelServerProtocol], None],
    ) -> None:
        super().__init__(rest, headers={"cache-control": "no-cache"})
        self._first = first
        self._rest = rest
        self._on_close = on_close
        self._write_to = write_to

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send_all(scope, send))
        finally:
            self._on_close()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self._send_piece(self._first, send)
        if direct := scope.get("extensions", {}).get(_DIRECT):
            self._write_to(direct["protocol"])
        async with aclosing(self._rest):
            async for piece in self._rest:
                await self._send_piece(piece, send)

    async def _send_piece(self, piece: bytes, send: Send) -> None:
        # One write with the end: a client that disconnects at the last piece would abort the response.
        await send({"type": "http.response.body", "body": piece, "more_body": piece != END_OF_EVENTS})


def quiet_end(app: ASGIApp) -> ASGIApp:
    """Return an application without log messages about disconnected clients and server shutdown."""

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
                error = ApiError(503, "the server is shutting down; send the request again")
                await error_response(error, _CLOSE)(scope, receive, send)

    return outermost


def error_response(error: ApiError, headers: Mapping[str, str]) -> Response:
    """Return a response in the API's error format."""
    return Response(error.body(), error.status, headers, media_type="application/json")


def json_response(value: object) -> Response:
    """Return a JSON response."""
    return Response(msgspec.json.encode(value), media_type="application/json")
