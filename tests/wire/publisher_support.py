"""Publisher on free ports, and ZMQ clients for its tests."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import zmq

from model_server.kv_events.events import BlockRemoved
from model_server.kv_events.publisher import KVEventPublisher, KVEventsConfig

DEADLINE_MS = 300_000
END = b"\xff" * 8


@contextmanager
def open_publisher(*, start: bool = True, **settings: Any) -> Iterator[KVEventPublisher]:
    """Open a publisher on ports that the system chose."""
    ports = {"endpoint": "tcp://*:0", "replay_endpoint": "tcp://127.0.0.1:0", "topic": "kv@test"}
    publisher = KVEventPublisher(KVEventsConfig(**{**ports, **settings}))
    try:
        if start:
            publisher.start()
        yield publisher
    finally:
        publisher.close()


@contextmanager
def socket(kind: int, endpoint: str, *, bind: bool = False) -> Iterator[zmq.Socket[bytes]]:
    """Open a client's socket with a timeout on all operations."""
    with zmq.Context() as context, context.socket(kind) as client:
        client.linger = 0
        client.rcvtimeo = client.sndtimeo = DEADLINE_MS
        if kind == zmq.SUB:
            client.subscribe("kv@")
        if bind:
            client.bind(endpoint)
        else:
            client.connect(endpoint.replace("*", "127.0.0.1"))
        yield client


def removed(number: int, hashes: int = 1) -> BlockRemoved:
    """Return an event with a number of its own."""
    return BlockRemoved([number, *[2**63] * (hashes - 1)], "GPU")


def number_of(payload: bytes) -> int:
    """Return the number of the event in a payload."""
    _, [event], rank = msgpack.unpackb(payload)
    assert rank == 0
    return event["block_hashes"][0]


def receive_until(subscriber: zmq.Socket[bytes], publish: Callable[[], None]) -> list[bytes]:
    """Publish until the subscription takes effect and the first frame arrives."""
    poller = zmq.Poller()
    poller.register(subscriber, zmq.POLLIN)
    for _ in range(DEADLINE_MS // 10):
        publish()
        if poller.poll(10):
            return subscriber.recv_multipart()
    raise AssertionError("nothing was received")


def replay(client: zmq.Socket[bytes], start: int) -> list[tuple[int, int]]:
    """Request a replay; return (sequence, event number) pairs up to the end marker."""
    client.send_multipart([b"", struct.pack(">Q", start)])
    batches = []
    while True:
        empty, topic, sequence, payload = client.recv_multipart()
        assert empty == b""
        if sequence == END:
            assert (topic, payload) == (b"", b"")
            return batches
        assert topic == b"kv@test"
        batches.append((struct.unpack(">Q", sequence)[0], number_of(payload)))


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until the publisher's thread has reached a state."""
    pause = threading.Event()
    for _ in range(DEADLINE_MS // 5):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError("the condition never held")
