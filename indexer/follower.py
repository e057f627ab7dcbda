"""Follows one engine by asking its own sockets: the connection to its publisher, and replays.

A link is one connection at most: when it is lost, whatever is still queued belongs to a life that may be
over, so the whole socket is thrown away and a new one opened. Runs on the subscriber's thread only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import zmq
from zmq.utils.monitor import recv_monitor_message

from indexer.config import IndexerConfig, PodStream
from indexer.recovery import MESSAGE_FACTOR, RETRY_MAX_S, TURN_BYTES, TURN_MESSAGES, EngineStream
from indexer.replay import Batch, Broken, End, ReplayRequest, parse_live

if TYPE_CHECKING:
    from indexer.ingest import Ingest
    from indexer.subscribe import Subscriber

_REOPEN_S = 0.1
_SLOT_RETRY_S = 0.02
_READABLE = int(zmq.POLLIN)
# Messages that wait unread cost memory, each as much as a message may have; the rest waits at the publisher.
_RECEIVE_QUEUE = 8
_HEARTBEAT_MS = 2000
_HEARTBEAT_TIMEOUT_MS = 6000
_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 1000
_CONNECT_TIMEOUT_MS = 3000


class Link:
    """A subscription to one publisher.

    Args:
        topic_prefix: What to subscribe to; empty for all. Topics say nothing that we use.
        max_message_bytes: Above it the connection is cut.

    Raises:
        zmq.ZMQError: The endpoint is unusable.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        topic_prefix: str,
        max_message_bytes: int,
    ) -> None:
        self.socket = context.socket(zmq.SUB)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        limit(self.socket, endpoint, max_message_bytes)
        self.socket.subscribe(topic_prefix)
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def next_change(self) -> bool | None:
        """Whether the connection was made, or lost, next; None when nothing has changed."""
        try:
            message = recv_monitor_message(self.monitor, zmq.NOBLOCK)
        except zmq.Again:
            return None
        return bool(message["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)

    @property
    def waiting(self) -> bool:
        """Whether a message is there: to ask costs a tenth of a `receive` that finds none."""
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & _READABLE)

    def receive(self) -> Batch | Broken | None:
        try:
            return parse_live(self.socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close()


def limit(subscriber: zmq.Socket[bytes], endpoint: str, max_message_bytes: int) -> None:
    """Bounds what a SUB socket takes, and how long it believes in a silent peer."""
    options = {
        zmq.LINGER: 0,
        zmq.RCVHWM: _RECEIVE_QUEUE,
        zmq.MAXMSGSIZE: max_message_bytes,
        zmq.HEARTBEAT_IVL: _HEARTBEAT_MS,
        zmq.HEARTBEAT_TIMEOUT: _HEARTBEAT_TIMEOUT_MS,
        zmq.RECONNECT_IVL: _RECONNECT_MS,
        zmq.RECONNECT_IVL_MAX: _RECONNECT_MAX_MS,
        zmq.CONNECT_TIMEOUT: _CONNECT_TIMEOUT_MS,
        zmq.IPV6: "[" in endpoint,
    }
    for option, value in options.items():
        subscriber.setsockopt(option, value)


class ReplayingStream(EngineStream):
    """A stream whose engine is asked itself for what is missing."""

    _replay: ReplayRequest | None = None

    def _begin_replay(self, now_s: float) -> None:
        if self._replay is not None:
            self._sink.replay(self.name, "superseded")
        super()._begin_replay(now_s)

    def _stop_replay(self) -> None:
        self._timers.pop(self._ask, None)
        if self._replay is not None:
            self._timers.pop(self._break_off, None)
            self._sockets.unwatch(self._replay.socket)
            self._replay.close()
            self._replay = None
            self._sockets.free_replays += 1

    def _ask(self, now_s: float) -> None:
        start = self._machine.replay_start
        if start is None or self.stream.replay_endpoint is None:
            return
        if not self._sockets.free_replays:
            self._timers[self._ask] = now_s + _SLOT_RETRY_S
            return
        try:
            self._replay = ReplayRequest(
                self._sockets.context,
                self.stream.replay_endpoint,
                start,
                now_s,
                idle_s=self._config.replay_idle_s,
                total_s=self._config.replay_total_s,
                max_message_bytes=MESSAGE_FACTOR * self._config.max_payload_bytes,
            )
        except zmq.ZMQError:
            self._sink.socket_error(self.name, "replay")
            self._retry(now_s)
            return
        self._timers[self._break_off] = self._replay.fails_at_s
        self._sockets.free_replays -= 1
        self._sockets.watch(self, self._replay.socket, self._on_replay)

    def _break_off(self, now_s: float) -> None:
        """The replay has not been answered for too long, or takes too long."""
        self._stop_replay()
        self._retry(now_s)

    def _on_replay(self, now_s: float) -> None:
        replay = self._replay
        assert replay is not None
        self._on_replayed(self._answers(replay, now_s), now_s)
        if self._replay is replay:
            self._timers[self._break_off] = replay.fails_at_s

    def _answers(self, replay: ReplayRequest, now_s: float) -> Iterator[Batch | End]:
        taken_bytes = 0
        for _ in range(TURN_MESSAGES):
            answer = replay.receive(now_s) if taken_bytes < TURN_BYTES else None
            if answer is None:
                return
            if isinstance(answer, Broken):
                self._sink.rejected(self.name, answer.reason)
                continue
            if isinstance(answer, Batch):
                taken_bytes += len(answer.payload)
            yield answer


class Follower(ReplayingStream):
    """One engine's stream whose publisher we connect to."""

    def __init__(self, stream: PodStream, config: IndexerConfig, sink: Ingest, sockets: Subscriber) -> None:
        super().__init__(stream, config, sink, sockets)
        self.connected = False
        self._link: Link | None = None
        self._timers[self._open] = -math.inf

    def close(self) -> None:
        super().close()
        self._close_link()

    def reset(self, now_s: float) -> None:
        self._close_link()
        super().reset(now_s)
        self._set_connected(False)
        self._timers[self._open] = now_s + RETRY_MAX_S

    def _close_link(self) -> None:
        if self._link is not None:
            self._sockets.unwatch(self._link.monitor)
            self._sockets.unwatch(self._link.socket)
            self._link.close()
            self._link = None
        self._timers.pop(self._open, None)

    def _open(self, now_s: float) -> None:
        assert self.stream.events_endpoint is not None
        topic = self.stream.topic_prefix
        try:
            self._link = Link(
                self._sockets.context,
                self.stream.events_endpoint,
                topic_prefix=self._config.topic_prefix if topic is None else topic,
                max_message_bytes=MESSAGE_FACTOR * self._config.max_payload_bytes,
            )
        except zmq.ZMQError:
            self._sink.socket_error(self.name, "subscribe")
            self._timers[self._open] = now_s + RETRY_MAX_S
            return
        # The monitor first: a connection is known before its first message is read.
        self._sockets.watch(self, self._link.monitor, self._on_monitor)
        self._sockets.watch(self, self._link.socket, self._on_live)
        self.report()

    def _on_monitor(self, now_s: float) -> None:
        while self._link is not None and (is_made := self._link.next_change()) is not None:
            if is_made:
                self._on_connected(now_s)
            else:
                self._close_link()
                self._set_connected(False)
                self.link_down(now_s)
                self._timers[self._open] = now_s + _REOPEN_S

    def _on_connected(self, now_s: float) -> None:
        if not self.connected:
            self._sockets.relayed.end(self.name)
            self._set_connected(True)
            self.link_up(now_s)

    def _set_connected(self, up: bool) -> None:
        if up != self.connected:
            self.connected = up
            self._sink.link(self.name, up)

    def _on_live(self, now_s: float) -> None:
        """Takes a turn's share of what waits, then applies it together."""
        assert self._link is not None
        self._on_connected(now_s)
        batches: list[Batch] = []
        taken_bytes = 0
        for _ in range(TURN_MESSAGES):
            message = self._link.receive()
            if isinstance(message, Batch):
                taken_bytes += len(message.payload)
                batches.append(message)
            elif message is not None:
                self._sink.rejected(self.name, message.reason)
            if taken_bytes >= TURN_BYTES or not self._link.waiting:
                break
        self.live(batches, now_s)
