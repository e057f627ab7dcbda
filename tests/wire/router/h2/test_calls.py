"""Calls of all kinds on each server transport: clients see the same on all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.support.router.doors import TIMEOUT_S
from tests.support.router.h2 import (
    MESSAGE_BYTES_MAX,
    METHODS,
    SERVICE,
    TRANSPORTS,
    Served,
    caller,
    path,
    serving,
)


@pytest.fixture(scope="module", params=TRANSPORTS)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """Return the plain service on each transport."""
    with serving(request.param) as served:
        yield served


@pytest.fixture(scope="module")
def channel(served: Served) -> Iterator[grpc.Channel]:
    """Return one connection for all tests of a transport."""
    with served.channel() as channel:
        yield channel


def _call(channel: grpc.Channel, method: str, request: bytes, **more: Any) -> tuple[list[bytes], grpc.Call]:
    """Call a method with one message; return all responses and the call."""
    call = caller(channel, method)
    more.setdefault("timeout", TIMEOUT_S)
    if method == "unary":
        answer, done = call.with_call(request, **more)
        return [answer], done
    begun = call(b"1 " + request if method == "server_stream" else iter([request]), **more)
    return list(begun), begun


def _failed(channel: grpc.Channel, method: str, request: bytes, **more: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        _call(channel, method, request, **more)
    return caught.value


def _status(error: Any) -> tuple[grpc.StatusCode, str]:
    return error.code(), error.details()


each_kind = pytest.mark.parametrize("method", METHODS)
each_servicer = pytest.mark.parametrize("method", ["unary", "server_stream"])


@each_kind
@pytest.mark.parametrize("size", [0, 1, 16_384, 65_535, 8 << 20])
def test_messages_of_any_size_pass_both_ways(channel: grpc.Channel, method: str, size: int) -> None:
    """Messages from empty to 8 MB come back unchanged."""
    message = bytes(range(256)) * (size // 256) + bytes(size % 256)
    assert _call(channel, method, message)[0] == [message]


def test_messages_of_a_stream_keep_their_order(channel: grpc.Channel) -> None:
    """A stream's messages are answered one by one in order; an empty stream gets no response messages."""
    messages = [b"%d" % number * (number % 50) for number in range(2000)]
    assert list(caller(channel, "exchange")(iter(messages), timeout=TIMEOUT_S)) == messages
    assert list(caller(channel, "server_stream")(b"2000 x", timeout=TIMEOUT_S)) == [b"x"] * 2000
    assert list(caller(channel, "exchange")(iter([]), timeout=TIMEOUT_S)) == []


@each_kind
@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_requests_are_read(channel: grpc.Channel, method: str, compression: Any) -> None:
    """A client may compress its messages."""
    message = b"again and again " * 10_000
    assert _call(channel, method, message, compression=compression)[0] == [message]


@each_servicer
def test_a_servicers_exception_is_unknown(channel: grpc.Channel, method: str) -> None:
    """A servicer's exception ends its call with UNKNOWN and the exception's text."""
    streams = method == "server_stream"
    what = "Exception iterating responses: " if streams else "Exception calling application: "
    assert _status(_failed(channel, method, b"!raise oh no")) == (grpc.StatusCode.UNKNOWN, what + "oh no")


@each_servicer
def test_abort_reports_code_details_and_metadata(channel: grpc.Channel, method: str) -> None:
    """A call ended by abort() reports its code, details and trailing metadata to the client."""
    error: Any = _failed(channel, method, b"!abort \xc3\xa4 100 %")
    assert _status(error) == (grpc.StatusCode.DATA_LOSS, "ä 100 %")
    assert ("why", "told") in error.trailing_metadata()


@each_servicer
def test_set_code_ends_the_call_with_it(channel: grpc.Channel, method: str) -> None:
    """set_code() and set_details() reach the client though the servicer returns normally."""
    error = _failed(channel, method, b"!code x")
    assert _status(error) == (grpc.StatusCode.NOT_FOUND, "not here, 100 % sure: ä\n")


@each_kind
def test_an_unparsable_request_is_internal(channel: grpc.Channel, method: str) -> None:
    """A request message that cannot be parsed ends the call with INTERNAL."""
    if method == "server_stream":
        call = caller(channel, method)(b"unreadable", timeout=TIMEOUT_S)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        error: Any = caught.value
    else:
        error = _failed(channel, method, b"unreadable")
    assert _status(error) == (grpc.StatusCode.INTERNAL, "Exception deserializing request!")


@each_servicer
def test_an_unserializable_response_is_internal(channel: grpc.Channel, method: str) -> None:
    """A response that cannot be serialized ends the call with INTERNAL."""
    error = _failed(channel, method, b"!unwritable")
    assert _status(error) == (grpc.StatusCode.INTERNAL, "Failed to serialize response!")


@each_kind
def test_oversized_requests_are_rejected(channel: grpc.Channel, method: str) -> None:
    """A request above the limit, before or after decompression, ends with RESOURCE_EXHAUSTED."""
    message = bytes(MESSAGE_BYTES_MAX + 1)
    for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
        error: Any = _failed(channel, method, message, compression=compression)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@each_kind
def test_a_request_at_the_limit_is_served(channel: grpc.Channel, method: str) -> None:
    """A request of exactly the limit is served, compressed or not."""
    message = bytes(MESSAGE_BYTES_MAX - (2 if method == "server_stream" else 0))
    for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
        assert _call(channel, method, message, compression=compression)[0] == [message]


@each_servicer
def test_oversized_responses_are_rejected(channel: grpc.Channel, method: str) -> None:
    """A response above the limit ends with RESOURCE_EXHAUSTED."""
    error: Any = _failed(channel, method, b"!large %d" % (MESSAGE_BYTES_MAX + 1))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    sizes = f"({MESSAGE_BYTES_MAX + 1} vs. {MESSAGE_BYTES_MAX})"
    assert error.details().endswith(f"Sent message larger than max {sizes}")


def test_unknown_methods_are_unimplemented(channel: grpc.Channel) -> None:
    """A method that is not registered ends with UNIMPLEMENTED."""
    with pytest.raises(grpc.RpcError) as caught:
        caller(channel, "nothing")(b"", timeout=TIMEOUT_S)
    assert _status(caught.value) == (grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


@each_servicer
def test_a_deadline_ends_the_servicer_too(served: Served, channel: grpc.Channel, method: str) -> None:
    """A client whose deadline passes gets DEADLINE_EXCEEDED, and the servicer's callbacks run."""
    # Large enough to be served in the pool: the connection's thread could not notice the client's reset.
    error: Any = _failed(channel, method, b"!hold " + bytes(1 << 17), timeout=0.5)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert served.plain.entered.acquire(timeout=TIMEOUT_S)
    assert served.plain.ended.acquire(timeout=TIMEOUT_S)


def test_a_cancelled_stream_ends_its_servicer(served: Served, channel: grpc.Channel) -> None:
    """Cancelling a stream wakes the servicer and runs its callbacks."""
    begun = caller(channel, "server_stream")(b"1 !hold x")
    assert served.plain.entered.acquire(timeout=TIMEOUT_S)
    begun.cancel()
    assert served.plain.ended.acquire(timeout=TIMEOUT_S)


def test_calls_on_one_connection_get_their_own_responses(channel: grpc.Channel) -> None:
    """A hundred concurrent calls of all kinds on one connection each get their own response."""

    def call(number: int) -> bool:
        method = METHODS[number % len(METHODS)]
        message = b"%d " % number * (1 + number * 997 % 40_000)
        return _call(channel, method, message)[0] == [message]

    with ThreadPoolExecutor(100) as pool:
        assert all(pool.map(call, range(400)))


def test_large_messages_on_one_connection_do_not_deadlock(channel: grpc.Channel) -> None:
    """Concurrent messages that together exceed the connection's window all complete."""
    message = bytes(4 << 20)

    def call(number: int) -> int:
        return len(_call(channel, ("unary", "exchange")[number % 2], message, timeout=60)[0][0])

    with ThreadPoolExecutor(24) as pool:
        assert set(pool.map(call, range(24))) == {len(message)}


def test_many_connections_are_served_at_once(served: Served) -> None:
    """Each client on a connection of its own gets its own responses."""

    def call(number: int) -> bool:
        message = b"%d" % number
        with served.channel() as own:
            return _call(own, "exchange", message)[0] == _call(own, "unary", message)[0] == [message]

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(call, range(64)))


def test_asyncio_clients_are_served(served: Served) -> None:
    """The asyncio client gets the same responses as the synchronous one, for all kinds of calls."""

    async def kinds(channel: grpc.aio.Channel, number: int) -> bool:
        message = b"%d " % number * 1000
        unary = await channel.unary_unary(path("unary"))(message, timeout=TIMEOUT_S)
        bidi = channel.stream_stream(path("exchange"))(timeout=TIMEOUT_S)
        echoes = []
        for _ in range(3):
            await bidi.write(message)
            echoes.append(await bidi.read())
        await bidi.done_writing()
        assert await bidi.read() is grpc.aio.EOF
        stream = channel.unary_stream(path("server_stream"))(b"3 " + message, timeout=TIMEOUT_S)
        several = [answer async for answer in stream]
        return unary == message and echoes == several == [message] * 3

    async def cancelled(channel: grpc.aio.Channel) -> None:
        bidi = channel.stream_stream(path("exchange"))(timeout=TIMEOUT_S)
        await bidi.write(b"one")
        assert await bidi.read() == b"one"
        bidi.cancel()
        with pytest.raises(asyncio.CancelledError):
            await bidi.read()

    async def everything() -> None:
        async with grpc.aio.insecure_channel(served.address) as channel:
            assert all(await asyncio.gather(*(kinds(channel, number) for number in range(50))))
            await asyncio.gather(*(cancelled(channel) for _ in range(20)))
            assert await kinds(channel, 99)

    asyncio.run(everything())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_health_can_be_watched(transport: str) -> None:
    """A health Watch reports each change until its client leaves, and open watches do not delay close()."""
    servicer = health.HealthServicer()
    servicer.set("x", health_pb2.HealthCheckResponse.SERVING)

    def add(server: Any) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)

    with serving(transport, services=[add]) as served, served.channel() as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest(service="x"), timeout=60) for _ in range(5)]
        assert [next(watch).status for watch in watches] == [health_pb2.HealthCheckResponse.SERVING] * 5
        servicer.set("x", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert [next(watch).status for watch in watches] == [health_pb2.HealthCheckResponse.NOT_SERVING] * 5
        # The second response comes only after the change.
        watches.pop().cancel()
        assert stub.Check(health_pb2.HealthCheckRequest(service="x")).status == 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_reflection_lists_the_services(transport: str) -> None:
    """Reflection lists the registered services."""
    with serving(transport, reflects=True) as served, served.channel() as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = stub.ServerReflectionInfo(iter([ask]), timeout=TIMEOUT_S)
        names = {service.name for service in answer.list_services_response.service}
        assert names == {SERVICE, "grpc.reflection.v1alpha.ServerReflection"}
