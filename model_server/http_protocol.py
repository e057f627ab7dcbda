"""uvicorn's HTTP protocol with caps on a request's head: its size, and the time it takes.

Answers what is not HTTP in the shape of the API's other errors. Knows nothing else.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from model_server.api_errors import ApiError

HEAD_BYTES_MAX = 256 << 10


class HeadCappedProtocol(HttpToolsProtocol):
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
