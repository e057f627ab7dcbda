"""The gRPC service by which other routers of the fleet follow what this one has in flight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc

from indexer.errors import PeerError
from indexer.peer_service import PeerIdentity
from router.replicas.journal import HEARTBEAT_S, Journal
from router.replicas.news import FOLLOW, read_request

_, LEDGER_SERVICE, _METHOD = FOLLOW.split("/")
_CODES = {
    "busy": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "behind": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "gone": grpc.StatusCode.UNAVAILABLE,
}


class LedgerDoor:
    """Serves `news.FOLLOW`.

    A call lasts until the other goes. A refusal is FAILED_PRECONDITION ("self: ...", "fingerprint: ...",
    "broken: ..."), or RESOURCE_EXHAUSTED ("busy: ...", too many follow; "behind: ...", it has taken too
    little) where the other may ask again, and is told all anew.

    Args:
        identity: Who we are.
    """

    def __init__(self, journal: Journal, identity: PeerIdentity) -> None:
        self._journal = journal
        self._identity = identity

    def add_to(self, server: grpc.Server) -> None:
        """Register the service; messages are serialised once for all who follow."""
        follow: Any = grpc.unary_stream_rpc_method_handler(self._follow)
        handler = grpc.method_handlers_generic_handler(LEDGER_SERVICE, {_METHOD: follow})
        server.add_generic_rpc_handlers((handler,))

    def _follow(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
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

    def _admit(self, message: bytes) -> None:
        request, ours = read_request(message), self._identity
        if request.instance == ours.instance:
            raise PeerError("self", "that is the same process")
        if request.fingerprint != ours.fingerprint:
            raise PeerError("fingerprint", "--hash-seed and --block-tokens must be the same as here")
