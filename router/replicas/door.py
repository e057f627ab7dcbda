"""kvroute.v1.LedgerPeer: what this router has in flight, for others of its fleet, as a gRPC service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc

from indexer.errors import PeerError
from indexer.peer_identity import PeerIdentity
from router._pb import ledger_pb2 as pb
from router.replicas.journal import HEARTBEAT_S, Journal
from router.replicas.news import SCHEMA

LEDGER_SERVICE = pb.DESCRIPTOR.services_by_name["LedgerPeer"].full_name

_CODES = {
    "busy": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "behind": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "gone": grpc.StatusCode.UNAVAILABLE,
}


class LedgerDoor:
    """kvroute.v1.LedgerPeer.

    Args:
        identity: Who we are.
    """

    def __init__(self, journal: Journal, identity: PeerIdentity) -> None:
        self._journal = journal
        self._identity = identity

    def add_to(self, server: grpc.Server) -> None:
        """Registers the service; messages are serialised once for all who follow."""
        follow: Any = grpc.unary_stream_rpc_method_handler(
            self._follow, request_deserializer=pb.FollowRequest.FromString
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(LEDGER_SERVICE, {"Follow": follow}),)
        )

    def _follow(self, request: pb.FollowRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Tells until the other goes."""
        try:
            self._admit(request)
            reader = self._journal.join()
            try:
                # So that it is known at once that there is somebody.
                yield b""
                while context.is_active():
                    yield reader.take(HEARTBEAT_S)
            finally:
                self._journal.leave(reader)
        except PeerError as error:
            context.abort(_CODES.get(error.reason, grpc.StatusCode.FAILED_PRECONDITION), str(error))

    def _admit(self, request: pb.FollowRequest) -> None:
        ours = self._identity
        if request.instance == ours.instance:
            raise PeerError("self", "that is the same process")
        if request.schema != SCHEMA:
            raise PeerError("schema", f"ledgers of version {SCHEMA} are told, not {request.schema}")
        if request.fingerprint != ours.fingerprint:
            raise PeerError("fingerprint", "--hash-seed and --block-tokens must be the same as here")
