"""Streams of engines that we connect to, and replays from an engine's replay socket.

A replay uses vLLM's protocol over a DEALER socket, in all its forms. The request is ["", sequence]. Each
answer is ["", sequence, payload] up to vLLM 0.24, or ["", topic, sequence, payload] from later releases and
SGLang; the last answer has the sequence number -1 and no payload.

A subscription has at most one connection. When it is lost, queued messages may be of an engine process that
has ended, so the socket is closed and a new one opened. Runs on the subscriber's thread only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from indexer.config import PodStream
from indexer.errors import PayloadError
from indexer.index.contract import StreamState
from indexer.streams.actions import Action, Batch, Fetch, Purpose, Replay
from indexer.streams.recovery import MESSAGE_FACTOR, TURN_BYTES, TURN_MESSAGES, EngineStream, StreamThread

_RETRY_S, RETRY_MAX_S = 0.1, 5.0
_REOPEN_S = 0.1
_SLOT_RETRY_S = 0.02
_READABLE = int(zmq.POLLIN)
_SEQUENCE_BYTES = 8
_END_SEQUENCE = b"\xff" * _SEQUENCE_BYTES


def subscription(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, topic_prefix: str, max_message_bytes: int
) -> zmq.Socket[bytes]:
    """Return a SUB socket with bounded queue and message size, and with heartbeats against silent peers."""
    socket = context.socket(zmq.SUB)
    socket.linger = 0
    # Each queued message may have the maximum size; further messages wait at the publisher.
    socket.rcvhwm = 8
    socket.maxmsgsize = max_message_bytes  # libzmq closes the connection above it
    # Milliseconds.
    socket.heartbeat_ivl, socket.heartbeat_timeout = 2000, 6000
    socket.reconnect_ivl, socket.reconnect_ivl_max = 100, 1000
    socket.connect_timeout = 3000
    socket.ipv6 = "[" in endpoint
    socket.subscribe(topic_prefix)
    return socket


def close_subscription(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    """Close a subscription and its monitor socket."""
    socket.disable_monitor()
    monitor.close(linger=0)
    socket.close(linger=0)


def _replay_socket(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, start: int, max_message_bytes: int
) -> zmq.Socket[bytes]:
    """Request a replay from `start` on; return the socket of the answers, ZMQError for a bad endpoint."""
    asked = context.socket(zmq.DEALER)
    asked.linger = 0
    asked.maxmsgsize = max_message_bytes
    # The engine's ROUTER socket drops answers beyond our queue, and a replay is as long as its buffer.
    asked.rcvhwm = 100_000
    asked.ipv6 = "[" in endpoint
    try:
        asked.connect(endpoint)
        asked.send_multipart([b"", start.to_bytes(_SEQUENCE_BYTES, "big")], zmq.NOBLOCK)
    except zmq.ZMQError:
        asked.close()
        raise
    return asked


def _parse_answer(frames: list[bytes]) -> Batch | None:
    """Parse one answer of a replay socket, PayloadError if it cannot be; None marks the replay's end."""
    if len(frames) not in (3, 4) or frames[0]:
        raise PayloadError("replay_frames", f"an answer of {len(frames)} frames")
    sequence, payload = frames[-2:]
    return None if sequence == _END_SEQUENCE else _batch(sequence, payload)


def parse_live(frames: list[bytes]) -> Batch:
    """Parse one live message of a publisher: [topic, sequence, payload].

    Raises:
        PayloadError: The message violates the protocol.
    """
    if len(frames) != 3:
        raise PayloadError("frame_count", f"a message of {len(frames)} frames")
    return _batch(frames[1], frames[2])


def _batch(sequence: bytes, payload: bytes) -> Batch:
    if len(sequence) != _SEQUENCE_BYTES or sequence == _END_SEQUENCE:
        raise PayloadError("sequence", f"a sequence number of {len(sequence)} bytes, or none")
    return Batch(int.from_bytes(sequence, "big"), payload)


def received(socket: zmq.Socket[bytes], *, copy: bool = True) -> Iterator[list[Any]]:
    """Yield the messages that wait at a socket, at most those of one turn."""
    taken_bytes = 0
    for _ in range(TURN_MESSAGES):
        # Polling ZMQ_EVENTS costs a tenth of a receive that finds no message.
        if taken_bytes >= TURN_BYTES or not int(socket.getsockopt(zmq.EVENTS)) & _READABLE:
            return
        frames = socket.recv_multipart(zmq.NOBLOCK, copy=copy)
        taken_bytes += sum(map(len, frames))
        yield frames


class ReplayingStream(EngineStream):
    """Stream of an engine over a live connection; missing batches are requested from its replay socket."""

    connected = False
    _replay: zmq.Socket[bytes] | None = None
    _replay_ends_s = 0.0
    _replay_attempts = 0
    _aging: Iterator[None] | None = None

    def __init__(self, stream: PodStream, subscriber: StreamThread) -> None:
        super().__init__(stream, subscriber)
        self._timers[self._age_tiers] = subscriber.clock() + self._config.unproven_tier_ttl_s

    def _age_tiers(self, now_s: float) -> None:
        turns = self._aging or self._ingest.state_of(self.name).age_tiers()
        is_done = self._exports is not None or next(turns, turns) is turns
        self._aging = None if is_done else turns
        self._timers[self._age_tiers] = now_s + self._config.unproven_tier_ttl_s if is_done else -math.inf

    def _set_connected(self, up: bool, now_s: float) -> None:
        if up == self.connected:
            return
        self.connected = up
        if up:
            self._subscriber.end_relay(self.name)
        self._ingest.link(self.name, up)
        if up:
            self.link_up(now_s)
        else:
            self.link_down(now_s)

    def _begin_replay(self, now_s: float) -> None:
        if self._replay is not None:
            self._ingest.records.replay(self.name, "superseded")
        self._stop_replay()
        self._replay_attempts = 0
        if self._machine.reason == Purpose.HISTORY:
            self._source = "replay"
        self._ask(now_s)

    def _stop_replay(self) -> None:
        self._timers.pop(self._ask, None)
        if self._replay is not None:
            self._timers.pop(self._break_off, None)
            self._subscriber.unwatch(self._replay)
            self._replay.close()
            self._replay = None
            self._subscriber.free_replays += 1

    def _ask(self, now_s: float) -> None:
        start, endpoint = self._machine.replay_start, self.stream.replay_endpoint
        if start is None or endpoint is None:
            return
        if not self._subscriber.free_replays:
            self._timers[self._ask] = now_s + _SLOT_RETRY_S
            return
        limit = MESSAGE_FACTOR * self._config.max_payload_bytes
        try:
            self._replay = _replay_socket(self._subscriber.context, endpoint, start, limit)
        except zmq.ZMQError:
            self._ingest.records.socket_error(self.name, "replay")
            self._retry(now_s)
            return
        self._replay_ends_s = now_s + self._config.replay_total_s
        self._await_answer(now_s)
        self._subscriber.free_replays -= 1
        self._subscriber.watch(self, self._replay, self._on_replay)

    def _await_answer(self, now_s: float) -> None:
        self._timers[self._break_off] = min(now_s + self._config.replay_idle_s, self._replay_ends_s)

    def _break_off(self, now_s: float) -> None:
        self._stop_replay()
        self._retry(now_s)

    def _retry(self, now_s: float) -> None:
        self._replay_attempts += 1
        if self._replay_attempts < self._config.replay_attempts:
            self._timers[self._ask] = now_s + min(RETRY_MAX_S, _RETRY_S * 4 ** (self._replay_attempts - 1))
            return
        self._ingest.records.replay(self.name, "failed")
        self._perform(self._machine.replay_failed(), now_s)

    def _on_replay(self, now_s: float) -> None:
        replay = self._replay
        actions: list[Action] = []
        assert replay is not None
        for answer in self._answers(replay):
            if answer is None:
                self._stop_replay()
                self._ingest.records.replay(self.name, "completed")
                if self._machine.state is StreamState.RECOVERING:
                    # Batches published before the subscription took effect are found by the tail check.
                    self._check_tail_later(now_s)
                actions += self._machine.replay_ended()
                break
            step = self._machine.replayed(answer.sequence, answer.payload)
            actions += step
            if any(isinstance(action, Replay | Fetch) for action in step):
                break
        self._perform(actions, now_s)
        if self._replay is replay:
            self._await_answer(now_s)

    def _answers(self, replay: zmq.Socket[bytes]) -> Iterator[Batch | None]:
        for frames in received(replay):
            try:
                answer = _parse_answer(frames)
            except PayloadError as error:
                self._ingest.records.rejected(self.name, error.reason)
            else:
                yield answer


class DialledStream(ReplayingStream):
    """Stream of an engine whose publisher we connect to."""

    def __init__(self, stream: PodStream, subscriber: StreamThread) -> None:
        super().__init__(stream, subscriber)
        # The subscription and its monitor socket.
        self._link: tuple[zmq.Socket[bytes], zmq.Socket[bytes]] | None = None
        self._timers[self._open] = -math.inf

    def close(self) -> None:
        super().close()
        self._close_link()

    def reset(self, now_s: float) -> None:
        self._close_link()
        super().reset(now_s)
        self._set_connected(False, now_s)
        self._timers[self._open] = now_s + RETRY_MAX_S

    def _close_link(self) -> None:
        if self._link is not None:
            for socket in self._link:
                self._subscriber.unwatch(socket)
            close_subscription(*self._link)
            self._link = None
        self._timers.pop(self._open, None)

    def _open(self, now_s: float) -> None:
        endpoint, topic = self.stream.events_endpoint, self.stream.topic_prefix
        assert endpoint is not None
        socket = subscription(
            self._subscriber.context,
            endpoint,
            self._config.topic_prefix if topic is None else topic,
            MESSAGE_FACTOR * self._config.max_payload_bytes,
        )
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError:
            close_subscription(socket, monitor)
            self._ingest.records.socket_error(self.name, "subscribe")
            self._timers[self._open] = now_s + RETRY_MAX_S
            return
        self._link = socket, monitor
        # The monitor comes first, so that a connection is known before its first message is read.
        self._subscriber.watch(self, monitor, self._on_monitor)
        self._subscriber.watch(self, socket, self._on_live)
        self.report()

    def _on_monitor(self, now_s: float) -> None:
        while self._link is not None:
            try:
                change = recv_monitor_message(self._link[1], zmq.NOBLOCK)
            except zmq.Again:
                return
            is_made = change["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if not is_made:
                self._close_link()
                self._timers[self._open] = now_s + _REOPEN_S
            self._set_connected(is_made, now_s)

    def _on_live(self, now_s: float) -> None:
        assert self._link is not None
        self._set_connected(True, now_s)
        batches: list[Batch] = []
        for frames in received(self._link[0]):
            try:
                batches.append(parse_live(frames))
            except PayloadError as error:
                self._ingest.records.rejected(self.name, error.reason)
        self.live(batches, now_s)
