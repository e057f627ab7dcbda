"""A plain gRPC service of bytes, on any transport."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from router.h2 import GrpcServer
from router.h2.exchange_call import ExchangeCall, ExchangeMethod
from tests.wire.router_wire_support import TIMEOUT_S, wait_until

SERVICE = "kvroute.test.Plain"
# Who serves calls: their connection's own thread, or the server's other threads.
TRANSPORTS = ("native", "threads")
MESSAGE_BYTES_MAX = 9 << 20
# All kinds of calls.
METHODS = ("unary", "server_stream", "exchange")


def path(method: str) -> str:
    """A method's path."""
    return f"/{SERVICE}/{method}"


@dataclass
class Plain:
    """Servicer of all kinds of calls; a request that names an attack or an oddity gets it.

    Attributes:
        released: Set by a test to let go the calls that "hold" keeps.
        entered: Counts the calls that hold.
        ended: Callbacks that were called.
        exchanges: All that were opened.
        orders: More that a request may name, with what is to be done.
    """

    released: threading.Event = field(default_factory=threading.Event)
    entered: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ended: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    exchanges: list[Echo] = field(default_factory=list)
    orders: dict[str, Callable[[bytes, grpc.ServicerContext], bytes]] = field(default_factory=dict)

    def unary(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """Echoes."""
        return self._obey(request, context)

    def server_stream(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Echoes as often as the request's first number says."""
        count, _, rest = request.partition(b" ")
        for _ in range(int(count)):
            yield self._obey(rest, context)

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        """The methods, with messages that are bytes; one beginning with "unreadable" cannot be parsed."""
        kinds = {
            "unary": grpc.unary_unary_rpc_method_handler,
            "server_stream": grpc.unary_stream_rpc_method_handler,
        }
        return {name: make(getattr(self, name), _parse, _written) for name, make in kinds.items()}

    def add_to(self, server: Any) -> None:
        """Serves this."""
        server.add_registered_method_handlers(SERVICE, self.handlers())
        server.add_exchange(path("exchange"), ExchangeMethod(self._exchange, _parse, _written))

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


class Echo:
    """An exchange that echoes; it notices whoever uses it at the same time as another, or after its end."""

    def __init__(self, plain: Plain, stream: ExchangeCall) -> None:
        self._plain = plain
        self.stream = stream
        self._within = threading.Lock()
        self.finished = self.is_routed = False
        self.closes = 0
        self.faults: list[str] = []

    def answers(self, message: bytes) -> Iterator[bytes]:
        """Echoes; "finish" ends the stream, "stuck" keeps its thread, behind "route" nothing does."""
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
        """Says nothing."""
        return ()

    def close(self) -> None:
        """Counts."""
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
    """A served Plain."""

    plain: Plain
    server: GrpcServer

    @property
    def address(self) -> str:
        """Of the server."""
        return f"127.0.0.1:{self.server.port}"

    def channel(self, **options: int) -> grpc.Channel:
        """A connection of its own, which takes and gives large messages."""
        more = [(f"grpc.{name}", value) for name, value in options.items()]
        sizes = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        return grpc.insecure_channel(self.address, [("grpc.use_local_subchannel_pool", 1), *sizes, *more])

    def assert_sound(self) -> None:
        """A new client is served, and nothing is left of the ones before it."""
        self._await_idle()
        with self.channel() as channel:
            assert caller(channel, "unary")(b"sound", timeout=TIMEOUT_S) == b"sound"
        self._await_idle()
        exchanges = self.plain.exchanges
        wait_until(lambda: all(one.closes for one in exchanges), "all exchanges are closed")
        assert {one.closes for one in exchanges} <= {1}
        assert not [fault for one in exchanges for fault in one.faults]

    def _await_idle(self) -> None:
        # A connection's last calls may begin after all that a test has seen of it.
        wait_until(lambda: self.server.connections == 0, "no connections are left")
        wait_until(lambda: self.server.open_calls == 0, "no calls are left")


def caller(channel: grpc.Channel, method: str) -> Any:
    """A method of Plain on a channel; messages are bytes."""
    kinds = {
        "unary": channel.unary_unary,
        "server_stream": channel.unary_stream,
        "exchange": channel.stream_stream,
    }
    return kinds.get(method, channel.unary_unary)(path(method))


@contextmanager
def serving(transport: str, *, threads: int = 32, requests_max: int = 256, **more: Any) -> Iterator[Served]:
    """Plain on a free port."""
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
