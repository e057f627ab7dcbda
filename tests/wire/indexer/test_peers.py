"""Views built from a peer's over real sockets: ZMQ from the engine, gRPC from the peer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from indexer import StreamState
from indexer.peers import service as peer_service
from indexer.service.grpc_server import server_credentials
from indexer.streams import recovery
from tests.support.indexer.engine_publisher import DEADLINE_S, EnginePublisher, removed, stored, wait_until
from tests.support.indexer.peers import (
    false_peer,
    indexer,
    messages_of,
    serving,
    then_wait,
    while_listed,
)
from tests.support.indexer.subscriber import MODEL, POD, Watched, block, stream
from tests.support.loopback import free_port

EXACT, STALE = StreamState.EXACT, StreamState.STALE


def bootstraps(watched: Watched, source: str) -> float:
    """Return the number of views built from this source."""
    return watched.metric("kvroute_indexer_bootstraps_total", source=source)


def asked(watched: Watched, outcome: str) -> float:
    """Return the number of snapshots requested from peers with this outcome."""
    return watched.metric("kvroute_indexer_peer_snapshots_total", outcome=outcome)


@pytest.fixture
def engine() -> Iterator[EnginePublisher]:
    """Start an engine whose replay buffer has almost no room."""
    with EnginePublisher(history=2) as publisher:
        yield publisher


def publish_from_the_start(engine: EnginePublisher, peer: Watched) -> None:
    """Let a peer receive all batches of the engine, more than its buffer has room for."""
    peer.follow(stream(engine))
    if engine.replay_endpoint is not None:
        # Batches published before the replay's answer would be missing.
        peer.settled(0)
    engine.wait_for_subscriber()
    for number in (1, 2, 3, 4, 5):
        engine.publish(block(number))
    engine.publish(removed([5]))
    peer.settled(4)


def test_a_late_start_is_exact_from_a_peer(engine: EnginePublisher) -> None:
    """A peer provides what the engine's buffer has lost; later events apply to it, also by hash."""
    with indexer() as first:
        publish_from_the_start(engine, first)
        with serving(first) as address, indexer(address) as second:
            second.follow(stream(engine))
            second.settled(4)
            second.built("peer")
            assert asked(second, "completed") == 1
            engine.publish(block(5), block(6))
            engine.publish(removed([3]))
            for watched in (first, second):
                watched.settled(2)
                keys, names = watched.keys, [POD]
                assert watched.indexer.explain(keys, names)[0].held.held_beyond == 3
            engine.publish(removed([1, 2, 4, 5, 6]))
            for watched in (first, second):
                wait_until("nothing is held", lambda watched=watched: not watched.indexer.stats().holdings)


def test_a_peer_tells_that_a_tier_is_not_proven(engine: EnginePublisher) -> None:
    """A view from a peer is STALE by a tier that the peer saw grow without a removal, though built whole."""
    with indexer() as first:
        publish_from_the_start(engine, first)
        engine.publish(removed([4]), *(block(1, medium="CPU") for _ in range(1000)))
        first.settled(3, StreamState.STALE)
        with serving(first) as address, indexer(address) as second:
            second.follow(stream(engine))
            second.settled(3, StreamState.STALE)
            second.built("peer")
            assert second.indexer.faults(POD)[0].kind == "tier_not_proven"
            engine.publish({**removed([1]), "medium": "CPU"})
            second.settled(3)


def test_an_engine_that_restarted_meanwhile_is_not_taken_for_the_old_one(engine: EnginePublisher) -> None:
    """A peer's view of an earlier process is dropped, and the new process's history is used."""
    with indexer() as first:
        publish_from_the_start(engine, first)
        with EnginePublisher() as restarted:
            restarted.publish(block(1))
            with serving(first) as address, indexer(address) as second:
                # The peer follows the old process, we follow the new one.
                second.follow(stream(restarted))
                second.settled(1)
                assert asked(second, "completed") >= 1
                assert bootstraps(second, "peer") == 0
                second.built("replay")
                assert second.metric("kvroute_indexer_pod_clears_total", reason="peer_unproven") >= 1


@pytest.mark.parametrize(("history", "state", "source"), [(2, STALE, "none"), (100, EXACT, "replay")])
def test_a_process_with_equal_numbers_is_not_taken_for_the_old_one(
    engine: EnginePublisher, history: int, state: StreamState, source: str
) -> None:
    """A new process that has published as much differs in its last batch, or does not have it."""
    with indexer() as first:
        publish_from_the_start(engine, first)
        with EnginePublisher(history=history) as restarted, serving(first) as address:
            for _ in range(8):
                restarted.publish(block(6))
            with indexer(address) as second:
                second.follow(stream(restarted))
                second.settled(0, state)
                assert bootstraps(second, "peer") == 0
                second.built(source)


def test_a_peer_that_is_not_exact_rejects_the_request(engine: EnginePublisher) -> None:
    """A STALE peer rejects the request with the reason, and the engine's short history is used."""
    for _ in range(4):
        engine.publish(block(1))
    with indexer() as first, serving(first) as address:
        first.follow(stream(engine))
        first.settled(1, STALE)
        with indexer(address) as second:
            second.follow(stream(engine))
            second.settled(1, STALE)
            assert asked(second, "stale") == 1
            second.built("none")
            assert first.metric("kvroute_indexer_told_snapshots_total", outcome="stale") == 1


def test_a_stale_view_is_repaired_once_a_peer_is_available(
    engine: EnginePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A STALE view asks peers again later, and is EXACT when one answers."""
    monkeypatch.setattr(recovery, "REPAIR_FIRST_S", 0.05)
    monkeypatch.setattr(peer_service, "DOWN_S", 0.0)
    port = free_port()
    with indexer() as first:
        publish_from_the_start(engine, first)
        with indexer(f"127.0.0.1:{port}") as second:
            second.follow(stream(engine))
            second.settled(0, STALE)
            with serving(first, port):
                second.settled(4)
                second.built("peer")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"hash_seed": 8}, "fingerprint"),
        ({"block_tokens": 8}, "fingerprint"),
        ({"tier_weights": {"gpu": 1.0, "cpu": 0.5, "tape": 0.1}}, "tiers"),
    ],
)
def test_an_incompatible_peer_is_rejected(
    engine: EnginePublisher, settings: dict[str, Any], reason: str
) -> None:
    """Peers with other seeds, block sizes or tiers are rejected with the reason."""
    with indexer() as first:
        publish_from_the_start(engine, first)
        with serving(first) as address, indexer(address, **settings) as second:
            second.follow(stream(engine))
            wait_until("it was asked", lambda: asked(second, reason) >= 1)
            wait_until("it is stale", lambda: second.match().state is STALE)
            assert first.metric("kvroute_indexer_told_snapshot_bytes_total") == 0


def test_a_process_ignores_itself_among_its_peers(engine: EnginePublisher) -> None:
    """The own address among a name's addresses is neither a source nor an error."""
    port = free_port()
    with indexer(f"localhost:{port}") as watched, serving(watched, port):
        engine.publish(block(1))
        watched.follow(stream(engine))
        watched.settled(1)
        assert asked(watched, "self") == 1
        watched.built("replay")


def test_unusable_peers_are_skipped(engine: EnginePublisher) -> None:
    """Peers that are unreachable or do not follow the engine are skipped."""
    with indexer() as first, indexer() as ignorant, serving(ignorant) as other:
        publish_from_the_start(engine, first)
        gone = f"127.0.0.1:{free_port()}"
        with serving(first) as address, indexer(gone, other, address) as second:
            second.follow(stream(engine))
            second.settled(4)
            second.built("peer")
            assert asked(second, "completed") == 1


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_an_incomplete_snapshot_is_not_used(engine: EnginePublisher, kept: int) -> None:
    """A snapshot without its end is not used, and the next peer is asked."""
    with indexer() as first:
        publish_from_the_start(engine, first)
        with serving(first) as address:
            messages = messages_of(address, first, POD, MODEL)

            def half(_: object, context: grpc.ServicerContext) -> Iterator[bytes]:
                yield from messages[:kept]
                context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

            with false_peer(half) as dying, indexer(dying) as second:
                second.follow(stream(engine))
                wait_until("it was asked", lambda: asked(second, "unreachable") == 1)
                wait_until("it is stale", lambda: second.match().state is STALE)
            with false_peer(half) as dying, indexer(dying, address) as second:
                second.follow(stream(engine))
                second.settled(4)


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_snapshot_that_just_ends_is_broken(engine: EnginePublisher, kept: int) -> None:
    """A stream that ends regularly but without the end message is rejected."""
    with indexer() as first:
        publish_from_the_start(engine, first)
        with serving(first) as address:
            messages = messages_of(address, first, POD, MODEL)
        with false_peer(lambda *_: iter(messages[:kept])) as short, indexer(short) as second:
            second.follow(stream(engine))
            wait_until("it was asked", lambda: asked(second, "broken") == 1)
            wait_until("it is stale", lambda: second.match().state is STALE)
            assert second.metric("kvroute_indexer_snapshot_bytes_total", source="peer") == 0


def test_a_silent_peer_times_out(engine: EnginePublisher) -> None:
    """A silent peer delays the view by the timeout, and no other view."""
    until = threading.Event()
    with false_peer(lambda *_: then_wait([], until)) as silent:
        with indexer(silent, snapshot_total_s=0.3) as watched:
            engine.publish(block(1))
            watched.follow(stream(engine))
            watched.settled(1)
            assert asked(watched, "timeout") == 1
        until.set()


def test_closing_does_not_wait_for_a_silent_peer(engine: EnginePublisher) -> None:
    """Closing cancels requests to peers."""
    until, was_asked = threading.Event(), threading.Event()

    def wait(*_: object) -> Iterator[bytes]:
        was_asked.set()
        return then_wait([], until)

    with false_peer(wait) as silent:
        with indexer(silent, snapshot_total_s=DEADLINE_S) as watched:
            watched.follow(stream(engine))
            assert was_asked.wait(DEADLINE_S)
        assert not until.is_set()
        until.set()


def test_an_invalid_view_is_not_rebuilt_from_a_peers(engine: EnginePublisher) -> None:
    """A peer's view has the same events, so a view reported as wrong is rebuilt from the engine only."""
    with indexer() as first:
        publish_from_the_start(engine, first)
        with serving(first) as address, indexer(address) as second:
            second.follow(stream(engine))
            second.settled(4)
            second.indexer.invalidate(POD, "overfull")
            second.settled(0, STALE)
            assert asked(second, "completed") == 1


def test_without_a_replay_socket_a_batch_in_common_proves_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A received batch that equals the view's last one verifies it; of a quiet engine the view is dropped."""
    monkeypatch.setattr(recovery, "REPAIR_FIRST_S", 0.05)
    with EnginePublisher(replay=False) as engine, indexer() as first:
        publish_from_the_start(engine, first)
        with serving(first) as address, indexer(address) as second:
            second.follow(stream(engine))
            second.settled(0, STALE)
            wait_until("a view that lacks something", lambda: bootstraps(second, "none") >= 1)
            assert bootstraps(second, "peer") == 0
            engine.publish(block(5))
            second.settled(5)
            second.built("peer")


def test_a_view_with_pending_stores_is_not_exported(engine: EnginePublisher) -> None:
    """A view with pending stores is not exported."""
    with indexer() as first:
        publish_from_the_start(engine, first)
        engine.publish(stored([99], [1, 2, 3, 4], parent=98))
        wait_until("it waits", lambda: first.metric("kvroute_indexer_orphans", pod=POD) == 1)
        with serving(first) as address, indexer(address) as second:
            second.follow(stream(engine))
            wait_until("it was refused", lambda: asked(second, "orphans") == 1)


def test_events_wait_during_an_export_and_are_not_lost(
    engine: EnginePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that arrive during an export are applied after it, on both sides."""
    with indexer() as first:
        publish_from_the_start(engine, first)
        while_listed(monkeypatch, lambda: engine.publish(block(5)), lambda exports: bool(exports.held))
        with serving(first) as address, indexer(address) as second:
            second.follow(stream(engine))
            second.settled(5)
            first.settled(5)


def test_a_view_that_changes_during_its_export_is_not_sent(
    engine: EnginePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view that is invalidated during its export is not sent."""
    with indexer() as first:
        publish_from_the_start(engine, first)
        invalidate = partial(first.indexer.invalidate, POD, "cleared_by_hand")
        while_listed(monkeypatch, invalidate, lambda _: False)
        with serving(first) as address, indexer(address) as second:
            second.follow(stream(engine))
            wait_until("it was refused", lambda: asked(second, "changed") >= 1)


def test_peers_meet_over_tls(engine: EnginePublisher, tmp_path: Path) -> None:
    """A peer with a certificate is served; one without is rejected."""
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    ca, cert, key = (tmp_path / name for name in ("ca.crt", "tls.crt", "tls.key"))
    authority.cert_pem.write_to_path(ca)
    issued.cert_chain_pems[0].write_to_path(cert)
    issued.private_key_pem.write_to_path(key)
    with indexer() as first:
        publish_from_the_start(engine, first)
        with serving(first, credentials=server_credentials(cert, key, ca)) as address:
            named = f"localhost:{address.rpartition(':')[2]}"
            with indexer(named, peer_ca=ca) as stranger:
                stranger.follow(stream(engine))
                wait_until("it is stale", lambda: stranger.match().state is STALE)
                assert asked(stranger, "completed") == 0
            with indexer(named, peer_ca=ca, peer_cert=cert, peer_key=key) as second:
                second.follow(stream(engine))
                second.settled(4)
                second.built("peer")
