"""Calls: a stream's bytes in, answers and one end out. What all kinds of calls have in common.

Knows nothing of sockets, nor of what is asked.
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
    """One call; its own thread is that of its connection."""

    def __init__(self, peer: Peer, stream: Stream) -> None:
        head: CallHead = stream.head
        self._peer = peer
        self._stream = stream
        # A call with more bytes is not served on its connection's own thread.
        self._inline_bytes_max = peer.host.inline.get(head.path, -1)
        self._reader = MessageReader(head.encoding, peer.host.receive_bytes_max)
        self._has_headers = False
        self._lock = Lock()
        self.is_over = False  # whether it has ended towards its client

    def is_active(self) -> bool:
        return not self.is_over

    def receive(self, data: bytes, is_over: bool) -> None:
        """More of the stream; `is_over`: all of it."""
        if self.is_over:
            return
        try:
            for message, size in self._reader.feed(data):
                self._message(message, size)
            if is_over and not self.is_over:
                if self._reader.is_within:
                    raise MessageError(grpc.StatusCode.INTERNAL, "the stream ends within a message")
                self._all_received()
        except MessageError as error:
            self._end(error.status, str(error))

    def drained(self) -> None:
        """What waited for the client's window is sent."""

    def cancelled(self) -> None:
        """The client is gone, or has given up."""
        self._over()

    def cancel(self) -> None:
        """Ends the call, as if the client had."""
        self._peer.cancel(self._stream)
        self.cancelled()

    def _message(self, message: bytes, size: int) -> None:
        raise NotImplementedError

    def _all_received(self) -> None:
        raise NotImplementedError

    def _released(self) -> None:
        """The call has ended towards its client; called once."""
        raise NotImplementedError

    def _ended(self) -> None:
        """Nothing more will be done for the call; called once."""
        self._peer.call_ended(self._stream)

    def _framed(self, answer: bytes) -> bytes:
        """An answer as it is sent.

        Raises:
            MessageError: It is too large.
        """
        size, size_max = len(answer), self._peer.host.send_bytes_max
        if size > size_max:
            details = f"Sent message larger than max ({size} vs. {size_max})"
            raise MessageError(grpc.StatusCode.RESOURCE_EXHAUSTED, details)
        return plain_prefix(0, size) + answer

    def _say(self, data: bytes, *, consumed: int = 0) -> None:
        self._peer.send(self._stream, self._headers(), data, None, consumed)

    def _end(
        self, code: grpc.StatusCode, details: str = "", metadata: Metadata = (), *, data: bytes = b""
    ) -> None:
        """Sends the last answers and the status."""
        if self.is_over:
            return
        if code is not grpc.StatusCode.OK and not self._has_headers and not data:
            self._peer.send(self._stream, refusal_block(code, details, metadata), b"", None)
        else:
            self._peer.send(self._stream, self._headers(), data, trailers_block(code, details, metadata))
        self._over()

    def _headers(self) -> bytes | None:
        """Return the block in front of the first answer."""
        headers = None if self._has_headers else HEADERS
        self._has_headers = True
        return headers

    def _over(self) -> None:
        with self._lock:
            if self.is_over:
                return
            self.is_over = True
        self._released()
