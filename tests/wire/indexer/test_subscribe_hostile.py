"""Hostile input on a pod's sockets: counted by reason, dropped, without effect on other pods."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence

import msgspec
import pytest

from indexer import PodStream, StreamState
from indexer.streams import dialled as follower
from indexer.streams.ingest import Ingest
from indexer.views.view_parts import Outcome
from tests.support.indexer.engine_publisher import END, EnginePublisher, batch, wait_until
from tests.support.indexer.subscriber import OTHER, POD, Watched, block, stream

STALE = StreamState.STALE
SEQUENCE = (1).to_bytes(8, "big")


@pytest.fixture
def watched() -> Iterator[Watched]:
    """Start an indexer that accepts payloads of up to 2000 bytes."""
    running = Watched(max_payload_bytes=2000, replay_idle_s=0.3, replay_attempts=2)
    yield running
    running.indexer.close()


@pytest.fixture
def engine(watched: Watched) -> Iterator[EnginePublisher]:
    """Follow an engine with one block."""
    with EnginePublisher() as publisher:
        watched.follow(stream(publisher))
        publisher.wait_for_subscriber()
        publisher.publish(block(1))
        watched.settled(1)
        yield publisher


def rejected(watched: Watched, reason: str) -> float:
    """Return the number of rejections for this reason."""
    return watched.metric("kvroute_indexer_rejected_total", reason=reason)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"topic"], "frame_count"),
        ([b"topic", SEQUENCE], "frame_count"),
        ([b"topic", SEQUENCE, batch(), b"more"], "frame_count"),
        ([b"topic", b"", batch()], "sequence"),
        ([b"topic", b"\0" * 7, batch()], "sequence"),
        ([b"topic", b"\0" * 9, batch()], "sequence"),
        ([b"topic", END, batch()], "sequence"),
    ],
)
def test_a_broken_message_is_dropped(
    watched: Watched, engine: EnginePublisher, frames: list[bytes], reason: str
) -> None:
    """A malformed message is counted, and the stream stays EXACT."""
    engine.send_frames(frames)
    engine.publish(block(2))
    watched.settled(2)
    assert rejected(watched, reason) == 1


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"\xc1garbage", "broken_batch"),
        (b"", "broken_batch"),
        (msgspec.msgpack.encode({"events": []}), "broken_batch"),
        (b"x" * 2001, "oversize"),
    ],
)
def test_an_unreadable_batch_makes_the_view_stale(
    watched: Watched, engine: EnginePublisher, payload: bytes, reason: str
) -> None:
    """The stream continues behind an unreadable batch without a gap, and is STALE."""
    engine.publish_payload(payload)
    engine.publish(block(2))
    watched.settled(2, STALE)
    assert rejected(watched, reason) == 1
    assert watched.metric("kvroute_indexer_gaps_total", pod=POD) == 0


def test_a_cleared_cache_makes_a_stale_view_exact(watched: Watched, engine: EnginePublisher) -> None:
    """After AllBlocksCleared earlier losses do not matter."""
    engine.publish(block(2), ["BlockStored", "broken"])
    watched.settled(2, STALE)
    engine.publish(["AllBlocksCleared"], block(1))
    watched.settled(1)


def test_an_unknown_event_is_no_damage(watched: Watched, engine: EnginePublisher) -> None:
    """An unknown kind of event is counted, and the view stays EXACT."""
    engine.publish({"type": "BlockPolished", "block_hashes": [1]}, block(2))
    watched.settled(2)
    assert rejected(watched, "unknown_event") == 1


def test_a_message_beyond_all_bounds_cuts_the_link(watched: Watched, engine: EnginePublisher) -> None:
    """A message far above the limit closes the connection and clears the view; live events are applied."""
    engine.publish_payload(b"x" * 10_000)
    watched.settled(0, STALE)
    assert (POD, False) in watched.links
    engine.publish(block(1))
    watched.settled(1, STALE)


def test_garbage_among_replay_answers_is_dropped(watched: Watched) -> None:
    """Malformed replay answers are counted; the others are applied."""
    with EnginePublisher() as engine:
        engine.garbage_answers = [[b"no delimiter"], [b"", b"a", b"b", b"c", b"d"], [b"", b"short", b""]]
        engine.publish(block(1))
        watched.follow(stream(engine))
        watched.settled(1)
        assert rejected(watched, "replay_frames") == 2
        assert rejected(watched, "sequence") == 1


def test_a_port_that_speaks_another_language_is_no_publisher(
    watched: Watched, engine: EnginePublisher
) -> None:
    """A server with another protocol has no effect, and the engine beside it is followed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        talked = threading.Event()

        def talk() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 100)
                talked.set()

        thread = threading.Thread(target=talk)
        thread.start()
        nonsense = PodStream(OTHER, "m", f"tcp://127.0.0.1:{port}", None)
        watched.follow(stream(engine), nonsense)
        assert talked.wait(300)
        thread.join()
        engine.publish(block(2))
        watched.settled(2)
    assert (POD, False) not in watched.links
    assert watched.match(OTHER).state is not StreamState.EXACT


def test_a_callback_that_fails_costs_nothing(watched: Watched, engine: EnginePublisher) -> None:
    """An error of a callback is logged, and the events are applied."""
    failed = threading.Event()

    def fail(_pod: str) -> None:
        failed.set()
        raise RuntimeError("listener is broken")

    watched.on_stored = fail
    engine.publish(block(2))
    watched.settled(2)
    wait_until("the listener was called", failed.is_set)


def test_an_error_of_our_own_costs_one_view(
    watched: Watched, engine: EnginePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an internal error the pod's view is dropped and rebuilt; others are not affected."""
    apply = Ingest.apply
    broken = [True]

    def apply_once_broken(self: Ingest, pod: str, payloads: Sequence[bytes]) -> Outcome:
        if any(b"boom" in payload for payload in payloads) and broken and broken.pop():
            raise RuntimeError("a bug")
        return apply(self, pod, payloads)

    monkeypatch.setattr(Ingest, "apply", apply_once_broken)
    monkeypatch.setattr(follower, "RETRY_MAX_S", 0.01)
    with EnginePublisher() as other:
        other.publish(block(1), block(2))
        watched.follow(stream(engine), stream(other, OTHER))
        watched.settled(2, pod=OTHER)
        engine.publish(block(2), {"type": "boom"})
        watched.settled(2)
        assert watched.metric("kvroute_indexer_pod_clears_total", reason="internal_error") == 1
        assert watched.links == [(POD, True), (OTHER, True), (POD, False), (POD, True)]
        watched.settled(2, pod=OTHER)
