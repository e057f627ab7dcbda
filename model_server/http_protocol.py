"""uvicorn's HTTP protocol with a cap on the request line and headers together. Knows nothing else."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES_MAX = 256 << 10


class HeadCappedProtocol(HttpToolsProtocol):
    """Answers 400 to a request whose head does not end; the parser alone would collect it for ever."""

    _in_head = True
    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Parse what came; it counts only if the head is still open after it."""
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
                self.send_400_response("The request's headers are too large.")

    def on_headers_complete(self) -> None:
        """The parser's callback: what follows is the body, which has its own cap."""
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The parser's callback: the next byte begins the next request."""
        self._in_head, self._head_bytes = True, 0
        super().on_message_complete()
