"""Publishes KV cache events over ZMQ as vLLM does: PUB frames ``[topic, sequence, payload]``, and replay.

Events come on the engine's thread, which is never blocked; a thread of its own owns all sockets. What the
caches hold, and from which batch on the stream adds to it, is the body of `GET /kv_events/snapshot`: a map

    schema 1, boot_id (hex, one for each process), sequence, block_size, blocks (copies told), batches

of msgpack, whose `batches` are payloads as they are published. Applied in order to an empty view, and
followed by the stream's batches from `sequence` on, they give what whoever heard every batch holds.
"""

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol

import msgspec
import zmq

from model_server.config import KVEventsConfig
from model_server.errors import ModelServerError
from model_server.kv_events.events import (
    Announcer,
    BlockContent,
    BlockStored,
    ContentKey,
    KVEvent,
    KVEventBatch,
    encode_batch,
    runs,
)
from model_server.kv_events.replay import ReplayServer, Step, StepRing

SCHEMA = 1
SNAPSHOT_TYPE = "application/msgpack"

_BATCH_BLOCKS = _RUN_BLOCKS = 512
_FIXMAP_6 = b"\x86"
_ARRAY_32 = b"\xdd"

_encode = msgspec.msgpack.encode
logger = logging.getLogger(__name__)
_BATCHES_BETWEEN_REPLAYS = 256
_RANK = 0  # third element of every batch
_JOIN_TIMEOUT_S = 5.0


class CachedBlocks(Protocol):
    """Blocks of all cache tiers, as a snapshot reads them."""

    announcer: Announcer

    def contents(self) -> Mapping[str, Sequence[BlockContent]]:
        """Return the cached blocks by medium, one entry per copy."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of the caches between two steps."""

    boot_id: str  # names this process
    sequence: int  # number of the first batch that is not in here
    rank: int | None  # third element of every batch
    announcer: Announcer  # writes the events
    held: Mapping[str, Sequence[BlockContent]]  # by medium, what is held there; a content once for each copy

    def pieces(self) -> Iterator[bytes]:
        batches: list[list[BlockStored]] = []
        blocks = _BATCH_BLOCKS
        for event in self.events():
            if blocks >= _BATCH_BLOCKS:
                batches.append([])
                blocks = 0
            batches[-1].append(event)
            blocks += len(event.block_hashes)
        head = {
            "schema": SCHEMA,
            "boot_id": self.boot_id,
            "sequence": self.sequence,
            "block_size": self.announcer.block_tokens,
            "blocks": sum(map(len, self.held.values())),
        }
        # The map's first byte counts its fields, of which the batches are one more.
        yield _FIXMAP_6 + _encode(head)[1:]
        yield _encode("batches") + _ARRAY_32 + len(batches).to_bytes(4, "big")
        now_s = time.time()
        for events in batches:
            yield _encode(encode_batch(KVEventBatch(now_s, events, self.rank)))

    def events(self) -> Iterator[BlockStored]:
        """Announce all that is held.

        First one copy of each block, parents before children, in runs. Then the other copies, each for itself
        and children before parents: a run that is continued in the same batch may be taken for one that is
        only told again.
        """
        copies = {medium: Counter(content.key for content in held) for medium, held in self.held.items()}
        order = _parents_first({content.key: content for held in self.held.values() for content in held})
        media = {key: medium for medium in reversed(copies) for key in copies[medium]}
        for medium, together in groupby(order, lambda content: media[content.key]):
            for run in runs(list(together)):
                for first in range(0, len(run), _RUN_BLOCKS):
                    yield self.announcer.stored(run[first : first + _RUN_BLOCKS], medium)
        for content in reversed(order):
            for medium, counted in copies.items():
                for _ in range(counted[content.key] - (medium == media[content.key])):
                    yield self.announcer.stored([content], medium)


def _parents_first(contents: Mapping[ContentKey, BlockContent]) -> list[BlockContent]:
    order: list[BlockContent] = []
    placed: set[ContentKey] = set()
    for key in contents:
        chain = []
        at: ContentKey | None = key
        while at is not None and at in contents and at not in placed:
            placed.add(at)
            content = contents[at]
            chain.append(content)
            at = None if content.parent is None else (content.group, content.parent)
        order.extend(reversed(chain))
    return order


class EndpointError(ModelServerError):
    """A ZMQ endpoint cannot be bound or connected."""


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """Totals since start."""

    published: int  # batches sent on the PUB socket
    dropped: int  # batches never sent because the queue was full; a replay still heals them
    replays: int  # replay requests taken
    replays_rejected: int  # replay requests that were malformed or too many at once


class KVEventPublisher:
    """An EventSink that never blocks its caller.

    When the queue to the publisher's thread is full the oldest waiting batch is dropped: the batches behind
    it then show subscribers the gap in the sequence at once, and the replay buffer still holds it. An
    EndpointError where an endpoint is malformed or in use.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        self.boot_id = secrets.token_hex(8)  # names this process
        self._topic = config.topic.encode()
        self._ring = StepRing(config.buffer_steps)
        self._queue: deque[Step] = deque()
        self._queue_cap = config.max_queue_size
        self._lock = threading.Lock()
        self._woken = self._stopping = False
        self._published = self._dropped = 0
        self._thread: threading.Thread | None = None
        self._context = zmq.Context()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.set_hwm(config.hwm)
            endpoint = _attach(self._pub, config.endpoint, bind=config.always_bind or binds(config.endpoint))
            self._replay, bound = None, config.replay_endpoint
            if bound is not None:
                router = self._context.socket(zmq.ROUTER)
                ReplayServer.limit(router)
                bound = _attach(router, bound, bind=True)
                self._replay = ReplayServer(router, self._topic, self._ring)
        except EndpointError:
            self.close()
            raise
        # As given, with the endpoints that were bound.
        self.config = replace(config, endpoint=endpoint, replay_endpoint=bound)

    def start(self) -> None:
        """Start the thread that sends; until then batches wait in the queue."""
        self._thread = threading.Thread(target=self._run, name="kv-event-publisher", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Give one step's events the next sequence number and hand them over; never blocks."""
        with self._lock:
            step = self._ring.append(time.time(), events, _RANK)
            if len(self._queue) >= self._queue_cap:
                self._queue.popleft()
                self._dropped += 1
            self._queue.append(step)
            must_wake, self._woken = not self._woken, True
        if must_wake:
            self._wake()

    def snapshot(self, cache: CachedBlocks) -> Snapshot:
        """Return what the caches hold and which batch comes next; to be called between two steps."""
        return Snapshot(self.boot_id, self._ring.next_sequence, _RANK, cache.announcer, cache.contents())

    def stats(self) -> PublisherStats:
        replays, rejected = (self._replay.served, self._replay.rejected) if self._replay else (0, 0)
        return PublisherStats(self._published, self._dropped, replays, rejected)

    @property
    def healthy(self) -> bool:
        """False once the thread has died: nobody learns of the cache's changes any more."""
        return self._thread is None or self._thread.is_alive()

    def close(self) -> None:
        """Stop the thread and close every socket; batches not yet sent are lost. Idempotent."""
        self._stopping = True
        if self._thread is not None:
            self._wake()
            self._thread.join(_JOIN_TIMEOUT_S)
            self._thread = None
        self._context.destroy(linger=0)
        self._wake_reader.close()
        self._wake_writer.close()

    def _wake(self) -> None:
        # A full pipe already holds a wake-up; a closed one has nobody to wake.
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_reader, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay.socket, zmq.POLLIN)
        wait_ms: int | None = 0
        while not self._stopping:
            poller.poll(wait_ms)
            with contextlib.suppress(BlockingIOError):
                self._wake_reader.recv(4096)
            more_queued = self._send_queued()
            wait_ms = self._replay.serve(time.monotonic()) if self._replay is not None else None
            if more_queued:
                wait_ms = 0

    def _send_queued(self) -> bool:
        """Send some of the queue; returns whether more is waiting."""
        with self._lock:
            steps = [self._queue.popleft() for _ in range(min(len(self._queue), _BATCHES_BETWEEN_REPLAYS))]
            more = self._woken = bool(self._queue)
        for step in steps:
            # PUB never blocks: libzmq drops for each subscriber that is at its high-water mark.
            self._pub.send_multipart((self._topic, step.sequence_frame, step.payload()))
            self._published += 1
        return more


def binds(endpoint: str) -> bool:
    """Whether the PUB socket binds this endpoint (vLLM's rule) rather than connects to it."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _attach(zmq_socket: zmq.Socket[bytes], endpoint: str, *, bind: bool) -> str:
    """Bind or connect; returns the endpoint with the port that the system chose in place of 0 or ``*``."""
    zmq_socket.setsockopt(zmq.LINGER, 0)
    zmq_socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    try:
        (zmq_socket.bind if bind else zmq_socket.connect)(endpoint)
    except zmq.ZMQError as error:
        verb = "bind" if bind else "connect to"
        reason = zmq.strerror(error.errno or 0)
        raise EndpointError(f"KV events: cannot {verb} {endpoint}: {reason}") from error
    address, _, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp://") and port in ("0", "*"):
        return f"{address}:{zmq_socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(':')[2]}"
    return endpoint
