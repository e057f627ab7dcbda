"""A listening TCP socket and the thread that accepts: connections out. Knows no protocol."""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from indexer.repeated_log import RepeatedLog
from router.errors import ListenError

_log = logging.getLogger(__name__)
_repeated = RepeatedLog(_log)

_BACKLOG = 1024
_RETRY_S = 1.0
_STOP_S = 2.0


class TcpListener:
    """Bound when made, accepting from `start` on.

    Args:
        flag: The flag that chose the port, for the error.
        port: 0: one that is free.
        take: Given each connection with the address it comes from; closes it in the end.

    Raises:
        ListenError: The address is in use or not ours.
    """

    def __init__(
        self, flag: str, host: str, port: int, take: Callable[[socket.socket, Any], None], name: str
    ) -> None:
        self._socket = bound_socket(flag, host, port)
        self.port: int = self._socket.getsockname()[1]
        self._take = take
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, name=f"{name}-{self.port}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Accepts nobody any more. Idempotent."""
        self._is_closed = True
        # Closing alone would leave the thread waiting.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._socket.accept()
            except OSError as error:
                if self._is_closed:
                    return
                # Out of file descriptors, say: whoever waits is served when some are free again.
                _repeated.event(
                    "accept_failed",
                    f"port {self.port}",
                    "port %d: cannot accept a connection: %s",
                    self.port,
                    error,
                )
                time.sleep(_RETRY_S)
                continue
            self._take(connection, address)


def bound_socket(flag: str, host: str, port: int) -> socket.socket:
    """Return a listening socket; a ListenError: the address is in use or not ours."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ListenError(f"{flag} {port}: cannot listen on {host}:{port}: {error.strerror}") from error


def prepare(connection: socket.socket, wait_s: int) -> None:
    """Has answers sent without delay, and a connection that takes or gives nothing for so long say so."""
    # The kernel's own timeouts: Python's would ask twice for every message.
    wait = struct.pack("ll", wait_s, 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
