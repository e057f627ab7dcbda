"""Follows one engine by connecting to it: its link's messages and changes go into its recovery.

Runs on the subscriber's thread only. Owns the publisher's link and when to open it again; knows no events.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import zmq

from indexer.config import IndexerConfig, PodStream
from indexer.link import Link, LinkEvent
from indexer.recovery import MESSAGE_FACTOR, RETRY_MAX_S, TURN_BYTES, TURN_MESSAGES, Recovery
from indexer.replay import Batch

if TYPE_CHECKING:
    from indexer.ingest import Ingest
    from indexer.subscribe import Subscriber

_REOPEN_S = 0.1


class Follower:
    """One engine's stream.

    Args:
        stream: What to follow; it has an address to connect to.
        config: Bounds and times.
        sink: Where the stream ends.
        sockets: What it shares with others.
    """

    def __init__(self, stream: PodStream, config: IndexerConfig, sink: Ingest, sockets: Subscriber) -> None:
        self.stream = stream
        self.recovery = Recovery(stream, config, sink, sockets, self)
        self._config = config
        self._sink = sink
        self._sockets = sockets
        self._link: Link | None = None
        self._up = False
        self._open_s = -math.inf

    @property
    def name(self) -> str:
        """Who it is, for the log."""
        return self.stream.holder

    @property
    def due_s(self) -> float:
        """When `tick` must be called next."""
        return min(self._open_s, self.recovery.due_s)

    def tick(self, now_s: float) -> None:
        """Does what is due."""
        if now_s >= self._open_s:
            self._open(now_s)
        self.recovery.tick(now_s)

    def close(self) -> None:
        """Ends the subscription; the sink is told nothing more."""
        self.recovery.stop()
        self._close_link()

    def reset(self, now_s: float) -> None:
        """Begins anew after an error of our own, so that it costs one view and nothing else."""
        self._close_link()
        self.recovery.reset()
        self._set_up(False)
        self._open_s = now_s + RETRY_MAX_S

    def _close_link(self) -> None:
        if self._link is not None:
            self._sockets.unwatch(self._link.monitor)
            self._sockets.unwatch(self._link.socket)
            self._link.close()
            self._link = None
        self._open_s = math.inf

    def _open(self, now_s: float) -> None:
        assert self.stream.events_endpoint is not None
        self._open_s, topic = math.inf, self.stream.topic_prefix
        try:
            self._link = Link(
                self._sockets.context,
                self.stream.events_endpoint,
                topic_prefix=self._config.topic_prefix if topic is None else topic,
                max_message_bytes=MESSAGE_FACTOR * self._config.max_payload_bytes,
            )
        except zmq.ZMQError:
            self._sink.socket_error(self.name, "subscribe")
            self._open_s = now_s + RETRY_MAX_S
            return
        # The monitor first: a connection is known before its first message is read.
        self._sockets.watch(self, self._link.monitor, self._on_monitor)
        self._sockets.watch(self, self._link.socket, self._on_live)
        self.recovery.report()

    def _on_monitor(self, now_s: float) -> None:
        while self._link is not None and (event := self._link.next_event()) is not None:
            if event is LinkEvent.UP:
                self._connected(now_s)
            else:
                self._close_link()
                self._set_up(False)
                self.recovery.link_down(now_s)
                self._open_s = now_s + _REOPEN_S

    def _connected(self, now_s: float) -> None:
        if not self._up:
            self._set_up(True)
            self.recovery.link_up(now_s)

    def _set_up(self, up: bool) -> None:
        if up != self._up:
            self._up = up
            self._sink.link(self.name, up)

    def _on_live(self, now_s: float) -> None:
        """Takes a turn's share of what waits, then applies it together."""
        assert self._link is not None
        self._connected(now_s)
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
        self.recovery.live(batches, now_s)
