"""A small HTTP/1.1 server for one well-known client, Envoy: requests in, answers' bytes out.

One thread for each connection, which reads, asks `serve` and writes without a hand-over; whoever waits in
`serve` holds up nobody else. Connections, their idle time and each request's time to arrive are bounded.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from router.http_requests import HttpRequest, HttpRequestError, RequestReader
from router.tcp_listen import TcpListener, prepare

_log = logging.getLogger(__name__)

# serve(request, closes): the whole answer; with `closes` it says that the connection ends behind it.
Serve = Callable[[HttpRequest, bool], bytes]
# refuse(error): the answer to what is no request.
Refuse = Callable[[HttpRequestError], bytes]

_RECEIVE_BYTES = 64 << 10
# A gateway sends a request in one go; whoever needs longer is not one.
_REQUEST_S = 10.0
# Envoy closes idle connections of its own earlier, see envoy_config.
_IDLE_S = 120.0
_STOP_S = 2.0
# Of a refused request so much is read and forgotten.
_UNREAD_BYTES_MAX = 4 << 20


class HttpServer:
    """Bound when made, serving from `start` on.

    Args:
        flag: The flag that chose the port, for the error.
        connections_max: Connections beyond it are closed at once.
        refused: Told of every connection that was.

    Attributes:
        port: The port listened on.

    Raises:
        ListenError: The address is in use or not ours.
    """

    def __init__(
        self,
        flag: str,
        host: str,
        port: int,
        serve: Serve,
        refuse: Refuse,
        *,
        body_bytes_max: int,
        connections_max: int,
        refused: Callable[[], None],
    ) -> None:
        self._listener = TcpListener(flag, host, port, self._take, "http")
        self.port = self._listener.port
        self._serve = serve
        self._refuse = refuse
        self._body_bytes_max = body_bytes_max
        self._connections_max = connections_max
        self._refused = refused
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._is_draining = False

    def start(self) -> None:
        """Begins to serve."""
        self._listener.start()

    def drain(self) -> None:
        """Says on every answer from now on that its connection ends."""
        self._is_draining = True

    def close(self) -> None:
        """Ends serving; answers that are being made are still sent. Idempotent."""
        self._is_draining = True
        self._listener.close()
        with self._lock:
            connections = list(self._connections.items())
        for connection, _ in connections:
            _shutdown(connection, socket.SHUT_RD)
        end_s = time.monotonic() + _STOP_S
        for _, thread in connections:
            thread.join(max(0.0, end_s - time.monotonic()))

    def _take(self, connection: socket.socket, _: Any) -> None:
        thread = threading.Thread(target=self._run, args=(connection,), name="http", daemon=True)
        with self._lock:
            is_taken = len(self._connections) < self._connections_max
            if is_taken:
                self._connections[connection] = thread
        try:
            if is_taken:
                thread.start()
                return
        except RuntimeError:
            # The system has no more threads; those who are served already shall go on.
            _log.exception("cannot serve a connection")
            with self._lock:
                del self._connections[connection]
        self._refused()
        connection.close()

    def _run(self, connection: socket.socket) -> None:
        try:
            prepare(connection, int(_REQUEST_S))
            self._converse(connection)
        except OSError:
            pass  # the client is gone, or too slow
        except Exception:
            _log.exception("a connection failed")
        finally:
            with self._lock:
                del self._connections[connection]
            connection.close()

    def _converse(self, connection: socket.socket) -> None:
        reader = RequestReader(self._body_bytes_max)
        received = memoryview(bytearray(_RECEIVE_BYTES))
        begun_s: float | None = None
        try:
            while size := _receive(connection, received, reader):
                requests = reader.feed(received[:size])
                if requests:
                    begun_s = None
                while requests:
                    if not self._answer(connection, requests.popleft()):
                        return
                if reader.rest is not None and not (
                    _fill(connection, reader.rest) and self._answer(connection, reader.finish())
                ):
                    return
                begun_s = _begun_s(reader, begun_s)
        except HttpRequestError as error:
            _say_last(connection, self._refuse(error), received)

    def _answer(self, connection: socket.socket, request: HttpRequest) -> bool:
        """Whether another request may follow."""
        closes = self._is_draining or not request.keeps_alive
        connection.sendall(self._serve(request, closes))
        return not closes


def _receive(connection: socket.socket, room: memoryview, reader: RequestReader) -> int:
    """Bytes received; 0 at the end of the connection, or when nothing was asked for long."""
    waited_s = 0.0
    while waited_s < _IDLE_S:
        try:
            return connection.recv_into(room)
        except BlockingIOError:
            waited_s += _REQUEST_S
            if reader.is_within:
                raise _too_slow() from None
    return 0


def _fill(connection: socket.socket, room: memoryview) -> bool:
    """Receives a body's rest; False: the connection ended within it."""
    end_s = time.monotonic() + _REQUEST_S
    while len(room):
        try:
            size = connection.recv_into(room, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise _too_slow() from None
        if not size:
            return False
        room = room[size:]
        if len(room) and time.monotonic() > end_s:
            raise _too_slow()
    return True


def _begun_s(reader: RequestReader, begun_s: float | None) -> float | None:
    """Since when the request is on its way that is not all here; None: there is none."""
    if not reader.is_within:
        return None
    now_s = time.monotonic()
    if begun_s is not None and now_s - begun_s > _REQUEST_S:
        raise _too_slow()
    return begun_s or now_s


def _too_slow() -> HttpRequestError:
    return HttpRequestError(408, f"the request was not here after {_REQUEST_S:g} s")


def _say_last(connection: socket.socket, answer: bytes, room: memoryview) -> None:
    """Sends an answer behind which the connection ends, whatever the client still has to say."""
    connection.sendall(answer)
    _shutdown(connection, socket.SHUT_WR)
    # Closed with bytes unread, the connection would be reset and the answer lost on its way.
    end_s, unread_bytes = time.monotonic() + _REQUEST_S, _UNREAD_BYTES_MAX
    while unread_bytes > 0 and time.monotonic() < end_s and (size := connection.recv_into(room)):
        unread_bytes -= size


def _shutdown(connection: socket.socket, how: int) -> None:
    with suppress(OSError):
        connection.shutdown(how)
