"""TCP relay in front of an API server that simulates broken and frozen connections."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

_PIECE_BYTES = 1 << 16


class Tap:
    """TCP relay that can break or freeze its connections.

    Attributes:
        port: Listening port on 127.0.0.1.
        accepted: Number of accepted connections.
    """

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self.accepted = 0
        self._lock = threading.Lock()
        self._open: list[_Pair] = []
        self._refusing = False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Close all connections and reject new ones until `mend`."""
        with self._lock:
            self._refusing = True
            pairs, self._open = self._open, []
        for pair in pairs:
            pair.close()

    def mend(self) -> None:
        """Accept connections again."""
        with self._lock:
            self._refusing = False

    def freeze(self) -> None:
        """Stop relaying on open connections without closing them; new connections work."""
        with self._lock:
            for pair in self._open:
                pair.frozen = True

    def close(self) -> None:
        """Close the relay and all connections."""
        self._listening.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                with self._lock:
                    self.accepted += 1
                    if self._refusing:
                        client.close()
                        continue
                    try:
                        pair = _Pair(client, socket.create_connection(self._target))
                    except OSError:
                        client.close()
                        continue
                    self._open.append(pair)
                pair.start()


class _Pair:
    """Client connection with its connection to the server."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.frozen = False
        self._sockets = client, server

    def start(self) -> None:
        client, server = self._sockets
        for source, sink in ((client, server), (server, client)):
            threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def close(self) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(_PIECE_BYTES):
                if not self.frozen:
                    sink.sendall(data)
        if not self.frozen:
            self.close()
