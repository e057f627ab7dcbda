"""The HTTP/1.1 requests of one connection: received bytes in, whole requests out, in their order.

Bounds every part of a request. Reads no socket and knows no clock; knows nothing of what is asked.
"""

from __future__ import annotations

from collections import deque

import httptools
import msgspec

# Envoy's own limit is 60 KiB, to which it adds some headers.
_HEAD_BYTES_MAX = 96 << 10
# What a chunk of one byte takes beside it is less.
_CHUNK_OVERHEAD = 8
_PIPELINED_MAX = 64


class HttpRequest(msgspec.Struct, frozen=True):
    """One request.

    Attributes:
        method: In upper case.
        path: With its query string.
        headers: By lower-case name; the last of several wins.
        body: The whole body.
        keeps_alive: Whether the client expects to send another one on the connection.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes | bytearray
    keeps_alive: bool


class HttpRequestError(Exception):
    """What came can be answered with an error only, and nothing behind it can be read.

    Attributes:
        status: HTTP status.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RequestReader:
    """Reads one connection.

    A long body whose length is told can be received into `rest` directly, which saves copying it twice.

    Args:
        body_bytes_max: Longer bodies are refused.
    """

    def __init__(self, body_bytes_max: int) -> None:
        self._body_bytes_max = body_bytes_max
        self._done: deque[HttpRequest] = deque()
        self._parser = httptools.HttpRequestParser(self)
        self._headers: dict[str, str]
        self._body: bytes | bytearray
        self._length: int | None
        self._room: bytearray | None
        self._begin()

    @property
    def is_within(self) -> bool:
        """Whether a request has begun that has not ended."""
        return self._is_begun

    @property
    def rest(self) -> memoryview | None:
        """Room for what is still missing of a body whose length is told; None: there is no such body."""
        if self._room is None:
            return None
        return memoryview(self._room)[len(self._body) :]

    def feed(self, data: bytes | memoryview) -> deque[HttpRequest]:
        """Takes what was received; answers the requests that are complete by now, to be taken from the left.

        Raises:
            HttpRequestError: It is no HTTP, or too much.
        """
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Nobody upgrades here: the request is answered, and what follows it is not read.
            if self._done:
                self._done[-1] = msgspec.structs.replace(self._done[-1], keeps_alive=False)
        except httptools.HttpParserCallbackError as error:
            if isinstance(error.__context__, HttpRequestError):
                raise error.__context__ from None
            raise HttpRequestError(400, f"not HTTP: {error}") from error
        except httptools.HttpParserError as error:
            raise HttpRequestError(400, f"not HTTP: {error}") from error
        if self._is_begun:
            self._began(len(data))
        return self._done

    def finish(self) -> HttpRequest:
        """The request whose body's `rest` is filled."""
        assert self._room is not None
        request = self._request(self._room)
        # The old parser still waits for the body.
        self._parser = httptools.HttpRequestParser(self)
        self._begin()
        return request

    def on_message_begin(self) -> None:
        """The parser's."""
        self._begin()
        self._is_begun = True

    def on_url(self, part: bytes) -> None:
        """The parser's; it may come in parts."""
        self._url += part

    def on_header(self, name: bytes, value: bytes) -> None:
        """The parser's; also called for trailers, which nobody reads."""
        if not self._has_headers:
            self._headers[name.decode("latin-1").lower()] = value.decode("utf-8", "replace")

    def on_headers_complete(self) -> None:
        """The parser's."""
        self._has_headers = True
        length = self._headers.get("content-length")
        if length is not None and "transfer-encoding" not in self._headers:
            # The parser has seen that it is a number.
            if len(length) > 18 or int(length) > self._body_bytes_max:
                raise self._too_large()
            self._length = int(length)

    def on_body(self, chunk: bytes) -> None:
        """The parser's."""
        if not self._body:
            self._body = chunk
        elif isinstance(self._body, bytes):
            self._body = bytearray(self._body) + chunk
        else:
            self._body += chunk
        if len(self._body) > self._body_bytes_max:
            raise self._too_large()

    def on_message_complete(self) -> None:
        """The parser's."""
        if len(self._done) >= _PIPELINED_MAX:
            raise HttpRequestError(400, f"more than {_PIPELINED_MAX} requests at once")
        self._done.append(self._request(self._body))
        self._is_begun = False

    def _begin(self) -> None:
        self._is_begun = self._has_headers = False
        self._url = b""
        self._headers = {}
        self._body = b""
        self._length = None
        self._room = None
        self._received_bytes = 0

    def _began(self, received_bytes: int) -> None:
        """More is to come of the last request."""
        if self._length is not None:
            self._room = bytearray(self._length)
            self._room[: len(self._body)] = self._body
            return
        # Counted here: the parser tells of a header only when it has all of it.
        self._received_bytes += received_bytes
        if self._received_bytes > _HEAD_BYTES_MAX + _CHUNK_OVERHEAD * len(self._body):
            raise HttpRequestError(431, "the request's headers are too large")

    def _request(self, body: bytes | bytearray) -> HttpRequest:
        parser = self._parser
        method, path = parser.get_method().decode("ascii"), self._url.decode("latin-1")
        return HttpRequest(method, path, self._headers, body, parser.should_keep_alive())

    def _too_large(self) -> HttpRequestError:
        limit = self._body_bytes_max
        return HttpRequestError(413, f"the request body is larger than this router's limit of {limit} bytes")
