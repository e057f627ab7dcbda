"""Follows one pod: its sockets' messages go into the stream machine, the machine's actions out to the sink.

Runs on the subscriber's thread only. Owns the pod's publisher link, its replay and their timers; knows no
events.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import zmq

from indexer.config import IndexerConfig, PodStream
from indexer.link import Link, LinkEvent
from indexer.replay import Broken, End, ReplayRequest
from indexer.sink import StreamSink
from indexer.stream import Action, Apply, Clear, Replay, StreamMachine, StreamState

# What one socket may take of the thread before the others have their turn.
_TURN_MESSAGES = 64
_TURN_BYTES = 1 << 20

# Up to here a message that is too long is read, counted and passed over; above it the connection is cut.
_MESSAGE_FACTOR = 4

_REOPEN_S = 0.1
_RETRY_S = 0.1
_RETRY_MAX_S = 5.0
_SLOT_RETRY_S = 0.02
# Quiet for this long, a stream's tail is checked.
_QUIET_S = 1.0


class Sockets(Protocol):
    """What followers share: the context, the poller's list, and the right to replay."""

    context: zmq.Context[zmq.Socket[bytes]]
    free_replays: int

    def watch(
        self, owner: Follower, watched: zmq.Socket[bytes], on_readable: Callable[[float], None]
    ) -> None:
        """Calls back with the time whenever the socket can be read."""
        ...

    def unwatch(self, watched: zmq.Socket[bytes]) -> None:
        """Ends that."""
        ...


class Follower:
    """One pod's stream."""

    def __init__(self, stream: PodStream, config: IndexerConfig, sink: StreamSink, sockets: Sockets) -> None:
        self.stream = stream
        self._config = config
        self._sink = sink
        self._sockets = sockets
        self._machine = self._new_machine()
        self._reported: tuple[StreamState, str] | None = None
        self._gaps_reported = 0
        self._link: Link | None = None
        self._up = False
        self._replay: ReplayRequest | None = None
        self._replay_attempts = 0
        # When to do what; infinity: not at all.
        self._open_s = -math.inf
        self._ask_s = math.inf
        self._quiet_s = math.inf

    @property
    def due_s(self) -> float:
        """When `tick` must be called next."""
        replay_s = self._replay.fails_at_s if self._replay else math.inf
        return min(self._open_s, self._ask_s, self._quiet_s, replay_s)

    def tick(self, now_s: float) -> None:
        """Does what is due."""
        if now_s >= self._open_s:
            self._open(now_s)
        if self._replay is not None and now_s >= self._replay.fails_at_s:
            self._stop_replay()
            self._retry(now_s)
        if now_s >= self._ask_s:
            self._ask(now_s)
        if now_s >= self._quiet_s:
            self._quiet_s = math.inf
            self._perform(self._machine.check_tail(), now_s)

    def close(self) -> None:
        """Ends the subscription; the sink is told nothing more."""
        self._stop_replay()
        if self._link is not None:
            self._sockets.unwatch(self._link.monitor)
            self._sockets.unwatch(self._link.socket)
            self._link.close()
            self._link = None
        self._open_s = self._quiet_s = math.inf

    def reset(self, now_s: float) -> None:
        """Begins anew after an error of our own, so that it costs one pod's view and nothing else."""
        self.close()
        self._machine = self._new_machine()
        self._gaps_reported = 0
        self._sink.clear(self.stream.pod, "internal_error")
        self._set_up(False)
        self._report()
        self._open_s = now_s + _RETRY_MAX_S

    def _new_machine(self) -> StreamMachine:
        return StreamMachine(
            replayable=self.stream.replay_endpoint is not None,
            max_batches=self._config.recovery_batches_per_pod,
            max_bytes=self._config.recovery_bytes_per_pod,
        )

    def _open(self, now_s: float) -> None:
        self._open_s = math.inf
        try:
            self._link = Link(
                self._sockets.context,
                self.stream.events_endpoint,
                topic_prefix=self._config.topic_prefix,
                max_message_bytes=_MESSAGE_FACTOR * self._config.max_payload_bytes,
            )
        except zmq.ZMQError:
            self._sink.socket_error(self.stream.pod, "subscribe")
            self._open_s = now_s + _RETRY_MAX_S
            return
        # The monitor first: a connection is known before its first message is read.
        self._sockets.watch(self, self._link.monitor, self._on_monitor)
        self._sockets.watch(self, self._link.socket, self._on_live)
        self._report()

    def _on_monitor(self, now_s: float) -> None:
        while self._link is not None and (event := self._link.next_event()) is not None:
            if event is LinkEvent.UP:
                self._connected(now_s)
            else:
                self.close()
                self._set_up(False)
                self._perform(self._machine.link_down(), now_s)
                self._open_s = now_s + _REOPEN_S

    def _connected(self, now_s: float) -> None:
        if not self._up:
            self._set_up(True)
            self._perform(self._machine.link_up(), now_s)

    def _set_up(self, up: bool) -> None:
        if up != self._up:
            self._up = up
            self._sink.link(self.stream.pod, up)

    def _on_live(self, now_s: float) -> None:
        """Takes a turn's share of what waits, then applies it together."""
        assert self._link is not None
        self._connected(now_s)
        actions: list[Action] = []
        batches = taken_bytes = 0
        for _ in range(_TURN_MESSAGES):
            message = self._link.receive() if taken_bytes < _TURN_BYTES else None
            if message is None:
                break
            if isinstance(message, Broken):
                self._sink.rejected(self.stream.pod, message.reason)
                continue
            batches += 1
            taken_bytes += len(message.payload)
            actions += self._machine.live(message.sequence, message.payload)
        self._sink.received(self.stream.pod, batches, self._machine.gaps - self._gaps_reported)
        self._gaps_reported = self._machine.gaps
        self._quiet_s = now_s + _QUIET_S
        self._perform(actions, now_s)

    def _perform(self, actions: list[Action], now_s: float) -> None:
        batches: list[Apply] = []
        for action in actions:
            if isinstance(action, Apply):
                batches.append(action)
                continue
            self._apply(batches)
            batches = []
            if isinstance(action, Clear):
                self._sink.clear(self.stream.pod, action.reason)
            else:
                self._begin_replay(now_s)
        self._apply(batches)
        self._report()

    def _apply(self, batches: list[Apply]) -> None:
        """Applies batches of one view together."""
        if not batches:
            return
        verdict = self._sink.apply(self.stream.pod, [batch.payload for batch in batches])
        if verdict.emptied:
            self._machine.emptied(batches[0].view)
        if verdict.damage is not None:
            self._machine.damaged(batches[0].view, verdict.damage)

    def _report(self) -> None:
        current = (self._machine.state, self._machine.reason)
        if current != self._reported:
            self._reported = current
            self._sink.state(self.stream.pod, *current)

    def _begin_replay(self, now_s: float) -> None:
        if self._replay is not None:
            self._sink.replay(self.stream.pod, "superseded")
        self._stop_replay()
        self._replay_attempts = 0
        self._ask(now_s)

    def _stop_replay(self) -> None:
        self._ask_s = math.inf
        if self._replay is not None:
            self._sockets.unwatch(self._replay.socket)
            self._replay.close()
            self._replay = None
            self._sockets.free_replays += 1

    def _ask(self, now_s: float) -> None:
        self._ask_s = math.inf
        start = self._machine.replay_start
        if start is None or self.stream.replay_endpoint is None:
            return
        if not self._sockets.free_replays:
            self._ask_s = now_s + _SLOT_RETRY_S
            return
        try:
            self._replay = ReplayRequest(
                self._sockets.context,
                self.stream.replay_endpoint,
                start,
                now_s,
                idle_s=self._config.replay_idle_s,
                total_s=self._config.replay_total_s,
                max_message_bytes=_MESSAGE_FACTOR * self._config.max_payload_bytes,
            )
        except zmq.ZMQError:
            self._sink.socket_error(self.stream.pod, "replay")
            self._retry(now_s)
            return
        self._sockets.free_replays -= 1
        self._sockets.watch(self, self._replay.socket, self._on_replay)

    def _retry(self, now_s: float) -> None:
        """Asks once more, later and later; gives up in the end."""
        self._replay_attempts += 1
        if self._replay_attempts < self._config.replay_attempts:
            self._ask_s = now_s + min(_RETRY_MAX_S, _RETRY_S * 4 ** (self._replay_attempts - 1))
            return
        self._sink.replay(self.stream.pod, "failed")
        self._perform(self._machine.replay_failed(), now_s)

    def _on_replay(self, now_s: float) -> None:
        """Takes a turn's share of the answers, then applies them together."""
        replay = self._replay
        assert replay is not None
        actions: list[Action] = []
        taken_bytes = 0
        for _ in range(_TURN_MESSAGES):
            answer = replay.receive(now_s) if taken_bytes < _TURN_BYTES else None
            if answer is None:
                break
            if isinstance(answer, Broken):
                self._sink.rejected(self.stream.pod, answer.reason)
            elif isinstance(answer, End):
                self._stop_replay()
                self._sink.replay(self.stream.pod, "completed")
                if self._machine.state is StreamState.RECOVERING:
                    # What was published before the subscription took effect shows as a lost tail.
                    self._quiet_s = now_s + _QUIET_S
                actions += self._machine.replay_ended()
                break
            else:
                taken_bytes += len(answer.payload)
                step = self._machine.replayed(answer.sequence, answer.payload)
                actions += step
                if any(isinstance(action, Replay) for action in step):
                    break
        self._perform(actions, now_s)
