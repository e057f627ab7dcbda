"""Reading bodies and sending streams over ASGI: size caps, time limits, disconnects."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from model_server.http_server import DirectBody, send_error
from model_server.openai_types import ApiError

_BODY_TIMEOUT_S = 60.0
# After a refusal this much more is read and thrown away, so that a client still sending can read the answer.
_DISCARD_BYTES_MAX = 64 << 20
_DISCARD_TIMEOUT_S = 5.0

_T = TypeVar("_T")


class BodyReader:
    """Reads request bodies, none larger than a cap, nor all that are held at once larger than another."""

    def __init__(self, max_bytes: int, total_max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._total_max_bytes = total_max_bytes
        self._total_bytes = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Read one body; it counts against the total until the caller is done with it.

        Raises:
            ApiError: 413 too large, 408 too slow, 503 too much is held at once.
            ClientDisconnect: The client went away.
        """
        body = bytearray()
        try:
            await self._fill(body, request)
            yield bytes(body)
        finally:
            self._total_bytes -= len(body)

    async def _fill(self, body: bytearray, request: Request) -> None:
        chunks = request.stream()
        try:
            if int(request.headers.get("content-length", "0")) > self._max_bytes:
                raise self._too_large()
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                async for chunk in chunks:
                    self._take(body, chunk)
        except TimeoutError as error:
            raise ApiError(408, f"the body did not arrive within {_BODY_TIMEOUT_S:g} s") from error
        except ApiError:
            await _discard(chunks)
            raise

    def _take(self, body: bytearray, chunk: bytes) -> None:
        if len(body) + len(chunk) > self._max_bytes:
            raise self._too_large()
        if self._total_bytes + len(chunk) > self._total_max_bytes:
            raise ApiError(503, "the server is receiving too much at once; send the request again later")
        body += chunk
        self._total_bytes += len(chunk)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_bytes} bytes")


async def _discard(chunks: AsyncIterator[bytes]) -> None:
    discarded = 0
    try:
        async with asyncio.timeout(_DISCARD_TIMEOUT_S):
            async for chunk in chunks:
                discarded += len(chunk)
                if discarded > _DISCARD_BYTES_MAX:
                    return
    except TimeoutError:
        return


async def unless_disconnected(receive: Receive, work: Awaitable[_T]) -> _T:
    """Run `work` once the body is read; cancel it with a ClientDisconnect if the client goes away first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A body that is sent piece by piece: server-sent events, unless another type is named.

    Args:
        on_close: Called when the stream ends, in whatever way.
        write_to: Given the body once its first piece is sent, to write more into while `rest` is awaited.
    """

    def __init__(
        self,
        first: bytes,
        rest: AsyncGenerator[bytes],
        on_close: Callable[[], None],
        media_type: str = "text/event-stream",
        write_to: Callable[[DirectBody], None] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self._first = first
        self._rest = rest
        self._on_close = on_close
        self._write_to = write_to
        self.init_headers({"cache-control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send_all(send, DirectBody.of(scope)))
        finally:
            self._on_close()

    async def _send_all(self, send: Send, body: DirectBody | None) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        if body is not None and self._write_to is not None:
            self._write_to(body)
        async with aclosing(self._rest):
            async for piece in self._rest:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class QuietEnd:
    """Outermost ASGI layer: a client that went away, or the server's stop, is no error to log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientDisconnect:
            pass
        except asyncio.CancelledError:
            if not started:
                await send_error(send, ApiError(503, "the server is shutting down; send the request again"))


def json_response(value: object, status: int = 200) -> Response:
    """An answer in JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")
