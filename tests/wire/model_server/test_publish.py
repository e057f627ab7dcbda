"""The event publisher over real ZMQ sockets: sequence, order, overflow, start and close."""

from __future__ import annotations

import struct
import threading

import pytest
import zmq

from model_server.errors import StartError
from model_server.kv_events.publisher import KVEventsConfig, ZmqEventPublisher, binds
from tests.support.model_server.publisher import (
    number_of,
    open_publisher,
    receive_until,
    removed,
    replay,
    socket,
    wait_for,
)


def test_live_batches_come_in_order_with_consecutive_sequence_numbers() -> None:
    """A subscriber receives [topic, 8-byte sequence, payload], one message per batch, in order."""
    with open_publisher() as publisher, socket(zmq.SUB, publisher.config.endpoint) as subscriber:
        sent = iter(range(100_000))
        topic, sequence, payload = receive_until(subscriber, lambda: publisher.publish([removed(next(sent))]))
        first = struct.unpack(">Q", sequence)[0]
        assert (topic, number_of(payload)) == (b"kv@test", first)
        for _ in range(500):
            publisher.publish([removed(next(sent))])
        for expected in range(first + 1, first + 500):
            _, sequence, payload = subscriber.recv_multipart()
            assert struct.unpack(">Q", sequence)[0] == number_of(payload) == expected


def test_the_first_batch_has_sequence_zero() -> None:
    """Sequence numbers start at 0 in each process, which reveals a restart."""
    with open_publisher() as publisher, socket(zmq.DEALER, publisher.config.replay_endpoint or "") as client:
        publisher.publish([removed(7)])
        assert replay(client, 0) == [(0, 7)]


def test_a_connecting_endpoint_publishes_to_a_binding_subscriber() -> None:
    """An endpoint without a wildcard is connected to, as in vLLM, so that many servers feed one reader."""
    with socket(zmq.SUB, "tcp://127.0.0.1:*", bind=True) as subscriber:
        endpoint = subscriber.getsockopt_string(zmq.LAST_ENDPOINT)
        with open_publisher(endpoint=endpoint) as publisher:
            frames = receive_until(subscriber, lambda: publisher.publish([removed(1)]))
            assert number_of(frames[2]) == 1


@pytest.mark.parametrize(
    ("endpoint", "bound"),
    [
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("ipc:///tmp/kv", True),
        ("inproc://kv", True),
        ("tcp://127.0.0.1:5557", False),
        ("tcp://router:5557", False),
    ],
)
def test_wildcards_and_local_transports_are_bound_the_rest_connected(endpoint: str, bound: bool) -> None:
    """The choice between bind and connect follows vLLM's rule."""
    assert binds(endpoint) is bound


def test_a_loopback_endpoint_is_bound_on_demand() -> None:
    """With always_bind an address without a wildcard is bound."""
    with (
        open_publisher(endpoint="tcp://127.0.0.1:*", always_bind=True) as publisher,
        socket(zmq.SUB, publisher.config.endpoint) as subscriber,
    ):
        frames = receive_until(subscriber, lambda: publisher.publish([removed(1)]))
        assert number_of(frames[2]) == 1
        assert "always_bind" not in publisher.config.as_vllm()


def test_overflow_drops_the_oldest_and_replay_delivers_it() -> None:
    """A full queue causes a counted gap in the stream, and a replay has every batch of the gap."""
    with (
        open_publisher(start=False, max_queue_size=3) as publisher,
        socket(zmq.SUB, publisher.config.endpoint) as subscriber,
        socket(zmq.DEALER, publisher.config.replay_endpoint or "") as client,
    ):
        for number in range(10):
            publisher.publish([removed(number)])
        assert publisher.stats.dropped == 7
        publisher.start()
        wait_for(lambda: publisher.stats.published == 3)
        _, sequence, _ = receive_until(subscriber, lambda: publisher.publish([removed(10)]))
        assert struct.unpack(">Q", sequence)[0] >= 7
        assert replay(client, 0)[:10] == [(number, number) for number in range(10)]
        assert publisher.stats.dropped == 7


def test_publish_returns_without_any_subscriber_or_thread() -> None:
    """publish returns at once without subscribers and before the sending thread starts."""
    with open_publisher(start=False, max_queue_size=10, buffer_steps=10) as publisher:
        for number in range(10_000):
            publisher.publish([removed(number)])
        assert publisher.stats.dropped == 9_990


def test_many_threads_get_distinct_numbers() -> None:
    """Concurrent publishers get distinct, consecutive sequence numbers."""
    with open_publisher() as publisher, socket(zmq.DEALER, publisher.config.replay_endpoint or "") as client:
        threads = [
            threading.Thread(target=lambda: [publisher.publish([removed(1)]) for _ in range(200)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [sequence for sequence, _ in replay(client, 0)] == list(range(800))


def test_close_leaves_no_thread_and_frees_the_ports() -> None:
    """After close the endpoints can be bound again at once; a second close does nothing."""
    with open_publisher() as publisher:
        publisher.publish([removed(1)])
        config = publisher.config
    publisher.close()
    assert "kv-event-publisher" not in [thread.name for thread in threading.enumerate()]
    again = ZmqEventPublisher(config)
    again.close()


def test_an_endpoint_in_use_is_named() -> None:
    """A port in use fails the start with the endpoint in the message and leaves no socket open."""
    with open_publisher() as publisher:
        taken = publisher.config.replay_endpoint
        with pytest.raises(StartError, match=f"cannot bind {taken}: Address already in use"):
            ZmqEventPublisher(KVEventsConfig(endpoint="tcp://*:0", replay_endpoint=taken))
        publisher.publish([removed(1)])
        wait_for(lambda: publisher.stats.published == 1)
