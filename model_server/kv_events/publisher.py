"""ZMQ publisher of KV cache events, as in vLLM: PUB frames ``[topic, sequence, payload]``, with replay.

The engine's thread hands over events and is never blocked; the publisher's own thread owns all sockets.

A snapshot, the body of `GET /kv_events/snapshot`, is a msgpack map of the caches' contents:

    schema 1, boot_id (hex, one per process), sequence, block_size, blocks (number of copies), batches

`batches` are payloads in the published form. Applying them in order to an empty view, then the stream's
batches from `sequence` on, gives the same view as applying every batch since the engine's start.
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

import msgspec
import zmq

from model_server.config import KVEventsConfig
from model_server.errors import StartError
from model_server.kv_events.events import (
    BlockContent,
    BlockStored,
    CacheKey,
    KVEvent,
    KVEventBatch,
    KVEventBuilder,
    encode_batch,
    runs,
)
from model_server.kv_events.replay import PublisherStats, ReplayBuffer, ReplayServer, SequencedBatch

SCHEMA = 1
SNAPSHOT_TYPE = "application/msgpack"

_BATCH_BLOCKS = _RUN_BLOCKS = 512

logger = logging.getLogger(__name__)
_BATCHES_BETWEEN_REPLAYS = 256
_JOIN_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Contents of the caches between two steps."""

    boot_id: str  # unique id of this process
    sequence: int  # first batch of the stream that the snapshot does not include
    event_builder: KVEventBuilder
    blocks: Mapping[str, Sequence[BlockContent]]  # cached blocks by medium, one entry per copy

    def body(self) -> bytes:
        """Return the response body. Batches are encoded one by one, so that other threads get the GIL."""
        batches: list[list[BlockStored]] = []
        blocks = _BATCH_BLOCKS
        for event in self.events():
            if blocks >= _BATCH_BLOCKS:
                batches.append([])
                blocks = 0
            batches[-1].append(event)
            blocks += len(event.block_hashes)
        now_s = time.time()
        return msgspec.msgpack.encode(
            {
                "schema": SCHEMA,
                "boot_id": self.boot_id,
                "sequence": self.sequence,
                "block_size": self.event_builder.block_tokens,
                "blocks": sum(map(len, self.blocks.values())),
                "batches": [encode_batch(KVEventBatch(now_s, events)) for events in batches],
            }
        )

    def events(self) -> Iterator[BlockStored]:
        """Yield stored events for all cached blocks.

        First one copy of each block, parents before children, in runs. Then the other copies, one event each
        and children before parents: subscribers may take a run continued in the same batch for a repetition
        of blocks that are already counted.
        """
        copies = {medium: Counter(one.key for one in held) for medium, held in self.blocks.items()}
        all_contents = (content for contents in self.blocks.values() for content in contents)
        order = _parents_first({content.key: content for content in all_contents})
        media = {key: medium for medium in reversed(copies) for key in copies[medium]}
        for medium, together in groupby(order, lambda content: media[content.key]):
            for run in runs(list(together)):
                for first in range(0, len(run), _RUN_BLOCKS):
                    yield self.event_builder.stored(run[first : first + _RUN_BLOCKS], medium)
        for content in reversed(order):
            for medium, counted in copies.items():
                for _ in range(counted[content.key] - (medium == media[content.key])):
                    yield self.event_builder.stored([content], medium)


def _parents_first(contents: Mapping[CacheKey, BlockContent]) -> list[BlockContent]:
    order: list[BlockContent] = []
    placed: set[CacheKey] = set()
    for key in contents:
        chain = []
        at: CacheKey | None = key
        while at is not None and at in contents and at not in placed:
            placed.add(at)
            content = contents[at]
            chain.append(content)
            at = None if content.parent is None else (content.group, content.parent)
        order.extend(reversed(chain))
    return order


class ZmqEventPublisher:
    """Event publisher over ZMQ that never blocks its caller.

    When the queue to the publisher's thread is full, the oldest batch is dropped: the next batches then show
    subscribers the sequence gap at once, and the replay buffer still has the dropped batch. The constructor
    raises a StartError if an endpoint is malformed or in use.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        self.boot_id = secrets.token_hex(8)  # unique id of this process
        self.stats = PublisherStats()
        self._topic = config.topic.encode()
        self._buffer = ReplayBuffer(config.buffer_steps)
        self._queue: deque[SequencedBatch] = deque()
        self._queue_cap = config.max_queue_size
        self._lock = threading.Lock()
        self._woken = self._stopping = False
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
                self._replay = ReplayServer(router, self._topic, self._buffer, self.stats)
        except StartError:
            self.close()
            raise
        # The given settings with the endpoints actually bound.
        self.config = replace(config, endpoint=endpoint, replay_endpoint=bound)

    def start(self) -> None:
        """Start the sending thread. Until then batches stay in the queue."""
        self._thread = threading.Thread(target=self._run, name="kv-event-publisher", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Queue one step's events under the next sequence number. Never blocks."""
        with self._lock:
            batch = self._buffer.append(time.time(), events)
            if len(self._queue) >= self._queue_cap:
                self._queue.popleft()
                self.stats.dropped += 1
            self._queue.append(batch)
            must_wake, self._woken = not self._woken, True
        if must_wake:
            self._wake()

    def snapshot(
        self, event_builder: KVEventBuilder, blocks: Mapping[str, Sequence[BlockContent]]
    ) -> Snapshot:
        """Return the caches' contents with the next sequence number. Call between two steps only."""
        return Snapshot(self.boot_id, self._buffer.next_sequence, event_builder, blocks)

    @property
    def healthy(self) -> bool:
        """False once the sending thread has died: no event is sent any more."""
        return self._thread is None or self._thread.is_alive()

    def close(self) -> None:
        """Stop the thread and close all sockets; unsent batches are lost. Idempotent."""
        self._stopping = True
        if self._thread is not None:
            self._wake()
            self._thread.join(_JOIN_TIMEOUT_S)
            self._thread = None
        self._context.destroy(linger=0)
        self._wake_reader.close()
        self._wake_writer.close()

    def _wake(self) -> None:
        # A full pipe already contains a wake-up; a closed one has no reader.
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
        """Send queued batches, up to a limit; return whether more are queued."""
        with self._lock:
            batches = [self._queue.popleft() for _ in range(min(len(self._queue), _BATCHES_BETWEEN_REPLAYS))]
            more = self._woken = bool(self._queue)
        for batch in batches:
            # PUB never blocks: libzmq drops for each subscriber that is at its high-water mark.
            self._pub.send_multipart((self._topic, batch.sequence_frame, batch.payload()))
            self.stats.published += 1
        return more


def binds(endpoint: str) -> bool:
    """Return whether the PUB socket binds this endpoint (vLLM's rule) instead of connecting to it."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _attach(zmq_socket: zmq.Socket[bytes], endpoint: str, *, bind: bool) -> str:
    """Bind or connect a socket; return the endpoint with the actual port instead of 0 or ``*``."""
    zmq_socket.setsockopt(zmq.LINGER, 0)
    zmq_socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    try:
        (zmq_socket.bind if bind else zmq_socket.connect)(endpoint)
    except zmq.ZMQError as error:
        verb = "bind" if bind else "connect to"
        reason = zmq.strerror(error.errno or 0)
        raise StartError(f"KV events: cannot {verb} {endpoint}: {reason}") from error
    address, _, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp://") and port in ("0", "*"):
        return f"{address}:{zmq_socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(':')[2]}"
    return endpoint
