"""model_server.openai.http_server: limits of bodies, and work that ends with its client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from model_server.openai.http_server import (
    END_OF_EVENTS,
    BodyReader,
    EventStream,
    quiet_end,
    unless_disconnected,
)
from model_server.openai.types import ApiError

Receive = Callable[[], Awaitable[dict[str, Any]]]


def chunks(*parts: bytes, more: bool = False) -> Receive:
    """Return the receive function of a client that sends these parts, then waits if `more`."""
    waiting = list(parts)

    async def receive() -> dict[str, Any]:
        if not waiting:
            await asyncio.Event().wait()
        body = waiting.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(waiting) or more}

    return receive


def request(receive: Receive, length: int | None = None) -> Request:
    """Return a POST request with or without a length."""
    headers = [] if length is None else [(b"content-length", str(length).encode())]
    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


async def read(reader: BodyReader, asked: Request) -> bytes:
    """Read a body and release it."""
    async with reader.read(asked) as body:
        return body


def run(scenario: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end."""
    return asyncio.run(scenario)


def status_of(reader: BodyReader, asked: Request) -> int:
    """Return the error status of reading this body."""
    with pytest.raises(ApiError) as caught:
        run(read(reader, asked))
    return caught.value.status


def test_a_body_up_to_the_cap_is_read() -> None:
    """A body of exactly the limit is accepted, in any number of parts."""
    assert run(read(BodyReader(10, 100), request(chunks(b"12345", b"67890")))) == b"1234567890"


def test_a_body_above_the_limit_is_rejected() -> None:
    """A declared length above the limit is rejected at once; without one, bytes are counted."""
    assert status_of(BodyReader(10, 100), request(chunks(b"x" * 11), length=11)) == 413
    assert status_of(BodyReader(10, 100), request(chunks(b"x" * 6, b"x" * 6, b"rest"))) == 413


def test_the_total_of_bodies_is_limited() -> None:
    """While one large body is read, another is rejected; afterwards there is room again."""
    reader = BodyReader(10, 12)

    async def scenario() -> bytes:
        slow = asyncio.create_task(read(reader, request(chunks(b"x" * 9, more=True))))
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as caught:
            await read(reader, request(chunks(b"x" * 9)))
        assert caught.value.status == 503
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        return await read(reader, request(chunks(b"x" * 9)))

    assert run(scenario()) == b"x" * 9


def test_a_body_in_use_counts_towards_the_total() -> None:
    """A body in use counts towards the total limit."""
    reader = BodyReader(10, 12)

    async def scenario() -> None:
        async with reader.read(request(chunks(b"x" * 9))):
            with pytest.raises(ApiError) as caught:
                await read(reader, request(chunks(b"x" * 9)))
            assert caught.value.status == 503
        await read(reader, request(chunks(b"x" * 9)))

    run(scenario())


def test_a_body_that_never_ends_is_given_up() -> None:
    """A client that stops within its body gets 408."""
    assert status_of(BodyReader(10, 100, timeout_s=0.01), request(chunks(b"x", more=True))) == 408


def test_work_is_cancelled_when_its_client_leaves() -> None:
    """A disconnect cancels the work and raises ClientDisconnect."""
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def leave() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientDisconnect):
        run(unless_disconnected(leave, work()))
    assert ended == [True]


def test_work_that_ends_first_counts() -> None:
    """Result and error of the work are passed on while the client is connected."""

    async def result() -> int:
        return 5

    async def error() -> int:
        raise ApiError(400, "wrong")

    assert run(unless_disconnected(chunks(), result())) == 5
    with pytest.raises(ApiError, match="wrong"):
        run(unless_disconnected(chunks(), error()))


def test_a_stream_works_without_a_direct_connection() -> None:
    """Without a direct connection every piece goes through `send`, the last one with the end of the body."""
    sent: list[dict[str, Any]] = []
    ended: list[bool] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def rest() -> AsyncGenerator[bytes]:
        yield b"two"
        yield END_OF_EVENTS

    def write_to(_: object) -> None:
        pytest.fail("there is no connection to write to")

    stream = EventStream(b"one", rest(), lambda: ended.append(True), write_to=write_to)
    run(stream({"type": "http"}, chunks(more=True), send))
    assert [message.get("body") for message in sent] == [None, b"one", b"two", END_OF_EVENTS]
    assert [message.get("more_body") for message in sent] == [None, True, True, False]
    assert ended == [True]


@pytest.mark.parametrize("started", [False, True])
def test_a_cancelled_request_ends_quietly(started: bool) -> None:
    """At shutdown an unanswered request gets 503; an answered one is cut."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if started:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise asyncio.CancelledError

    run(quiet_end(app)({"type": "http"}, chunks(), send))
    statuses = [message["status"] for message in sent if "status" in message]
    assert statuses == ([200] if started else [503])
