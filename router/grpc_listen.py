"""The gRPC servers: services in, listening servers out. Knows nothing of what the services do."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_reflection.v1alpha import reflection

from router.errors import ListenError

_MESSAGE_OVERHEAD_BYTES = 1 << 20


def check_free(flag: str, host: str, port: int) -> None:
    """Tries an address before anything is built for it; gRPC's own complaint is long and names no flag.

    Raises:
        ListenError: The address is in use or not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ListenError(f"{flag} {port}: cannot listen on {host}:{port}: {error.strerror}") from error


def listen(
    flag: str,
    host: str,
    port: int,
    *,
    threads: int,
    requests_max: int,
    message_bytes_max: int,
    services: Sequence[Callable[[grpc.Server], object]],
    service_names: Sequence[str] = (),
    credentials: grpc.ServerCredentials | None = None,
    receive_bytes_max: int | None = None,
    send_bytes_max: int | None = None,
    interceptors: Sequence[grpc.ServerInterceptor] = (),
) -> tuple[grpc.Server, int]:
    """Makes a server that is bound but not started.

    Args:
        flag: The flag that chose the port, for the error.
        threads: Calls served at once.
        requests_max: Calls in all; beyond that they are refused with RESOURCE_EXHAUSTED.
        message_bytes_max: Largest body that one message may carry.
        service_names: What reflection shows; none: no reflection.
        credentials: For TLS; None: plaintext.
        receive_bytes_max, send_bytes_max: Largest messages; None: from message_bytes_max.

    Returns:
        The server and its port.

    Raises:
        ListenError: The address is in use or not ours.
    """
    size = message_bytes_max + _MESSAGE_OVERHEAD_BYTES
    server = grpc.server(
        ThreadPoolExecutor(threads, thread_name_prefix="grpc"),
        options=[
            # Two routers on one port would share its requests without a word.
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", receive_bytes_max or size),
            ("grpc.max_send_message_length", send_bytes_max or size),
        ],
        interceptors=list(interceptors),
        maximum_concurrent_rpcs=requests_max,
    )
    for add in services:
        add(server)
    if service_names:
        reflection.enable_server_reflection((*service_names, reflection.SERVICE_NAME), server)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ListenError(f"{flag} {port}: cannot listen on {address}: {error}") from error
    return server, bound
