"""The gRPC server: a port and methods in, served calls out. One thread reads each connection."""

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
from typing import Any

from grpc_reflection.v1alpha import reflection, reflection_pb2

from common.repeated_log import RepeatedLog
from router.errors import ListenError
from router.h2.exchange_call import ExchangeCall, ExchangeMethod
from router.h2.peer import Peer, host_of
from router.h2.streams import Stream

_log = logging.getLogger(__name__)
_repeated = RepeatedLog(_log)

_MESSAGE_OVERHEAD_BYTES = 1 << 20
CONNECTIONS_MAX = 1024
# A client that takes nothing for so long is gone; so is one within a frame, see `Peer`.
SOCKET_TIMEOUT_S = 10
_KEEPALIVE_S = 60
_REFUSALS_MAX = 4096
_STOP_S = 2.0
_RETRY_S = 1.0
_BACKLOG = 1024  # connections that wait to be accepted
# A client that needs longer for its request gives way to others.
_PATIENCE_S = 2.0


class GrpcServer:
    """Bound when made, serving from `start` on.

    Takes servicers as grpc.Server does, whose methods have one message in, and exchanges: streams that are
    answered message by message.

    Args:
        flag: The flag that chose the port, for the error.
        threads: Calls served at once by other threads than their connection's.
        requests_max: Calls in all; beyond that they are refused with RESOURCE_EXHAUSTED.
        services: Each adds a service to the server that it is given.
        reflects: Whether clients may ask for the services.
        tls: Makes the context of the next connection that begins with TLS; None: there is plaintext alone.
        receive_bytes_max, send_bytes_max: Largest messages; None: one with a body of message_bytes_max.
        inline: Methods by path that a connection's own thread may serve, up to so many bytes of a call.

    Raises:
        ListenError: The address is in use or not ours.
    """

    def __init__(
        self,
        flag: str,
        host: str,
        port: int,
        *,
        threads: int,
        requests_max: int,
        message_bytes_max: int,
        services: Sequence[Callable[[Any], object]],
        reflects: bool = False,
        tls: Callable[[], ssl.SSLContext] | None = None,
        receive_bytes_max: int | None = None,
        send_bytes_max: int | None = None,
        inline: Mapping[str, int],
    ) -> None:
        self._socket = bound_socket(flag, host, port)
        self.port: int = self._socket.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name=f"grpc-{self.port}", daemon=True)
        self.tls = tls
        size = message_bytes_max + _MESSAGE_OVERHEAD_BYTES
        self.receive_bytes_max = receive_bytes_max or size
        self.send_bytes_max = send_bytes_max or size
        self.inline = inline
        self._calls_max = requests_max
        # Told to clients; so much above what is served that they are refused rather than kept waiting.
        self.streams_max = requests_max + _REFUSALS_MAX
        self._methods: dict[str, ExchangeMethod | Any] = {}
        self._calls = 0
        # Streams of exchanges with the time of their beginning (monotonic), the oldest first.
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
    def open_calls(self) -> int:
        """Calls that hold a place now."""
        with self._lock:
            return self._calls

    @property
    def connections(self) -> int:
        return len(self._peers)

    def add_generic_rpc_handlers(self, _handlers: Sequence[Any]) -> None:
        """Generated code adds each handler in the other way too."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        for name, handler in handlers.items():
            self._methods[f"/{service}/{name}"] = handler

    def add_exchange(self, path: str, method: ExchangeMethod) -> None:
        self._methods[path] = method

    def find(self, path: str) -> ExchangeMethod | Any | None:
        """The method, or grpcio's handler, for a path; None: there is none."""
        return self._methods.get(path)

    def start(self) -> None:
        self._acceptor.start()

    def drain(self) -> None:
        """Has clients connect anew, and so elsewhere, for their next calls."""
        for peer in self._connected():
            peer.drain()

    def close(self) -> None:
        """Ends serving, calls included. Idempotent."""
        self._is_closed = True
        # Closing alone would leave the thread waiting.
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
        """Whether there is a place for one more call; it is taken then."""
        return self._take_place() or (self._cut_slowest() and self._take_place())

    def end_call(self, stream: Stream) -> None:
        """A place is free again."""
        with self._lock:
            self._calls -= 1
            self._exchanges.pop(stream, None)

    def note_exchange(self, stream: Stream) -> None:
        """A stream's call may be cut off as long as its request has not come."""
        with self._lock:
            self._exchanges[stream] = time.monotonic()

    def run(self, task: Callable[[], object]) -> None:
        # While the server closes nobody waits for the answer any more.
        with suppress(RuntimeError):
            self._pool.submit(task)

    def _take_place(self) -> bool:
        with self._lock:
            is_free = self._calls < self._calls_max
            self._calls += is_free
        return is_free

    def _cut_slowest(self) -> bool:
        """Cut off the oldest stream whose request has not come in time, if there is any.

        A client that sends its request slowly, or not at all, would hold its place as long as it likes.
        """
        latest_s = time.monotonic() - _PATIENCE_S
        with self._lock:
            old = [stream for stream, opened_s in self._exchanges.items() if opened_s <= latest_s]
        for stream in old:
            call = stream.call
            if isinstance(call, ExchangeCall) and call.is_slow:
                _repeated.event(
                    "slow_request",
                    "places",
                    "all %d places for calls are taken; requests that come too slowly are cut off",
                    self._calls_max,
                )
                call.cut()
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
                # Out of file descriptors, say: whoever waits is served when some are free again.
                where = f"port {self.port}"
                _repeated.event("accept_failed", where, "%s: cannot accept a connection: %s", where, error)
                time.sleep(_RETRY_S)
                continue
            self._take(connection, address)

    def _take(self, connection: socket.socket, address: Any) -> None:
        name = f"{address[0]}:{address[1]}"
        peer = Peer(self, connection, name)
        thread = threading.Thread(target=self._serve, args=(peer,), name="grpc-peer", daemon=True)
        try:
            _set_up(connection)
            idle = self._add(peer, thread)
            thread.start()
        except (OSError, RuntimeError) as error:
            # The system has no more threads, say; those who are served already shall go on.
            _repeated.event(
                "connection_refused",
                f"refused {host_of(name)}",
                "a gRPC connection from %s is not served: %s",
                name,
                error,
            )
            with self._lock:
                self._peers.pop(peer, None)
            connection.close()
            return
        if idle is not None:
            _repeated.event(
                "connection_displaced",
                f"displaced {host_of(idle.peer)}",
                "too many gRPC connections: an idle one from %s is ended",
                idle.peer,
            )
            idle.close()

    def _add(self, peer: Peer, thread: threading.Thread) -> Peer | None:
        """Takes a connection in; the oldest without calls that has to go for it, if any.

        Raises:
            OSError: There are too many.
        """
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
                "connection_failed", "failed", "a gRPC connection failed", level=logging.ERROR, error=error
            )
        finally:
            with self._lock:
                self._peers.pop(peer, None)


class _Reflection:
    """The exchange of a client that asks for the services; grpcio's servicer answers."""

    finished, is_routed = False, True

    def __init__(self, servicer: reflection.ReflectionServicer) -> None:
        self._servicer = servicer

    def answers(self, message: reflection_pb2.ServerReflectionRequest) -> Iterator[Any]:
        answers: Iterator[Any] = self._servicer.ServerReflectionInfo(iter((message,)), None)
        return answers

    def last(self) -> tuple[()]:
        return ()

    def close(self) -> None:
        pass


def _set_up(connection: socket.socket) -> None:
    # The kernel's own timeouts: Python's would ask twice for every message.
    wait = struct.pack("ll", SOCKET_TIMEOUT_S, 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)


def bound_socket(flag: str, host: str, port: int) -> socket.socket:
    """Return a listening socket; a ListenError: the address is in use or not ours."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ListenError(f"{flag} {port}: cannot listen on {host}:{port}: {error.strerror}") from error
