"""Views built from vLLM's snapshot socket (pull request 57789): a REQ socket gets all of it in one answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import msgspec
import pytest
import zmq

from indexer import PodStream, StreamState
from tests.support.indexer.engine_publisher import EnginePublisher, batch, removed, wait_until
from tests.support.indexer.subscriber import POD, Watched, block, stream
from tests.support.loopback import HERE

ID = b"publisher-id-016"


@contextmanager
def snapshot_socket(answer: Callable[[], list[bytes]]) -> Iterator[str]:
    """Serve snapshots as vLLM's recorder does; a request other than "snapshot" gets no answer."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port(f"tcp://{HERE}")
        ended = threading.Event()

        def serve() -> None:
            while not ended.is_set():
                if router.poll(20):
                    *envelope, request = router.recv_multipart()
                    if request == b"snapshot":
                        router.send_multipart([*envelope, *answer()])

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"tcp://{HERE}:{port}"
        finally:
            ended.set()
            thread.join()


def reply(last: int, *payloads: bytes, publisher: bytes = ID) -> list[bytes]:
    """Return an answer with the number of the last batch that it includes."""
    return [last.to_bytes(8, "big", signed=True), publisher, *payloads]


@pytest.fixture
def watched() -> Iterator[Watched]:
    """Start an indexer."""
    running = Watched(snapshot_max_bytes=10_000, snapshot_total_s=20.0)
    with closing(running.indexer):
        yield running


@pytest.fixture
def engine() -> Iterator[EnginePublisher]:
    """Start an engine without a replay socket."""
    with EnginePublisher(replay=False) as publisher:
        yield publisher


def with_socket(engine: EnginePublisher, url: str) -> PodStream:
    """Return the engine's stream, with snapshots from this socket."""
    return replace(stream(engine), snapshot_url=url)


def test_a_late_start_is_exact_from_the_socket(watched: Watched, engine: EnginePublisher) -> None:
    """Stores of ancestors, removals and copies by hash leave the engine's blocks; live batches follow."""
    for number in (1, 2, 3):
        engine.publish(block(number))
    engine.publish(removed([3]))
    chunks = (
        batch(block(1), block(2), block(3)),
        batch(removed([3]), {**block(1), "token_ids": []}, {**block(2), "token_ids": []}, removed([1, 2])),
    )
    with snapshot_socket(lambda: reply(3, *chunks)) as url:
        watched.follow(with_socket(engine, url))
        watched.settled(2)
        watched.built("engine")
        # Such a publisher appends its id to each live batch.
        engine.publish_payload(msgspec.msgpack.encode([1.0, [removed([2])], 0, ID]))
        watched.settled(1)


def test_a_lost_batch_brings_another_snapshot(watched: Watched, engine: EnginePublisher) -> None:
    """An empty heartbeat shows that the batch before it was lost; the view is fetched again."""
    answers = [reply(-1), reply(1, batch(block(1)))]
    with snapshot_socket(lambda: answers.pop(0)) as url:
        watched.follow(with_socket(engine, url))
        watched.settled(0)
        engine.wait_for_subscriber()
        engine.publish(block(1), lost=True)
        engine.publish()
        watched.settled(1)


def test_copies_of_an_unknown_group_make_the_view_stale(watched: Watched, engine: EnginePublisher) -> None:
    """A snapshot of a hybrid model does not tell the kinds of all groups, so their copies have no place."""
    engine.publish(block(1))
    copies = {**block(1), "token_ids": [], "group_idx": 1}
    with snapshot_socket(lambda: reply(0, batch(block(1, group_idx=0)), batch(copies))) as url:
        watched.follow(with_socket(engine, url))
        watched.settled(1, StreamState.STALE)
        assert watched.indexer.engine_registry.engines[POD].reason == "snapshot_incomplete"


@pytest.mark.parametrize(
    ("frames", "outcome"),
    [
        (reply(-2), "refused"),
        (reply(0, publisher=b"short"), "broken"),
        ([b""], "broken"),
        (reply(0, bytes(6000), bytes(6000)), "too_large"),
    ],
)
def test_without_a_snapshot_the_view_is_stale(
    watched: Watched, engine: EnginePublisher, frames: list[bytes], outcome: str
) -> None:
    """A recorder that has stopped and an invalid answer leave the view without history, for a reason."""
    with snapshot_socket(lambda: frames) as url:
        watched.follow(with_socket(engine, url))
        name = "kvroute_indexer_snapshots_total"
        wait_until("the outcome", lambda: watched.metric(name, outcome=outcome) >= 1)
        watched.settled(0, StreamState.STALE)


def test_a_silent_socket_is_given_up() -> None:
    """Without an answer the history is replayed after the time limit."""
    watched = Watched(snapshot_total_s=0.2)
    with closing(watched.indexer), EnginePublisher() as engine, snapshot_socket(list) as url:
        engine.publish(block(1))
        watched.follow(with_socket(engine, url.replace(HERE, "127.0.0.2")))
        watched.settled(1)
        assert watched.metric("kvroute_indexer_snapshots_total", outcome="timeout") == 1


def test_each_rank_has_a_socket_of_its_own() -> None:
    """The ports of events and of snapshots are those of rank 0 plus the rank."""
    pod = PodStream(POD, "m", "tcp://10.0.0.1:5557", snapshot_url="tcp://10.0.0.1:5600", ranks=2)
    assert [rank.snapshot_url for rank in pod.by_rank()] == ["tcp://10.0.0.1:5600", "tcp://10.0.0.1:5601"]
