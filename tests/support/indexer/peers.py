"""Indexers that are each other's peers, on real sockets, and servers that only pretend to be peers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from indexer._pb import indexer_pb2 as pb
from indexer._pb import indexer_pb2_grpc as pb_grpc
from indexer.service.grpc_server import IndexerServer
from indexer.streams.view_export import ViewExports
from tests.support.indexer.engine_publisher import DEADLINE_S
from tests.support.indexer.subscriber import Watched

SEED = 7


@contextmanager
def indexer(*peers: str, **settings: Any) -> Iterator[Watched]:
    """Start an indexer with a seed that its peers share."""
    quick = {"hash_seed": SEED, "replay_attempts": 2, "snapshot_total_s": 20.0}
    running = Watched(**{**quick, "peers": peers, **settings})
    try:
        yield running
    finally:
        running.indexer.close()


@contextmanager
def serving(
    watched: Watched, port: int = 0, credentials: grpc.ServerCredentials | None = None
) -> Iterator[str]:
    """Start the gRPC server of an indexer; yield its address."""
    server = IndexerServer(watched.indexer, [], "127.0.0.1", port, credentials)
    server.start()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        server.close(0)


@contextmanager
def false_peer(
    answer: Callable[[pb.SnapshotRequest, grpc.ServicerContext], Iterator[bytes]],
) -> Iterator[str]:
    """Start a server that answers every snapshot request with these messages; yield its address."""

    class Door(pb_grpc.IndexPeerServicer):
        def Snapshot(  # noqa: N802 (the name is the proto's)
            self, request: Any, context: grpc.ServicerContext
        ) -> Iterator[pb.SnapshotChunk]:
            for message in answer(request, context):
                yield pb.SnapshotChunk(message=message)

    server = grpc.server(ThreadPoolExecutor(4))
    pb_grpc.add_IndexPeerServicer_to_server(Door(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def messages_of(address: str, watched: Watched, engine: str, model: str) -> list[bytes]:
    """Return the messages that a peer sends an indexer for an engine."""
    identity = watched.indexer.exports.identity
    with grpc.insecure_channel(address) as channel:
        chunks = pb_grpc.IndexPeerStub(channel).Snapshot(
            replace(identity, instance="somebody else").request(engine, model),
            timeout=DEADLINE_S,
        )
        return [chunk.message for chunk in chunks]


def while_listed(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[], object], until: Callable[[ViewExports], bool]
) -> None:
    """Run a function when the first export starts; the export continues when `until` allows it."""
    turn = ViewExports.turn
    acted = threading.Event()

    def slow_turn(exports: ViewExports, now_s: float) -> None:
        if not acted.is_set():
            acted.set()
            act()
        if until(exports):
            turn(exports, now_s)

    monkeypatch.setattr(ViewExports, "turn", slow_turn)


def then_wait(messages: Sequence[bytes], until: threading.Event) -> Iterator[bytes]:
    """Yield these messages, and then nothing for as long as the test needs."""
    yield from messages
    until.wait(DEADLINE_S)
