"""kvroute.v1.IndexPeer: what an indexer or a router tells its peers, as a gRPC service for any server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc

from indexer._pb import indexer_pb2 as pb
from indexer._pb import indexer_pb2_grpc as pb_grpc
from indexer.errors import PeerError
from indexer.peer_exports import PeerExports
from indexer.peer_identity import PeerIdentity

PEER_SERVICE = pb.DESCRIPTOR.services_by_name["IndexPeer"].full_name

_CODES = {
    "not_followed": grpc.StatusCode.NOT_FOUND,
    "busy": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "timeout": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "internal_error": grpc.StatusCode.INTERNAL,
}


class PeerDoor(pb_grpc.IndexPeerServicer):
    """kvroute.v1.IndexPeer.

    Args:
        exports: Answers.
    """

    def __init__(self, exports: PeerExports) -> None:
        self._exports = exports

    def add_to(self, server: grpc.Server) -> None:
        """Registers the service."""
        # The generated function has no types.
        add: Any = pb_grpc.add_IndexPeerServicer_to_server
        add(self, server)

    def Snapshot(  # noqa: N802 (the name is the proto's)
        self, request: pb.SnapshotRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.SnapshotChunk]:
        """Tells all that the view of one engine holds."""
        asker = PeerIdentity(
            fingerprint=request.fingerprint,
            form=request.form,
            tiers=tuple(request.tiers),
            schema=request.schema,
            instance=request.instance,
        )
        try:
            for message in self._exports.messages(asker, request.engine, request.model):
                yield pb.SnapshotChunk(message=message)
        except PeerError as error:
            context.abort(_CODES.get(error.reason, grpc.StatusCode.FAILED_PRECONDITION), str(error))
