"""Replay of past event batches to subscribers that missed some (vLLM's ROUTER protocol, with topic frame).

In: requests ``[b"", start_sequence]``; out: ``[b"", topic, sequence, payload]`` for every kept batch from
there on, then ``[b"", b"", ff*8, b""]``. Used on the publisher's thread only; knows nothing of live events.
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
# Small, so that a client that asks and does not read holds little memory; its replay waits as two numbers.
_PIPE_BATCHES = 512
_BLOCKED_WAIT_MS = 5
_STALLED_S = 10.0


class Step:
    """One batch with its sequence number; encoded on first need, on the publisher's thread."""

    __slots__ = ("_batch", "_payload", "sequence")

    def __init__(self, sequence: int, batch: KVEventBatch) -> None:
        self.sequence = sequence
        self._batch: KVEventBatch | None = batch
        self._payload: bytes | None = None

    @property
    def sequence_frame(self) -> bytes:
        """The sequence number as on the wire: 8 bytes, big-endian."""
        return _SEQUENCE.pack(self.sequence)

    def payload(self) -> bytes:
        """The encoded batch; the events themselves are let go once it exists."""
        if self._payload is None:
            assert self._batch is not None
            self._payload, self._batch = encode_batch(self._batch), None
        return self._payload


class StepRing:
    """The last `capacity` steps by sequence number; one thread appends while another reads."""

    def __init__(self, capacity: int) -> None:
        self._slots: list[Step | None] = [None] * capacity
        self.next_sequence = 0

    def append(self, ts: float, events: Sequence[KVEvent], rank: int | None) -> Step:
        """Keep one step's events under the next sequence number, which starts at 0."""
        step = Step(self.next_sequence, KVEventBatch(ts, events, rank))
        self._slots[step.sequence % len(self._slots)] = step
        self.next_sequence += 1
        return step

    def oldest_sequence(self) -> int:
        return max(0, self.next_sequence - len(self._slots))

    def steps(self, start: int, stop: int) -> Iterator[Step]:
        """Yield those of [start, stop) that are still kept."""
        for sequence in range(max(start, self.oldest_sequence()), stop):
            step = self._slots[sequence % len(self._slots)]
            # The appending thread may have overwritten the slot meanwhile.
            if step is not None and step.sequence == sequence:
                yield step


@dataclass(slots=True)
class _Replay:
    next_sequence: int
    stop_sequence: int
    progress_s: float


@dataclass(eq=False)
class ReplayServer:
    """Answers replay requests without ever blocking, many clients in turn.

    A client at its high-water mark waits without holding the others up, and is given up when it takes nothing
    for 10 s. A second request of the same client replaces its first.
    """

    socket: "zmq.Socket[bytes]"  # a bound ROUTER socket, prepared by `limit`
    topic: bytes
    ring: StepRing
    served: int = 0  # requests taken
    rejected: int = 0  # requests that were malformed, or came while 64 clients were being served
    _replays: dict[bytes, _Replay] = field(default_factory=dict)

    @staticmethod
    def limit(socket: "zmq.Socket[bytes]") -> None:
        """Cap what a client can make the socket hold; to be called before it is bound."""
        socket.setsockopt(zmq.MAXMSGSIZE, _REQUEST_BYTES_MAX)
        socket.setsockopt(zmq.RCVHWM, _REQUESTS_PER_TURN)
        socket.setsockopt(zmq.SNDHWM, _PIPE_BATCHES)
        # Without it a full or vanished client would swallow batches silently, in the middle of a replay.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)

    def serve(self, now_s: float) -> int | None:
        """Take new requests and send the next piece of every open replay.

        Returns milliseconds until it wants to be called again; None for when a request arrives.
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
        """Read one message, keeping no more frames than it takes to see that there are too many."""
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
            self.rejected += 1
            return
        (start,) = _SEQUENCE.unpack(frames[2])
        self._replays[frames[0]] = _Replay(start, self.ring.next_sequence, now_s)
        self.served += 1

    def _advance(self, client: bytes, now_s: float) -> bool:
        """Send one client's next batches; returns whether any went out and more are to come."""
        replay = self._replays[client]
        begun_at = replay.next_sequence
        first = max(begun_at, self.ring.oldest_sequence())
        turn_end = min(replay.stop_sequence, first + _BATCHES_PER_TURN)
        try:
            for step in self.ring.steps(first, turn_end):
                self._send(client, self.topic, step.sequence_frame, step.payload())
                replay.next_sequence = step.sequence + 1
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
