"""gRPC server: accepts connections, reads each by one thread and limits concurrent calls."""

from __future__ import annotations

import logging
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any

from grpc_reflection.v1alpha import reflection, reflection_pb2

from common.repeated_log import RepeatedLog
from router.errors import ListenError
from router.h2.calls import Call, ServicerCall
from router.h2.exchange_call import Exchange, ExchangeCall, ExchangeMethod
from router.h2.peer import Peer, host_of
from router.h2.streams import Stream

_log = logging.getLogger(__name__)
_repeated = RepeatedLog(_log)

_MESSAGE_OVERHEAD_BYTES = 1 << 20
CONNECTIONS_MAX = 1024
# A client that reads nothing for this long, or stops inside a frame, is disconnected; see `Peer`.
SOCKET_TIMEOUT_S = 10
_KEEPALIVE_S = 60
_REFUSALS_MAX = 4096
_STOP_S = 2.0
_RETRY_S = 1.0
_BACKLOG = 1024  # pending connections of listen(2)
# At the limit of calls, a request that has been incomplete for longer is cancelled for a new call.
_REQUEST_TIMEOUT_S = 2.0


@dataclass(eq=False)
class GrpcServer:
    """gRPC server on one port; binds in the constructor, serves from `start` on.

    Accepts servicers like grpc.Server (unary requests only), and exchanges: bidirectional streams answered
    message by message.

    Raises:
        ListenError: The address is in use or does not belong to this host.
    """

    flag: str  # flag that set the port, for error messages
    host: str
    port: int  # 0 binds a free port, whose number it becomes
    threads: InitVar[int]  # size of the pool that serves calls outside their connection's thread
    requests_max: int  # concurrent calls; further ones end with RESOURCE_EXHAUSTED
    message_bytes_max: InitVar[int]  # limit of a request body within a message
    services: InitVar[Sequence[Callable[[Any], object]]]  # each adds a service to the given server
    inline: Mapping[
        str, int
    ]  # by method path, request bytes up to which the connection's thread serves calls
    reflects: InitVar[bool] = False
    tls: Callable[[], ssl.SSLContext] | None = None  # returns the context for a new TLS connection
    plaintext: bool = True
    receive_bytes_max: int = 0  # limit of a received message; 0: message_bytes_max plus 1 MiB
    send_bytes_max: int = 0  # likewise of a sent one

    def __post_init__(
        self,
        threads: int,
        message_bytes_max: int,
        services: Sequence[Callable[[Any], object]],
        reflects: bool,
    ) -> None:
        self._socket = bound_socket(self.flag, self.host, self.port)
        self.port = self._socket.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name=f"grpc-{self.port}", daemon=True)
        size = message_bytes_max + _MESSAGE_OVERHEAD_BYTES
        self.receive_bytes_max = self.receive_bytes_max or size
        self.send_bytes_max = self.send_bytes_max or size
        # Announced to clients. Far above the limit of calls, so that calls are rejected rather than queued.
        self.streams_max = self.requests_max + _REFUSALS_MAX
        self._methods: dict[str, Callable[[Peer, Stream], Call]] = {}
        self.open_calls = 0
        # Exchange streams with their start time (monotonic seconds), oldest first.
        self._exchanges: dict[Stream, float] = {}
        self._lock = threading.Lock()
        self._peers: dict[Peer, threading.Thread] = {}
        self._is_closed = False
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="grpc")
        for add in services:
            add(self)
        if reflects:
            names = {path.split("/")[1] for path in self._methods}
            shown = reflection.ReflectionServicer((*names, reflection.SERVICE_NAME))
            method = ExchangeMethod(
                lambda _call: _Reflection(shown),
                reflection_pb2.ServerReflectionRequest.FromString,
                reflection_pb2.ServerReflectionResponse.SerializeToString,
            )
            self.add_exchange(f"/{reflection.SERVICE_NAME}/ServerReflectionInfo", method)

    @property
    def connections(self) -> int:
        return len(self._peers)

    def add_generic_rpc_handlers(self, _handlers: Sequence[Any]) -> None:
        """Do nothing: generated code also registers each handler as a registered method."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        for name, handler in handlers.items():
            self._methods[f"/{service}/{name}"] = partial(ServicerCall, handler=handler)

    def add_exchange(self, path: str, method: ExchangeMethod) -> None:
        self._methods[path] = partial(ExchangeCall, method=method)

    def find(self, path: str) -> Callable[[Peer, Stream], Call] | None:
        """Return the function that starts a call of this path, or None."""
        return self._methods.get(path)

    def start(self) -> None:
        self._acceptor.start()

    def drain(self) -> None:
        """Send GOAWAY to all clients, so that they open new connections for further calls."""
        for peer in self._connected():
            peer.drain()

    def close(self) -> None:
        """Stop serving and end all calls. Idempotent."""
        self._is_closed = True
        # close() alone would not wake the thread that is blocked in accept().
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._acceptor.is_alive():
            self._acceptor.join(_STOP_S)
        peers = self._connected()
        for peer in peers:
            peer.close()
        end_s = time.monotonic() + _STOP_S
        for thread in peers.values():
            thread.join(max(0.0, end_s - time.monotonic()))
        self._pool.shutdown(wait=False, cancel_futures=True)

    def begin_call(self) -> bool:
        """Reserve a slot for a call, if necessary by cancelling a slow one; return whether it succeeded."""
        return self._acquire_slot() or (self._cancel_slowest() and self._acquire_slot())

    def end_call(self, stream: Stream) -> None:
        """Free the slot of a call."""
        with self._lock:
            self.open_calls -= 1
            self._exchanges.pop(stream, None)

    def track_exchange(self, stream: Stream) -> None:
        """Record a stream's start time; it may be cancelled while its request is incomplete."""
        with self._lock:
            self._exchanges[stream] = time.monotonic()

    def run(self, task: Callable[[], object]) -> None:
        # submit() fails only while the server closes, when the response is no longer needed.
        with suppress(RuntimeError):
            self._pool.submit(task)

    def _acquire_slot(self) -> bool:
        with self._lock:
            is_free = self.open_calls < self.requests_max
            self.open_calls += is_free
        return is_free

    def _cancel_slowest(self) -> bool:
        """Cancel the oldest stream whose request is overdue, lest slow clients occupy all slots."""
        latest_s = time.monotonic() - _REQUEST_TIMEOUT_S
        with self._lock:
            old = [stream for stream, opened_s in self._exchanges.items() if opened_s <= latest_s]
        for stream in old:
            call = stream.call
            if isinstance(call, ExchangeCall) and call.is_slow:
                text = "call limit reached, cancelling slow requests: limit=%d"
                _repeated.event("slow_request", "places", text, self.requests_max)
                call.cancel_slow()
                return True
        return False

    def _connected(self) -> dict[Peer, threading.Thread]:
        with self._lock:
            return dict(self._peers)

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._socket.accept()
            except OSError as error:
                if self._is_closed:
                    return
                # For example no free file descriptors: pending connections are served once some are free.
                text = "accept failed: port=%d error=%s"
                _repeated.event("accept_failed", f"port {self.port}", text, self.port, error)
                time.sleep(_RETRY_S)
                continue
            self._add_connection(connection, address)

    def _add_connection(self, connection: socket.socket, address: Any) -> None:
        name = f"{address[0]}:{address[1]}"
        peer = Peer(self, connection, name)
        thread = threading.Thread(target=self._serve, args=(peer,), name="grpc-peer", daemon=True)
        try:
            _set_up(connection)
            idle = self._add(peer, thread)
            thread.start()
        except (OSError, RuntimeError) as error:
            # For example no more threads: keep serving the existing connections.
            text = "gRPC connection rejected: client=%s error=%s"
            _repeated.event("connection_refused", f"refused {host_of(name)}", text, name, error)
            with self._lock:
                self._peers.pop(peer, None)
            connection.close()
            return
        if idle is not None:
            text = "too many gRPC connections, closing an idle one: client=%s"
            _repeated.event("connection_displaced", f"displaced {host_of(idle.peer)}", text, idle.peer)
            idle.close()

    def _add(self, peer: Peer, thread: threading.Thread) -> Peer | None:
        """Register a connection; at the limit, return the oldest idle one, which the caller must close."""
        with self._lock:
            is_full = len(self._peers) >= CONNECTIONS_MAX
            idle = next((peer for peer in self._peers if peer.is_idle), None) if is_full else None
            if self._is_closed or (is_full and idle is None):
                raise OSError("too many connections")
            if idle is not None:
                del self._peers[idle]
            self._peers[peer] = thread
        return idle

    def _serve(self, peer: Peer) -> None:
        try:
            peer.serve()
        except Exception as error:
            _repeated.event(
                "connection_failed", "failed", "gRPC connection failed", level=logging.ERROR, error=error
            )
        finally:
            with self._lock:
                self._peers.pop(peer, None)


class _Reflection(Exchange):
    """Exchange that serves gRPC reflection by grpcio's servicer."""

    def __init__(self, servicer: reflection.ReflectionServicer) -> None:
        self._servicer = servicer

    def answers(self, message: reflection_pb2.ServerReflectionRequest) -> Iterator[Any]:
        answers: Iterator[Any] = self._servicer.ServerReflectionInfo(iter((message,)), None)
        return answers


def _set_up(connection: socket.socket) -> None:
    # Kernel timeouts, because Python's own cost a second system call per message.
    wait = struct.pack("ll", SOCKET_TIMEOUT_S, 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)


def bound_socket(flag: str, host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        ListenError: The address is in use or does not belong to this host.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ListenError(f"{flag} {port}: cannot listen on {host}:{port}: {error.strerror}") from error
