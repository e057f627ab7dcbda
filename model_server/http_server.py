"""uvicorn as this server runs it: caps on a request's head, bearer secrets, its life until a stop.

What is not HTTP, or lacks its secret, is answered in the shape of the API's other errors. Signals are left to
the caller.
"""

import asyncio
import hmac
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from model_server.errors import StartError
from model_server.openai_types import ApiError

HEAD_BYTES_MAX = 256 << 10
_DIRECT_BODY = "kvroute.direct_body"
logger = logging.getLogger(__name__)
# After `stop`, running requests get this long to finish before they are ended.
GRACE_S = 2.0
_ABORT_S = 1
# Longer than common proxies keep idle connections, so that it is they who close them.
_KEEP_ALIVE_S = 120
_BACKLOG = 2048
_LOOK_S = 1.0  # also how often answers get a new date


class DirectBody:
    """Writes chunks of a body, of no declared length, whose head was sent by ASGI and whose end will be.

    ASGI's own `send` is awaited, by a task that must be woken first; that costs more than the write.
    """

    __slots__ = ("_flow", "_transport")

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._transport = transport
        self._flow = flow

    @classmethod
    def of(cls, scope: Scope) -> "DirectBody | None":
        """The body of this request's answer, an ASGI extension; None on a server that does not have it."""
        body: DirectBody | None = scope.get("extensions", {}).get(_DIRECT_BODY, {}).get("body")
        return body

    @property
    def writable(self) -> bool:
        """Whether the client is there and keeps up; if not, `send` waits until it does."""
        return not (self._flow.write_paused or self._transport.is_closing())

    def write(self, chunk: bytes) -> None:
        """Write one chunk, not empty; called on the loop, while it is writable and no `send` runs."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))


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
        self.scope["extensions"] = {_DIRECT_BODY: {"body": DirectBody(self.transport, self.flow)}}

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
            timeout_keep_alive=_KEEP_ALIVE_S,
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

    @contextmanager
    def stopped_by_signals(self, stop: Callable[[], None]) -> Iterator[None]:
        """Call `stop` on SIGTERM and SIGINT, where this thread may handle signals."""
        loop = asyncio.get_running_loop()
        try:
            for signal_number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(signal_number, stop)
        except (ValueError, RuntimeError):
            logger.debug("not the main thread: signals are someone else's")
        yield


class BearerGate:
    """ASGI layer that knows one secret, sent as `Authorization: Bearer SECRET`; open paths need none."""

    def __init__(self, app: ASGIApp, secret: str, name: str, open_paths: frozenset[str]) -> None:
        self._app = app
        self._open_paths = open_paths
        self._expected = f"Bearer {secret}".encode()
        self._message = f"send {name} as Authorization: Bearer SECRET"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            given = Headers(scope=scope).get("authorization", "").encode()
            if not hmac.compare_digest(given, self._expected):
                await send_error(send, ApiError(401, self._message))
                return
        await self._app(scope, receive, send)


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
