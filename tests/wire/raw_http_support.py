"""An HTTP/1.1 client that sends bytes as they are, and reads answers one by one."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import httptools

from tests.wire.router_wire_support import TIMEOUT_S


@dataclass
class Answer:
    """One HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes


class Client:
    """One connection, byte by byte if need be."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        self._parser = httptools.HttpResponseParser(self)
        self._answers: list[Answer] = []
        self._headers: dict[str, str] = {}
        self._body = b""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        """The parser's."""
        self._headers[name.decode().lower()] = value.decode()

    def on_body(self, chunk: bytes) -> None:
        """The parser's."""
        self._body += chunk

    def on_message_complete(self) -> None:
        """The parser's."""
        self._answers.append(Answer(self._parser.get_status_code(), self._headers, self._body))
        self._headers, self._body = {}, b""

    def send(self, data: bytes) -> None:
        """Sends bytes as they are; a server that does not want them any more says so in its answer."""
        self.socket.sendall(data)

    def answer(self) -> Answer:
        """The next answer."""
        while not self._answers:
            data = self.socket.recv(65536)
            assert data, "closed without an answer"
            self._parser.feed_data(data)
        return self._answers.pop(0)

    def is_closed(self) -> bool:
        """Waits for the other side to close."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True
