"""Test kit of the publisher: a publisher on free ports, and ZMQ clients."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import zmq

from model_server.kv_events.events import BlockRemoved
from model_server.kv_events.publisher import KVEventsConfig, ZmqEventPublisher

DEADLINE_MS = 300_000
END = b"\xff" * 8


@contextmanager
def open_publisher(*, start: bool = True, **settings: Any) -> Iterator[ZmqEventPublisher]:
    """Yield a publisher on ports chosen by the system."""
    ports = {"endpoint": "tcp://*:0", "replay_endpoint": "tcp://127.0.0.1:0", "topic": "kv@test"}
    publisher = ZmqEventPublisher(KVEventsConfig(**{**ports, **settings}))
    try:
        if start:
            publisher.start()
        yield publisher
    finally:
        publisher.close()


@contextmanager
def socket(kind: int, endpoint: str, *, bind: bool = False) -> Iterator[zmq.Socket[bytes]]:
    """Return a client socket with a deadline on every operation."""
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
    """Return an event identified by a number."""
    return BlockRemoved([number, *[2**63] * (hashes - 1)], "GPU")


def number_of(payload: bytes) -> int:
    """Return the number of a payload's event."""
    _, [event], rank = msgpack.unpackb(payload)
    assert rank == 0
    return event["block_hashes"][0]


def receive_until(subscriber: zmq.Socket[bytes], publish: Callable[[], None]) -> list[bytes]:
    """Publish until the subscription has taken effect and the first frame arrives."""
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
