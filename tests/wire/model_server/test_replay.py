"""The replay socket with valid, malformed and hostile clients, over real ZMQ."""

from __future__ import annotations

import struct

import pytest
import zmq

from model_server.kv_events.publisher import ZmqEventPublisher
from model_server.kv_events.replay import ReplayBuffer
from tests.support.model_server.publisher import open_publisher, removed, replay, socket, wait_for


def filled(publisher: ZmqEventPublisher, batches: int, hashes: int = 1) -> ZmqEventPublisher:
    """Publish this many batches and wait until they are sent."""
    for number in range(batches):
        publisher.publish([removed(number, hashes)])
    wait_for(lambda: publisher.stats.published == batches)
    return publisher


@pytest.mark.parametrize(
    ("start", "expected"),
    [(0, range(20, 30)), (25, range(25, 30)), (29, range(29, 30)), (30, range(0)), (2**64 - 1, range(0))],
)
def test_a_replay_holds_what_is_kept_from_the_start_on(start: int, expected: range) -> None:
    """A replay has all buffered batches from its start; a start beyond the end gets the end marker only."""
    with (
        open_publisher(buffer_steps=10) as publisher,
        socket(zmq.DEALER, publisher.config.replay_endpoint or "") as client,
    ):
        filled(publisher, 30)
        assert replay(client, start) == [(number, number) for number in expected]


def test_a_replay_longer_than_the_pipe_is_complete() -> None:
    """A replay far longer than the high-water mark is complete and in order."""
    with (
        open_publisher() as publisher,
        socket(zmq.DEALER, publisher.config.replay_endpoint or "") as client,
    ):
        filled(publisher, 5_000)
        assert replay(client, 0) == [(number, number) for number in range(5_000)]


def test_an_idle_publisher_answers() -> None:
    """A replay does not wait for the next event."""
    with (
        open_publisher() as publisher,
        socket(zmq.DEALER, publisher.config.replay_endpoint or "") as client,
    ):
        for _ in range(3):
            assert replay(client, 0) == []
        assert publisher.stats.replays == 3


def test_a_req_client_gets_the_first_reply() -> None:
    """The request format is the one that REQ sockets produce."""
    with (
        open_publisher() as publisher,
        socket(zmq.REQ, publisher.config.replay_endpoint or "") as client,
    ):
        filled(publisher, 2)
        client.send(struct.pack(">Q", 1))
        topic, sequence, _ = client.recv_multipart()
        assert (topic, struct.unpack(">Q", sequence)[0]) == (b"kv@test", 1)


@pytest.mark.parametrize(
    "frames",
    [
        [b"garbage"],
        [b""],
        [b"", b""],
        [b"", b"short"],
        [b"", b"nine bytes"],
        [b"x", struct.pack(">Q", 0)],
        [b"", struct.pack(">Q", 0), b"more"],
        [b""] * 1000,
    ],
    ids=lambda frames: f"{len(frames)}:{frames[0]!r}",
)
def test_malformed_requests_are_counted_and_ignored(frames: list[bytes]) -> None:
    """A request that is not [empty, 8 bytes] is counted and gets no answer; others are served."""
    with (
        open_publisher() as publisher,
        socket(zmq.DEALER, publisher.config.replay_endpoint or "") as client,
    ):
        filled(publisher, 1)
        client.send_multipart(frames)
        wait_for(lambda: publisher.stats.replays_rejected == 1)
        assert replay(client, 0) == [(0, 0)]


def test_giant_request_affects_no_other_client() -> None:
    """A frame above the limit closes its connection; other clients are served."""
    with (
        open_publisher() as publisher,
        socket(zmq.DEALER, publisher.config.replay_endpoint or "") as hostile,
        socket(zmq.DEALER, publisher.config.replay_endpoint or "") as client,
    ):
        filled(publisher, 1)
        hostile.send_multipart([b"", b"x" * 10_000_000])
        assert replay(client, 0) == [(0, 0)]
        assert publisher.stats.replays == 1


def test_clients_that_never_read_delay_nobody() -> None:
    """Many unread replays delay neither live batches nor another client's replay."""
    with (
        open_publisher() as publisher,
        socket(zmq.DEALER, publisher.config.replay_endpoint or "") as client,
        zmq.Context() as context,
    ):
        # Large enough that no socket buffer can store a whole replay.
        filled(publisher, 5_000, hashes=500)
        hostile = []
        for _ in range(20):
            dealer = context.socket(zmq.DEALER)
            dealer.linger, dealer.rcvhwm = 0, 1
            dealer.connect(publisher.config.replay_endpoint or "")
            dealer.send_multipart([b"", struct.pack(">Q", 0)])
            hostile.append(dealer)
        wait_for(lambda: publisher.stats.replays == 20)
        publisher.publish([removed(5_000)])
        wait_for(lambda: publisher.stats.published == 5_001)
        assert replay(client, 4_000) == [(number, number) for number in range(4_000, 5_001)]
        for dealer in hostile:
            dealer.close()


def test_replay_of_a_disconnected_client_ends() -> None:
    """The replay of a disconnected client ends without an error."""
    with open_publisher() as publisher:
        filled(publisher, 3_000)
        for _ in range(5):
            with socket(zmq.DEALER, publisher.config.replay_endpoint or "") as leaving:
                leaving.send_multipart([b"", struct.pack(">Q", 0)])
                leaving.recv_multipart()
        with socket(zmq.DEALER, publisher.config.replay_endpoint or "") as client:
            assert len(replay(client, 0)) == 3_000
        assert publisher.healthy


def test_replay_buffer_keeps_the_newest_batches() -> None:
    """Exactly the last `capacity` batches can be read by their sequence numbers."""
    ring = ReplayBuffer(3)
    for _ in range(5):
        ring.append(0.0, ())
    assert ring.oldest_sequence() == 2
    assert [step.sequence for step in ring.batches(0, ring.next_sequence)] == [2, 3, 4]
