"""kvroute.v1.IndexPeer: answers peers that ask for our view of an engine, as a gRPC service for any server.

Requests come in on the server's threads; the view is listed on the subscriber's thread meanwhile.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any

import grpc

from indexer._pb import indexer_pb2 as pb
from indexer._pb import indexer_pb2_grpc as pb_grpc
from indexer.errors import PeerError
from indexer.metrics import IndexerMetrics
from indexer.peer_wire import SCHEMA, snapshot_messages
from indexer.view_parts import ViewSnapshot

_log = logging.getLogger(__name__)

PEER_SERVICE = pb.DESCRIPTOR.services_by_name["IndexPeer"].full_name

_AT_ONCE = 4
_CODES = {
    "not_followed": grpc.StatusCode.NOT_FOUND,
    "busy": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "timeout": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "internal_error": grpc.StatusCode.INTERNAL,
}


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """One index, as its peers see it: what two must have in common to go on from each other's views.

    Keys mean the same only under the same seed and block length. The fingerprint shows that both know the
    seed, without telling it: whoever does not know it is told nothing.

    Attributes:
        instance: Of this process; a peer that has the same is itself.
    """

    fingerprint: int  # see `BlockHasher.fingerprint`
    form: str  # what its views are made of, see `peer_wire.FORM`
    tiers: tuple[str, ...]  # its tiers' names, best first; a tier's number is its place
    schema: int = SCHEMA  # see `peer_wire.SCHEMA`
    instance: str = field(default_factory=lambda: secrets.token_hex(16))

    def admit(self, other: PeerIdentity) -> None:
        """Checks that another index can use our views.

        Raises:
            PeerError: It cannot, or is ourselves; carries the reason.
        """
        if other.instance == self.instance:
            raise PeerError("self", "that is the same process")
        if other.schema != self.schema:
            raise PeerError("schema", f"snapshots of version {self.schema} are told, not {other.schema}")
        if other.fingerprint != self.fingerprint:
            raise PeerError("fingerprint", "--hash-seed and --block-tokens must be the same as here")
        if other.form != self.form:
            raise PeerError("backend", f"views have the form {self.form!r} here")
        if other.tiers != self.tiers:
            raise PeerError("tiers", f"tiers must be {', '.join(self.tiers)}, as here")


class PeerDoor(pb_grpc.IndexPeerServicer):
    """Tells views to peers. Thread-safe.

    Args:
        export: Lists an engine's view, given its name in the index and its model; see `Subscriber.export`.
        total_s: Longest time that a view may take to be listed.
    """

    def __init__(
        self,
        identity: PeerIdentity,
        export: Callable[[str, str], Future[ViewSnapshot]],
        metrics: IndexerMetrics,
        *,
        total_s: float,
    ) -> None:
        self.identity = identity
        self._export = export
        self._metrics = metrics
        self._total_s = total_s
        self._free = threading.Semaphore(_AT_ONCE)

    def add_to(self, server: grpc.Server) -> None:
        # The generated function has no types.
        add: Any = pb_grpc.add_IndexPeerServicer_to_server
        add(self, server)

    def Snapshot(  # noqa: N802 (the name is the proto's)
        self, request: pb.SnapshotRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.SnapshotChunk]:
        """Tells all that the view of one engine holds, in the messages of `peer_wire`."""
        started_s, outcome = time.monotonic(), "given_up"
        try:
            self.identity.admit(
                PeerIdentity(
                    fingerprint=request.fingerprint,
                    form=request.form,
                    tiers=tuple(request.tiers),
                    schema=request.schema,
                    instance=request.instance,
                )
            )
            if not self._free.acquire(blocking=False):
                raise PeerError("busy", f"{_AT_ONCE} views are being told already")
            try:
                for message in snapshot_messages(self._listed(request.engine, request.model)):
                    self._metrics.told_bytes.inc(len(message))
                    yield pb.SnapshotChunk(message=message)
            finally:
                self._free.release()
            outcome = "completed"
            self._metrics.told_s.observe(time.monotonic() - started_s)
        except PeerError as error:
            outcome = error.reason
            _log.info("view of %s not told to a peer: %s", request.engine, error)
            context.abort(_CODES.get(error.reason, grpc.StatusCode.FAILED_PRECONDITION), str(error))
        finally:
            self._metrics.told.labels(outcome).inc()

    def _listed(self, engine: str, model: str) -> ViewSnapshot:
        told = self._export(engine, model)
        try:
            return told.result(self._total_s)
        except FutureTimeoutError:
            told.cancel()
            raise PeerError("timeout", f"the view was not listed in {self._total_s:g} s") from None
