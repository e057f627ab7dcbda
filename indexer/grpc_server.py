"""The gRPC server of the stand-alone indexer: a door in, a listening port with health and reflection out."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from indexer._pb import indexer_pb2 as pb
from indexer._pb import indexer_pb2_grpc as pb_grpc
from indexer.errors import ListenError
from indexer.peer_service import PEER_SERVICE, PeerDoor
from indexer.service import IndexerDoor

_STOP_S = 2.0
_SERVICE = pb.DESCRIPTOR.services_by_name["IndexerService"].full_name
_THREADS = 8
_CALLS_AT_ONCE = 64
# Room for a prompt of some million tokens.
_MAX_MESSAGE_BYTES = 16 << 20


class IndexerServer:
    """The gRPC server: bound when made, serving from `start` on, healthy by its name once it is ready.

    Args:
        host: Address to listen on.
        credentials: For TLS; None for plain text.

    Raises:
        ListenError: The port is in use, or not ours.
    """

    def __init__(
        self,
        door: IndexerDoor,
        host: str,
        port: int,
        credentials: grpc.ServerCredentials | None = None,
        *,
        peers: PeerDoor | None = None,
    ) -> None:
        self._server = grpc.server(
            ThreadPoolExecutor(_THREADS, thread_name_prefix="grpc"),
            options=[
                # Two indexers on one port would share its requests without a word.
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
            ],
            maximum_concurrent_rpcs=_CALLS_AT_ONCE,
        )
        # The generated function has no types.
        add_door: Any = pb_grpc.add_IndexerServiceServicer_to_server
        add_door(door, self._server)
        if peers is not None:
            peers.add_to(self._server)
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (_SERVICE, PEER_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ListenError(f"--grpc-port {port}: cannot listen on {address}") from error

    def start(self) -> None:
        """Begins to serve: alive, but not ready yet."""
        self._server.start()
        self._tell("", ready=True)
        self._tell(_SERVICE, ready=False)

    def set_ready(self) -> None:
        """Tells that the views are built, or have had their time."""
        self._tell(_SERVICE, ready=True)

    def close(self, grace_s: float) -> None:
        self._health.enter_graceful_shutdown()
        # gRPC never ends a call whose message it could not read, and would wait for it for ever.
        self._server.stop(grace_s).wait(grace_s + _STOP_S)

    def _tell(self, service: str, *, ready: bool) -> None:
        statuses = health_pb2.HealthCheckResponse
        self._health.set(service, statuses.SERVING if ready else statuses.NOT_SERVING)
