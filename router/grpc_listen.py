"""The gRPC servers: services in, bound listeners out. Knows nothing of what the services do."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpc_reflection.v1alpha import reflection

from router.h2 import GrpcServer

_MESSAGE_OVERHEAD_BYTES = 1 << 20


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
    tls: Callable[[], ssl.SSLContext] | None = None,
    receive_bytes_max: int | None = None,
    send_bytes_max: int | None = None,
    inline: Mapping[str, int] | None = None,
) -> GrpcServer:
    """Makes a server that is bound but not started.

    Args:
        flag: The flag that chose the port, for the error.
        threads: Calls served at once on threads of their own.
        requests_max: Calls in all; beyond that they are refused with RESOURCE_EXHAUSTED.
        message_bytes_max: Largest body that one message may carry.
        services: Each adds a service to the listener that it is given.
        service_names: What reflection shows; none: no reflection.
        tls: Makes the context of the next connection that speaks TLS; None: plaintext alone.
        receive_bytes_max, send_bytes_max: Largest messages; None: from message_bytes_max.
        inline: Methods that a connection's own thread may serve, up to so many bytes; None: none.

    Raises:
        ListenError: The address is in use or not ours.
    """
    size = message_bytes_max + _MESSAGE_OVERHEAD_BYTES
    listener = GrpcServer(
        flag,
        host,
        port,
        threads=threads,
        requests_max=requests_max,
        receive_bytes_max=receive_bytes_max or size,
        send_bytes_max=send_bytes_max or size,
        inline=inline or {},
        tls=tls,
    )
    for add in services:
        add(listener)
    if service_names:
        shown: Any = listener
        reflection.enable_server_reflection((*service_names, reflection.SERVICE_NAME), shown)
    return listener
