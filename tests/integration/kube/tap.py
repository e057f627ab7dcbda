"""A TCP relay in front of an API server, for the ways in which connections fail: cut, and half dead."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

_PIECE_BYTES = 1 << 16


class Tap:
    """Passes bytes on until it is told otherwise.

    Attributes:
        port: Where it listens, on 127.0.0.1.
        accepted: Connections so far.
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
        """Breaks all connections and takes no more until `mend`."""
        with self._lock:
            self._refusing = True
            pairs, self._open = self._open, []
        for pair in pairs:
            pair.close()

    def mend(self) -> None:
        """Takes connections again."""
        with self._lock:
            self._refusing = False

    def freeze(self) -> None:
        """What is connected now stays so, but nothing passes any more; new connections are passed on."""
        with self._lock:
            for pair in self._open:
                pair.frozen = True

    def close(self) -> None:
        """Ends everything."""
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
    """Two connections that are one."""

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
