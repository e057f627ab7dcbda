"""GETs over kept connections, on the running asyncio loop: an address and a path in, status and body out.

One connection is kept for each address, with one exchange at a time on it; bodies are capped. Knows nothing
of what is asked.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import httptools

_HEADER_BYTES_MAX = 64 << 10


class HttpGetError(Exception):
    """The other side answered something that is no usable HTTP answer."""


class ConnectTimeoutError(TimeoutError):
    """No connection came about in time: nothing at the address takes or refuses it."""


class HttpGetter:
    """Keeps connections alive between exchanges; to be used by one loop.

    Args:
        body_bytes_max: Longer bodies are an error.
        timeout_s: Deadline of an exchange from connecting to the last byte.
    """

    def __init__(self, *, body_bytes_max: int, timeout_s: float) -> None:
        self._body_bytes_max = body_bytes_max
        self._timeout_s = timeout_s
        self._connections: dict[str, _Connection] = {}

    async def get(self, address: str, path: str, bearer: str | None = None) -> tuple[int, bytes]:
        """Asks; when cancelled, the connection is dropped.

        Args:
            address: "ip:port".
            bearer: Secret to send along; None: no secret.

        Raises:
            ConnectTimeoutError: It could not be connected to within the deadline.
            TimeoutError: It did not answer within the deadline.
            OSError: It cannot be connected to, or the connection broke.
            HttpGetError: The answer is no HTTP, or too long.
        """
        secret = "" if bearer is None else f"Authorization: Bearer {bearer}\r\n"
        request = f"GET {path} HTTP/1.1\r\nHost: {address}\r\n{secret}\r\n".encode("ascii")
        connection = None
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = self._connections.pop(address, None)
                if connection is not None and connection.is_open:
                    # One that the other side has closed meanwhile says nothing.
                    with suppress(ConnectionError):
                        return await self._exchange(connection, address, request)
                connection = None
                host, _, port = address.rpartition(":")
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self._body_bytes_max), host.strip("[]"), int(port)
                )
                return await self._exchange(connection, address, request)
        except TimeoutError as error:
            if connection is None:
                raise ConnectTimeoutError(f"no connection to {address}") from error
            raise

    def forget(self, host: str) -> None:
        """Drops all connections to a host that nobody uses now."""
        for address in [known for known in self._connections if known.rpartition(":")[0] == host]:
            self._connections.pop(address).abort()

    def close(self) -> None:
        while self._connections:
            self._connections.popitem()[1].abort()

    async def _exchange(self, connection: _Connection, address: str, request: bytes) -> tuple[int, bytes]:
        try:
            answer = await connection.get(request)
        except BaseException:
            connection.abort()
            raise
        # Another exchange with this address may have left its connection meanwhile.
        if (other := self._connections.get(address)) is not None:
            other.abort()
        self._connections[address] = connection
        return answer


class _Connection(asyncio.Protocol):
    """One connection; also what the parser calls while it reads an answer."""

    def __init__(self, body_bytes_max: int) -> None:
        self._body_bytes_max = body_bytes_max
        self._transport: Any = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._parser: Any = None
        self._body = bytearray()
        self._header_bytes = 0
        self._has_length = False
        # Whether the end of the connection is the end of a body.
        self._may_end = False

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def get(self, request: bytes) -> asyncio.Future[tuple[int, bytes]]:
        """Sends a request; the answer is for the future."""
        self._answer = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._body.clear()
        self._header_bytes, self._has_length, self._may_end = 0, False, False
        if self.is_open:
            self._transport.write(request)
        else:
            self._fail(ConnectionResetError("closed by the other side"))
        return self._answer

    def abort(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.abort()  # nothing was asked
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(HttpGetError(f"no HTTP answer: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        if self._may_end and error is None:
            self.on_message_complete()
        self._fail(ConnectionResetError(str(error or "closed by the other side")))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > _HEADER_BYTES_MAX:
            self._fail(HttpGetError("headers too long"))
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        self._may_end = not self._has_length

    def on_body(self, chunk: bytes) -> None:
        self._body += chunk
        if len(self._body) > self._body_bytes_max:
            self._fail(HttpGetError(f"more than {self._body_bytes_max} bytes"))

    def on_message_complete(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((self._parser.get_status_code(), bytes(self._body)))
            if not self._parser.should_keep_alive():
                self.abort()

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
            self.abort()
