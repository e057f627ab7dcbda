"""uvicorn's HTTP protocol with caps on a request's head, and a shorter way out for a stream's chunks.

Answers what is not HTTP in the shape of the API's other errors. Knows nothing of what is asked or answered.
"""

import asyncio

from starlette.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from model_server.api_errors import ApiError

HEAD_BYTES_MAX = 256 << 10
_DIRECT_BODY = "kvroute.direct_body"


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
        """Nothing is awaited any more."""
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
