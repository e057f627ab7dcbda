"""One HTTP/1.1 connection that never waits: what is there of requests in, answers out as far as they go.

Knows how long a client may take, as time is passed in; knows no threads, and nothing of what is asked.
"""

from __future__ import annotations

import socket
from collections import deque
from contextlib import suppress

from router.http_requests import HttpRequest, HttpRequestError, RequestReader

# A gateway sends a request in one go; whoever needs longer is not one.
_REQUEST_S = 10.0
# Envoy closes idle connections of its own earlier, see envoy_config.
_IDLE_S = 120.0
# Of a refused request so much is read and forgotten.
_UNREAD_BYTES_MAX = 4 << 20


class HttpConnection:
    """One client.

    Args:
        connection: Its socket.
        body_bytes_max: Longer bodies are refused.
        now_s: When it connected.

    Attributes:
        socket: Its socket.
        is_over: Whether there is nothing more to be done but to close it.
        is_watched: Whether somebody waits for it to be ready; kept by who does.
        is_in_hand: Whether a thread has it that does not wait, at first the one that made it; kept likewise.

    Raises:
        OSError: The client is gone.
    """

    def __init__(self, connection: socket.socket, body_bytes_max: int, now_s: float) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.is_over = self.is_watched = False
        self.is_in_hand = True
        self._reader = RequestReader(body_bytes_max)
        self._rest: memoryview | None = None
        self._unsent = b""
        self._is_last = self._is_refused = self._is_gone = False
        self._unread_bytes = _UNREAD_BYTES_MAX
        self._since_s = now_s

    @property
    def has_unsent(self) -> bool:
        """Whether it has to take answers before it may ask again."""
        return bool(self._unsent)

    @property
    def due_s(self) -> float:
        """When it has kept us waiting for too long."""
        is_busy = self._unsent or self._is_refused or self._reader.is_within
        return self._since_s + (_REQUEST_S if is_busy else _IDLE_S)

    def is_active(self) -> bool:
        """Whether the client was still there when it was last looked."""
        return not self._is_gone

    def look(self) -> None:
        """Sees, without taking anything, whether the client has gone away."""
        try:
            self._is_gone = not self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            pass
        except OSError:
            self._is_gone = True

    def receive(self, room: memoryview, now_s: float) -> deque[HttpRequest]:
        """Takes what has come, if only a part of it; answers the requests that are complete by now.

        Args:
            room: To receive into; free again afterwards.

        Raises:
            HttpRequestError: It is no HTTP, or too much.
            OSError: The client is gone.
        """
        rest, reader = self._rest, self._reader
        try:
            size = self.socket.recv_into(room if rest is None else rest)
        except BlockingIOError:
            return deque()
        if not size or self._is_refused:
            self._unread_bytes -= size
            self.is_over = not size or self._unread_bytes <= 0
            return deque()
        if rest is not None:
            self._rest = rest[size:]
            if size < len(rest):
                return deque()
            self._rest = None
            requests = deque((reader.finish(),))
        else:
            was_within = reader.is_within
            requests = reader.feed(room[:size])
            self._rest = reader.rest
            if was_within and not requests:
                return requests
        self._since_s = now_s
        return requests

    def send(self, answer: bytes, *, is_last: bool) -> None:
        """Answers a request; what does not go at once goes with `send_unsent`.

        Args:
            is_last: The connection ends behind it.

        Raises:
            OSError: The client is gone.
        """
        self._is_last = is_last
        self._unsent += answer
        self.send_unsent()

    def refuse(self, answer: bytes, now_s: float) -> None:
        """Answers what is no request; the connection ends behind it, whatever the client still has to say.

        Raises:
            OSError: The client is gone.
        """
        self._is_refused, self._since_s, self._rest = True, now_s, None
        self.send(answer, is_last=True)

    def send_unsent(self) -> None:
        """Sends as much as goes of what is not sent yet.

        Raises:
            OSError: The client is gone.
        """
        try:
            sent_bytes = self.socket.send(self._unsent)
        except BlockingIOError:
            sent_bytes = 0
        self._unsent = self._unsent[sent_bytes:]
        if not self._is_last or self._unsent:
            return
        if self._is_refused:
            # Closed with bytes unread, the connection would be reset and the answer lost on its way.
            self.socket.shutdown(socket.SHUT_WR)
        else:
            self.is_over = True

    def was_served(self, now_s: float) -> None:
        """Its answers took a while, in which nothing was received: its time begins anew."""
        self._since_s = now_s

    def too_slow(self) -> HttpRequestError | None:
        """What is to be told to a client whose time is over; None: nothing."""
        if self._unsent or self._is_refused or not self._reader.is_within:
            return None
        return HttpRequestError(408, f"the request was not here after {_REQUEST_S:g} s")

    def end_asking(self) -> None:
        """Has it end as if the client had asked all it wanted."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RD)
