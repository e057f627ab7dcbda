"""Base class of all gRPC calls: stream bytes in, response messages and one final status out.

The module does not depend on sockets or on the methods that are served.
"""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING

import grpc

from router.h2.header_blocks import HEADERS, CallHead, Metadata, refusal_block, trailers_block
from router.h2.messages import MessageError, MessageReader, plain_prefix
from router.h2.streams import Stream

if TYPE_CHECKING:
    from router.h2.peer import Peer


class Call:
    """One gRPC call on an HTTP/2 stream, driven by the thread of its connection."""

    def __init__(self, peer: Peer, stream: Stream) -> None:
        head: CallHead = stream.head
        self._peer = peer
        self._stream = stream
        # Calls with more request bytes are served by the thread pool instead of the connection's thread.
        self._inline_bytes_max = peer.server.inline.get(head.path, -1)
        self._reader = MessageReader(head.encoding, peer.server.receive_bytes_max)
        self._has_headers = False
        self._lock = Lock()
        self.is_ended = False  # whether the status has been sent or the call was cancelled

    def is_active(self) -> bool:
        return not self.is_ended

    def receive(self, data: bytes, end_stream: bool) -> None:
        """Process received stream bytes; `end_stream` marks the last ones."""
        if self.is_ended:
            return
        try:
            for message, size in self._reader.feed(data):
                self._message(message, size)
            if end_stream and not self.is_ended:
                if self._reader.has_partial_data:
                    raise MessageError(grpc.StatusCode.INTERNAL, "the stream ended inside a message")
                self._all_received()
        except MessageError as error:
            self._end(error.status, str(error))

    def drained(self) -> None:
        """Handle that all data queued for the client's flow-control window has been sent."""

    def cancelled(self) -> None:
        """Handle a reset stream or a lost connection."""
        self._mark_ended()

    def cancel(self) -> None:
        """Reset the stream with CANCEL and end the call."""
        self._peer.cancel(self._stream)
        self.cancelled()

    def _message(self, message: bytes, size: int) -> None:
        raise NotImplementedError

    def _all_received(self) -> None:
        raise NotImplementedError

    def _on_ended(self) -> None:
        """Handle the end of the call; called once, when the status was sent or the call was cancelled."""
        raise NotImplementedError

    def _release_stream(self) -> None:
        """Release the stream once no thread works on the call any more; called once."""
        self._peer.call_ended(self._stream)

    def _framed(self, answer: bytes) -> bytes:
        """Return a response message with its gRPC length prefix.

        Raises:
            MessageError: The message is larger than the server's send limit.
        """
        size, size_max = len(answer), self._peer.server.send_bytes_max
        if size > size_max:
            details = f"Sent message larger than max ({size} vs. {size_max})"
            raise MessageError(grpc.StatusCode.RESOURCE_EXHAUSTED, details)
        return plain_prefix(0, size) + answer

    def _send(self, data: bytes, *, consumed: int = 0) -> None:
        self._peer.send(self._stream, self._headers(), data, None, consumed)

    def _end(
        self, code: grpc.StatusCode, details: str = "", metadata: Metadata = (), *, data: bytes = b""
    ) -> None:
        """Send the last response data and the status."""
        if self.is_ended:
            return
        if code is not grpc.StatusCode.OK and not self._has_headers and not data:
            self._peer.send(self._stream, refusal_block(code, details, metadata), b"", None)
        else:
            self._peer.send(self._stream, self._headers(), data, trailers_block(code, details, metadata))
        self._mark_ended()

    def _headers(self) -> bytes | None:
        """Return the response headers, or None if they have been sent."""
        headers = None if self._has_headers else HEADERS
        self._has_headers = True
        return headers

    def _mark_ended(self) -> None:
        with self._lock:
            if self.is_ended:
                return
            self.is_ended = True
        self._on_ended()
