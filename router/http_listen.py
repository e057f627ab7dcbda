"""A small HTTP/1.1 server for one well-known client, Envoy: requests in, answers' bytes out.

A few desks share the connections. Each serves its own in the order in which they ask, on one thread: a thread
for each connection would fight for the interpreter without order, a single one gets too little of processors
that others want, too. Connections, their idle time and each request's time to arrive are bounded.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from typing import Any

from indexer.repeated_log import RepeatedLog
from router.http_connection import HttpConnection
from router.http_desk import HttpDesk
from router.http_requests import HttpRequest, HttpRequestError
from router.steps import Steps
from router.tcp_listen import TcpListener

_log = logging.getLogger(__name__)
_repeated = RepeatedLog(_log)

# serve(request, closes, is_active): the steps to the whole answer; with `closes` it says that the connection
# ends behind it. A step that may wait is announced, and may ask whether the client still waits.
Serve = Callable[[HttpRequest, bool, Callable[[], bool]], Steps[bytes]]
# refuse(error): the answer to what is no request.
Refuse = Callable[[HttpRequestError], bytes]

_DESKS = 4
_STOP_S = 2.0


class HttpServer:
    """Bound when made, serving from `start` on.

    Args:
        flag: The flag that chose the port, for the error.
        inline_bytes_max: See `http_desk.Host`.
        connections_max: Connections beyond it are closed at once.
        refused: Told of every connection that was.
        desks: Among how many the connections are shared out.

    Attributes:
        port: The port listened on.
        serve: See `http_desk.Host`, as for the others.

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
        inline_bytes_max: int,
        connections_max: int,
        refused: Callable[[], None],
        desks: int = _DESKS,
    ) -> None:
        self._listener = TcpListener(flag, host, port, self._take, "http")
        self.port = self._listener.port
        self.serve = serve
        self.refuse = refuse
        self.inline_bytes_max = inline_bytes_max
        self.is_draining = False
        self._body_bytes_max = body_bytes_max
        self._connections_max = connections_max
        self._refused = refused
        self._desks = [HttpDesk(self) for _ in range(desks)]

    def start(self) -> None:
        """Begins to serve."""
        for desk in self._desks:
            desk.start()
        self._listener.start()

    def drain(self) -> None:
        """Says on every answer from now on that its connection ends."""
        self.is_draining = True

    def close(self) -> None:
        """Ends serving; answers that are being made are still sent. Idempotent."""
        self.is_draining = True
        self._listener.close()
        for desk in self._desks:
            desk.end_asking()
        end_s = time.monotonic() + _STOP_S
        for desk in self._desks:
            desk.close(max(0.0, end_s - time.monotonic()))

    def _take(self, connection: socket.socket, _: Any) -> None:
        try:
            is_taken = self._add(HttpConnection(connection, self._body_bytes_max, time.monotonic()))
        except OSError as error:
            _repeated.event("connection_refused", "http", "an HTTP connection is not served: %s", error)
            connection.close()
            return
        if not is_taken:
            self._refused()
            connection.close()

    def _add(self, connection: HttpConnection) -> bool:
        """Whether there is a place for it; called by the listener's thread alone.

        Raises:
            OSError: It cannot be watched.
        """
        if sum(map(len, self._desks)) >= self._connections_max:
            return False
        return min(self._desks, key=len).add(connection)
