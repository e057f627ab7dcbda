"""The gRPC servers: services in, bound listeners out. Knows nothing of what the services do.

Without TLS a server of our own serves them, which costs a third of grpcio; with TLS, or if asked to, grpcio.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import grpc
from grpc_reflection.v1alpha import reflection

from router.errors import ListenError
from router.h2 import GrpcServer

_MESSAGE_OVERHEAD_BYTES = 1 << 20
_STOP_S = 2.0


class GrpcListener(Protocol):
    """A gRPC server, whoever made it.

    Attributes:
        port: The port listened on.
    """

    port: int

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """As grpc.Server's."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """As grpc.Server's."""

    def start(self) -> None:
        """Begins to serve."""

    def drain(self) -> None:
        """Has clients go elsewhere for their next calls, where that can be told."""

    def close(self) -> None:
        """Ends serving, calls included. Idempotent."""


class _Grpcio:
    """grpcio's server as a listener, bound when made; arguments as `listen`'s."""

    def __init__(
        self,
        flag: str,
        host: str,
        port: int,
        *,
        credentials: grpc.ServerCredentials | None,
        threads: int,
        requests_max: int,
        receive_bytes_max: int,
        send_bytes_max: int,
    ) -> None:
        server = grpc.server(
            ThreadPoolExecutor(threads, thread_name_prefix="grpc"),
            options=[
                # Two routers on one port would share its requests without a word.
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", receive_bytes_max),
                ("grpc.max_send_message_length", send_bytes_max),
            ],
            maximum_concurrent_rpcs=requests_max,
        )
        self._server = server
        self.port = _bind(server, flag, host, port, credentials)
        self.add_generic_rpc_handlers = server.add_generic_rpc_handlers
        # The types' stubs do not know it; generated code calls it.
        self.add_registered_method_handlers = getattr(server, "add_registered_method_handlers")  # noqa: B009

    def start(self) -> None:
        """See `GrpcListener`."""
        self._server.start()

    def drain(self) -> None:
        """grpcio tells its clients only when it ends."""

    def close(self) -> None:
        """See `GrpcListener`."""
        # gRPC never ends a call whose message it could not read, and would wait for it for ever.
        self._server.stop(grace=0).wait(_STOP_S)


def listen(
    flag: str,
    host: str,
    port: int,
    *,
    threads: int,
    requests_max: int,
    message_bytes_max: int,
    services: Sequence[Callable[[Any], object]],
    service_names: Sequence[str] = (),
    credentials: grpc.ServerCredentials | None = None,
    receive_bytes_max: int | None = None,
    send_bytes_max: int | None = None,
    inline: Mapping[str, int] | None = None,
) -> GrpcListener:
    """Makes a server that is bound but not started.

    Args:
        flag: The flag that chose the port, for the error.
        threads: Calls served at once on threads of their own.
        requests_max: Calls in all; beyond that they are refused with RESOURCE_EXHAUSTED.
        message_bytes_max: Largest body that one message may carry.
        services: Each adds a service to the listener that it is given.
        service_names: What reflection shows; none: no reflection.
        credentials: For TLS; None: plaintext.
        receive_bytes_max, send_bytes_max: Largest messages; None: from message_bytes_max.
        inline: Methods that a connection's own thread may serve, up to so many bytes; None: grpcio serves.

    Raises:
        ListenError: The address is in use or not ours.
    """
    size = message_bytes_max + _MESSAGE_OVERHEAD_BYTES
    receive_max, send_max = receive_bytes_max or size, send_bytes_max or size
    make: Callable[..., GrpcListener] = partial(_Grpcio, credentials=credentials)
    if inline is not None and credentials is None:
        make = partial(GrpcServer, inline=inline)
    listener = make(
        flag,
        host,
        port,
        threads=threads,
        requests_max=requests_max,
        receive_bytes_max=receive_max,
        send_bytes_max=send_max,
    )
    for add in services:
        add(listener)
    if service_names:
        shown: Any = listener
        reflection.enable_server_reflection((*service_names, reflection.SERVICE_NAME), shown)
    return listener


def _bind(
    server: grpc.Server, flag: str, host: str, port: int, credentials: grpc.ServerCredentials | None
) -> int:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ListenError(f"{flag} {port}: cannot listen on {address}: {error}") from error
