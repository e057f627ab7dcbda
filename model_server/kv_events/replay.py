"""Replay of past event batches to subscribers with a sequence gap (vLLM's ROUTER protocol plus topic frame).

Request: ``[b"", start_sequence]``. Replies: ``[b"", topic, sequence, payload]`` for every buffered batch from
there on, then ``[b"", b"", ff*8, b""]``. Runs on the publisher's thread only.
"""

import errno
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import zmq

from model_server.kv_events.events import KVEvent, KVEventBatch, encode_batch

END_SEQUENCE = b"\xff" * 8

_SEQUENCE = struct.Struct(">Q")
_REQUEST_BYTES_MAX = 1024
_REQUESTS_PER_TURN = 64
_CLIENTS_MAX = 64
_BATCHES_PER_TURN = 256
# Batches in a client's send queue. Small, to bound the memory of clients that do not read.
_PIPE_BATCHES = 512
_BLOCKED_WAIT_MS = 5
_STALLED_S = 10.0


class SequencedBatch:
    """Batch with its sequence number, encoded on first use on the publisher's thread."""

    __slots__ = ("_batch", "_payload", "sequence")

    def __init__(self, sequence: int, batch: KVEventBatch) -> None:
        self.sequence = sequence
        self._batch: KVEventBatch | None = batch
        self._payload: bytes | None = None

    @property
    def sequence_frame(self) -> bytes:
        """Sequence number in wire format: 8 bytes, big-endian."""
        return _SEQUENCE.pack(self.sequence)

    def payload(self) -> bytes:
        """Return the encoded batch; the first call encodes it and drops the events."""
        if self._payload is None:
            assert self._batch is not None
            self._payload, self._batch = encode_batch(self._batch), None
        return self._payload


class ReplayBuffer:
    """Ring buffer of the last `capacity` batches; one thread appends while another reads."""

    def __init__(self, capacity: int) -> None:
        self._slots: list[SequencedBatch | None] = [None] * capacity
        self.next_sequence = 0

    def append(self, ts: float, events: Sequence[KVEvent]) -> SequencedBatch:
        """Store one step's events under the next sequence number; the first is 0."""
        batch = SequencedBatch(self.next_sequence, KVEventBatch(ts, events))
        self._slots[batch.sequence % len(self._slots)] = batch
        self.next_sequence += 1
        return batch

    def oldest_sequence(self) -> int:
        return max(0, self.next_sequence - len(self._slots))

    def batches(self, start: int, stop: int) -> Iterator[SequencedBatch]:
        """Yield the batches of [start, stop) that are still buffered."""
        for sequence in range(max(start, self.oldest_sequence()), stop):
            batch = self._slots[sequence % len(self._slots)]
            # The appending thread may have overwritten the slot.
            if batch is not None and batch.sequence == sequence:
                yield batch


@dataclass(slots=True)
class PublisherStats:
    """Counters of the publisher since its start."""

    published: int = 0  # batches sent on the PUB socket
    dropped: int = 0  # batches not sent because the queue was full; a replay can still deliver them
    replays: int = 0  # replay requests accepted
    replays_rejected: int = 0  # replay requests rejected: malformed, or beyond 64 clients


@dataclass(slots=True)
class _Replay:
    next_sequence: int
    stop_sequence: int
    progress_s: float


@dataclass(eq=False)
class ReplayServer:
    """Server of replay requests that never blocks and serves its clients round-robin.

    A client at its high-water mark does not delay the others; its replay is cancelled when it reads nothing
    for 10 s. A second request of the same client replaces the first.
    """

    socket: "zmq.Socket[bytes]"  # a bound ROUTER socket, prepared by `limit`
    topic: bytes
    ring: ReplayBuffer
    stats: PublisherStats
    _replays: dict[bytes, _Replay] = field(default_factory=dict)

    @staticmethod
    def limit(socket: "zmq.Socket[bytes]") -> None:
        """Limit the memory that clients can use through the socket. Call before binding it."""
        socket.setsockopt(zmq.MAXMSGSIZE, _REQUEST_BYTES_MAX)
        socket.setsockopt(zmq.RCVHWM, _REQUESTS_PER_TURN)
        socket.setsockopt(zmq.SNDHWM, _PIPE_BATCHES)
        # Without it, batches to a full or disconnected client would be dropped silently during a replay.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)

    def serve(self, now_s: float) -> int | None:
        """Accept new requests and send the next batches of every open replay.

        Returns:
            Milliseconds until the next call is due; None to wait for a request.
        """
        more_requests = self._receive(now_s)
        progress = False
        for client in list(self._replays):
            progress |= self._advance(client, now_s)
        if more_requests or progress:
            return 0
        return _BLOCKED_WAIT_MS if self._replays else None

    def _receive(self, now_s: float) -> bool:
        for _ in range(_REQUESTS_PER_TURN):
            try:
                frames = self._receive_frames()
            except zmq.Again:
                return False
            self._accept(frames, now_s)
        return True

    def _receive_frames(self) -> list[bytes]:
        """Read one message; keep at most 4 frames, one more than a valid request has."""
        frames: list[bytes] = []
        while True:
            frame = self.socket.recv(zmq.NOBLOCK)
            if len(frames) < 4:
                frames.append(frame)
            if not self.socket.getsockopt(zmq.RCVMORE):
                return frames

    def _accept(self, frames: list[bytes], now_s: float) -> None:
        well_formed = len(frames) == 3 and frames[1] == b"" and len(frames[2]) == _SEQUENCE.size
        if not well_formed or (len(self._replays) >= _CLIENTS_MAX and frames[0] not in self._replays):
            self.stats.replays_rejected += 1
            return
        (start,) = _SEQUENCE.unpack(frames[2])
        self._replays[frames[0]] = _Replay(start, self.ring.next_sequence, now_s)
        self.stats.replays += 1

    def _advance(self, client: bytes, now_s: float) -> bool:
        """Send one client's next batches; return whether more remain and can be sent at once."""
        replay = self._replays[client]
        begun_at = replay.next_sequence
        first = max(begun_at, self.ring.oldest_sequence())
        turn_end = min(replay.stop_sequence, first + _BATCHES_PER_TURN)
        try:
            for batch in self.ring.batches(first, turn_end):
                self._send(client, self.topic, batch.sequence_frame, batch.payload())
                replay.next_sequence = batch.sequence + 1
            replay.next_sequence = turn_end
            if turn_end < replay.stop_sequence:
                replay.progress_s = now_s
                return True
            self._send(client, b"", END_SEQUENCE, b"")
        except zmq.Again:
            if replay.next_sequence > begun_at:
                replay.progress_s = now_s
            if now_s - replay.progress_s < _STALLED_S:
                return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
        del self._replays[client]
        return False

    def _send(self, client: bytes, *frames: bytes) -> None:
        self.socket.send_multipart((client, b"", *frames), flags=zmq.NOBLOCK)
