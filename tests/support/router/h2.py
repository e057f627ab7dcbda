"""Plain gRPC echo service on any transport."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from router.h2 import GrpcServer
from router.h2.exchange_call import Exchange, ExchangeCall, ExchangeMethod
from tests.support.router.doors import TIMEOUT_S, wait_until

SERVICE = "kvroute.test.Plain"
# Threads that serve calls: the connection's own, or the server's pool.
TRANSPORTS = ("native", "threads")
MESSAGE_BYTES_MAX = 9 << 20
# Kinds of calls.
METHODS = ("unary", "server_stream", "exchange")


def path(method: str) -> str:
    """Return a method's path."""
    return f"/{SERVICE}/{method}"


@dataclass
class Plain:
    """Servicer of all kinds of calls; a request may name a fault that the servicer then performs.

    Attributes:
        released: Set by a test to release calls that are blocked by "hold".
        entered: Number of calls blocked by "hold".
        ended: Callbacks that have run.
        exchanges: All exchanges opened so far.
        orders: Further faults that a request may name, with their functions.
    """

    released: threading.Event = field(default_factory=threading.Event)
    entered: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ended: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    exchanges: list[Echo] = field(default_factory=list)
    orders: dict[str, Callable[[bytes, grpc.ServicerContext], bytes]] = field(default_factory=dict)

    def unary(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """Echo the request."""
        return self._obey(request, context)

    def server_stream(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Echo as often as the request's first number says."""
        count, _, rest = request.partition(b" ")
        for _ in range(int(count)):
            yield self._obey(rest, context)

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        """Return handlers for messages of bytes; a message that starts with "unreadable" cannot be parsed."""
        kinds = {
            "unary": grpc.unary_unary_rpc_method_handler,
            "server_stream": grpc.unary_stream_rpc_method_handler,
        }
        return {name: make(getattr(self, name), _parse, _written) for name, make in kinds.items()}

    def add_to(self, server: Any) -> None:
        """Register the service."""
        server.add_registered_method_handlers(SERVICE, self.handlers())
        server.add_exchange(path("exchange"), self.method())

    def method(self) -> ExchangeMethod:
        """Return the method whose streams echo."""
        return ExchangeMethod(self._exchange, _parse, _written)

    def _exchange(self, stream: ExchangeCall) -> Echo:
        self.exchanges.append(echo := Echo(self, stream))
        return echo

    def _obey(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        if not request.startswith(b"!"):
            return request
        order, _, rest = request[1:].partition(b" ")
        obey = self.orders.get(order.decode()) or getattr(self, f"_{order.decode()}")
        result: bytes = obey(rest, context)
        return result

    def _raise(self, rest: bytes, _context: grpc.ServicerContext) -> bytes:
        raise ValueError(rest.decode())

    def _abort(self, rest: bytes, context: grpc.ServicerContext) -> bytes:
        context.set_trailing_metadata((("why", "told"),))
        context.abort(grpc.StatusCode.DATA_LOSS, rest.decode())

    def _code(self, rest: bytes, context: grpc.ServicerContext) -> bytes:
        context.set_code(grpc.StatusCode.NOT_FOUND)
        context.set_details("not here, 100 % sure: ä\n")
        return rest

    def _large(self, rest: bytes, _context: grpc.ServicerContext) -> bytes:
        return bytes(int(rest))

    def _unwritable(self, _rest: bytes, _context: grpc.ServicerContext) -> bytes:
        return b"unwritable"

    def _hold(self, rest: bytes, context: grpc.ServicerContext) -> bytes:
        assert context.add_callback(self.ended.release)
        self.entered.release()
        while context.is_active() and not self.released.wait(0.01):
            pass
        return rest

    def _stuck(self, rest: bytes, _context: grpc.ServicerContext) -> bytes:
        self.entered.release()
        self.released.wait(TIMEOUT_S)
        return rest


class Echo(Exchange):
    """Exchange that echoes; it records concurrent use and use after close()."""

    def __init__(self, plain: Plain, stream: ExchangeCall) -> None:
        self._plain = plain
        self.stream = stream
        self._within = threading.Lock()
        self.finished = self.is_routed = False
        self.closes = 0
        self.faults: list[str] = []

    def answers(self, message: bytes) -> Iterator[bytes]:
        """Echo; "finish" ends the stream, "stuck" blocks its thread, and after "route" nothing blocks."""
        if not self._within.acquire(blocking=False) or self.closes:
            self.faults.append("used by two, or after its end")
        try:
            if message.startswith(b"!stuck"):
                self._plain.entered.release()
                self._plain.released.wait(TIMEOUT_S)
            if message.startswith(b"!raise"):
                raise ValueError("oh no")
            self.finished = message.startswith(b"!finish")
            self.is_routed = self.is_routed or message.startswith(b"!route")
        finally:
            self._within.release()
        yield message

    def last(self) -> tuple[()]:
        """Return no responses."""
        return ()

    def close(self) -> None:
        """Count the call."""
        self.closes += 1
        if not self._within.acquire(blocking=False):
            self.faults.append("closed while in use")
            return
        self._within.release()


def _parse(data: bytes) -> bytes:
    if data.startswith(b"unreadable"):
        raise ValueError("cannot be parsed")
    return data


def _written(message: bytes) -> bytes:
    if message.startswith(b"unwritable"):
        raise ValueError("cannot be serialized")
    return message


@dataclass
class Served:
    """Running server of a Plain service."""

    plain: Plain
    server: GrpcServer

    @property
    def address(self) -> str:
        """Return the server's address."""
        return f"127.0.0.1:{self.server.port}"

    def channel(self, **options: int) -> grpc.Channel:
        """Open a connection of its own that allows large messages."""
        more = [(f"grpc.{name}", value) for name, value in options.items()]
        sizes = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        return grpc.insecure_channel(self.address, [("grpc.use_local_subchannel_pool", 1), *sizes, *more])

    def assert_sound(self) -> None:
        """Check that a new client is served and nothing of earlier ones is left."""
        self._await_idle()
        with self.channel() as channel:
            assert caller(channel, "unary")(b"sound", timeout=TIMEOUT_S) == b"sound"
        self._await_idle()
        exchanges = self.plain.exchanges
        wait_until(lambda: all(one.closes for one in exchanges), "all exchanges are closed")
        assert {one.closes for one in exchanges} <= {1}
        assert not [fault for one in exchanges for fault in one.faults]

    def _await_idle(self) -> None:
        # The last calls of a connection may start after everything that a test saw of it.
        wait_until(lambda: self.server.connections == 0, "no connections are left")
        wait_until(lambda: self.server.open_calls == 0, "no calls are left")


def caller(channel: grpc.Channel, method: str) -> Any:
    """Return a method of Plain on a channel; messages are bytes."""
    kinds = {
        "unary": channel.unary_unary,
        "server_stream": channel.unary_stream,
        "exchange": channel.stream_stream,
    }
    return kinds.get(method, channel.unary_unary)(path(method))


@contextmanager
def serving(transport: str, *, threads: int = 32, requests_max: int = 256, **more: Any) -> Iterator[Served]:
    """Serve Plain on a free port."""
    plain = Plain()
    inline: dict[str, dict[str, int]] = {
        "native": {path("unary"): 1 << 16, path("exchange"): 1 << 16},
        "threads": {},
    }
    services: list[Callable[[Any], object]] = [plain.add_to, *more.pop("services", ())]
    server = GrpcServer(
        "--grpc-port",
        "127.0.0.1",
        0,
        threads=threads,
        requests_max=requests_max,
        message_bytes_max=0,
        receive_bytes_max=MESSAGE_BYTES_MAX,
        send_bytes_max=MESSAGE_BYTES_MAX,
        services=services,
        inline=inline[transport],
        **more,
    )
    server.start()
    try:
        yield Served(plain, server)
    finally:
        plain.released.set()
        server.close()
