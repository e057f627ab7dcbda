"""Recovery of one engine's view: executes the actions that the stream's state machine requests.

Link changes and live batches come in from `dialled`, `bound` and `relayed`; batches to apply go to `ingest`.
Replays, snapshots, their retries and timers are handled here. Runs on the subscriber's thread only.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

import zmq

from indexer.config import IndexerConfig, PodStream
from indexer.index.contract import StreamState
from indexer.streams.actions import Action, Apply, Batch, Clear, Fetch, Replay
from indexer.streams.ingest import Ingest
from indexer.streams.snapshot import Fetched, Snapshot, SnapshotFetcher
from indexer.streams.state_machine import StreamMachine
from indexer.streams.view_export import Feed, ViewExports, exportable_batch
from indexer.views.view_parts import Entry, Outcome, ViewPart, ViewSnapshot

# Limits of one stream's turn on the thread, before the other streams have theirs.
TURN_MESSAGES = 64
TURN_BYTES = 1 << 20
# Batches that waited for an export are applied faster than new ones can arrive.
_HELD_TURN_MESSAGES = 4 * TURN_MESSAGES

# Messages up to this multiple of the limit are counted and skipped; above it libzmq closes the connection.
MESSAGE_FACTOR = 2

# A stream without messages for this long gets a tail check.
QUIET_S = 1.0
# Minimum time between two snapshot requests for one engine.
_FETCH_SPACING_S = 1.0
# Backoff between attempts to repair a STALE view, first and maximum. Each pause is shortened by a random
# factor, so that views that became STALE together are not repaired all at once.
REPAIR_FIRST_S, _REPAIR_LAST_S = 30.0, 600.0


class PolledSource(Protocol):
    """Owner of sockets that the subscriber thread polls."""

    @property
    def name(self) -> str: ...

    def reset(self, now_s: float) -> None: ...


class StreamThread(Protocol):
    """Thread on which streams run, and what they share; see `Subscriber`."""

    config: IndexerConfig
    ingest: Ingest
    clock: Callable[[], float]
    context: zmq.Context[zmq.Socket[bytes]]
    fetcher: SnapshotFetcher
    free_replays: int
    has_peers: bool

    def call(self, act: Callable[[], None]) -> None: ...
    def guarded(self, owner: PolledSource, step: Callable[[float], object]) -> None: ...
    def watch(
        self, owner: PolledSource, watched: zmq.Socket[bytes], on_readable: Callable[[float], None]
    ) -> None: ...
    def unwatch(self, watched: zmq.Socket[bytes]) -> None: ...
    def end_relay(self, engine: str) -> None: ...


class EngineStream:
    """Stream of one engine and the recovery of its view. An error drops this view and no other."""

    def __init__(self, stream: PodStream, subscriber: StreamThread) -> None:
        self.stream, self.name, self._subscriber = stream, stream.holder, subscriber
        self._config, self._ingest = subscriber.config, subscriber.ingest
        self._machine = self._new_machine()
        self._reported: tuple[StreamState, str] | None = None
        self._gaps_reported = 0
        # Identity of the pending snapshot request; the snapshot being applied, and its remaining parts.
        self._ticket: object | None = None
        self._restoring: Fetched | None = None
        self._left: deque[bytes | ViewPart | Entry] = deque()
        self._exports: ViewExports | None = None  # None: no export runs, and no batch waits for one
        self._feed: Feed | None = None
        # Source of the view; None once it has been logged.
        self._source: str | None = "none"
        self._fetched_s, self._peers = -math.inf, True
        self._repair_pause_s = REPAIR_FIRST_S
        self._snapshot_offered = True
        self._changed_s = -math.inf
        # Deadlines of timers, by their callback; a disabled timer has no entry.
        self._timers: dict[Callable[[float], None], float] = {}

    @property
    def due_s(self) -> float:
        exports_s = math.inf if self._exports is None else self._exports.due_s
        return min([exports_s, *self._timers.values()])

    def tick(self, now_s: float) -> None:
        if self._exports is not None:
            self._turn_export(self._exports, now_s)
        for act, due_s in tuple(self._timers.items()):
            # An earlier callback may have moved this timer.
            if self._timers.get(act) == due_s <= now_s:
                del self._timers[act]
                act(now_s)

    def _turn_export(self, exports: ViewExports, now_s: float) -> None:
        if exports.running:
            # Tail checks must wait for the export, too.
            self._check_tail_later(now_s)
            exports.turn(now_s)
        else:
            self._take(exports.take(_HELD_TURN_MESSAGES), now_s)
        if not exports.holds:
            self._exports = None

    def close(self) -> None:
        self.stop()

    def reset(self, now_s: float) -> None:  # noqa: ARG002 (subclasses use it)
        """Drop the view and restart the stream, after an error in our own code."""
        self.restart()

    def _check_tail(self, now_s: float) -> None:
        self._perform(self._machine.check_tail(), now_s)

    def _check_tail_later(self, now_s: float) -> None:
        self._timers[self._check_tail] = now_s + QUIET_S

    def _repair(self, now_s: float) -> None:
        self._perform(self._machine.repair(), now_s)

    def report(self) -> None:
        current = (self._machine.state, self._machine.reason)
        if current == self._reported:
            return
        self._reported = current
        self._ingest.state(self.name, *current)
        if self._source is not None and current[0] is not StreamState.RECOVERING:
            source = self._source if current[0] is StreamState.EXACT else "none"
            self._ingest.records.built(self.name, source)
            self._source = None
        if current[0] is StreamState.EXACT:
            self._timers.pop(self._repair, None)
            self._repair_pause_s = REPAIR_FIRST_S

    def link_up(self, now_s: float) -> None:
        self._snapshot_offered = True
        self._perform(self._machine.link_up(), now_s)

    def link_down(self, now_s: float) -> None:
        self._end_export(now_s)
        self.stop()
        self._perform(self._machine.link_down(), now_s)

    def live(self, batches: Sequence[Batch], now_s: float) -> None:
        """Apply a run of live batches as one index update."""
        if self._exports is None:
            self._take(batches, now_s)
        elif not self._exports.hold(batches):
            self._end_export(now_s)

    def export(self, future: Future[ViewSnapshot], now_s: float, feed: Feed | None) -> None:
        """Start an export of the view for a peer, or for the relay, whose feed receives all later changes.

        Raises:
            PeerError: The view cannot be exported now.
        """
        if self._machine.cancel_tail_check():
            self._stop_replay()
        last_batch = exportable_batch(self._machine)
        if feed is not None:
            self._feed = feed
            feed.list_from(self._ingest.state_of(self.name), self._machine, last_batch)
        exports = self._exports or ViewExports(self._config.snapshot_max_bytes)
        exports.begin(future, *self._ingest.list_view(self.name, last_batch), now_s)
        self._exports = exports

    def _end_export(self, now_s: float) -> None:
        if (exports := self._exports) is not None:
            self._exports = None
            exports.abort("changed", "the view changed during the export")
            self._take(exports.take(), now_s)

    def _take(self, batches: Sequence[Batch], now_s: float) -> None:
        actions: list[Action] = []
        for batch in batches:
            actions += self._machine.live(batch.sequence, batch.payload)
        gaps = self._machine.gaps
        self._ingest.records.received(self.name, len(batches), gaps - self._gaps_reported)
        self._gaps_reported = gaps
        self._check_tail_later(now_s)
        self._perform(actions, now_s)

    def invalidate(self, reason: str, now_s: float) -> None:
        self._end_export(now_s)
        self._perform(self._machine.invalidate(reason), now_s)

    def emptied_silently(self, reason: str, seen_s: float | None, now_s: float) -> None:
        """Run `StreamMachine.emptied_silently`, unless the view has changed since `seen_s` (None: now)."""
        self._end_export(now_s)
        if seen_s is not None and self._changed_s >= seen_s:
            return
        self._perform(self._machine.emptied_silently(reason), now_s)

    def stop(self) -> None:
        if self._exports is not None:
            self._exports.abort("changed", "the stream was stopped")
            self._exports = None
        self._stop_replay()
        self._stop_fetch()
        self._timers.pop(self._check_tail, None)
        self._timers.pop(self._repair, None)
        if self._feed is not None:
            self._feed.end()
            self._feed = None

    def restart(self, reason: str = "internal_error") -> None:
        self.stop()
        self._machine = self._new_machine()
        self._gaps_reported, self._source = 0, "none"
        self._ingest.clear(self.name, reason)
        self.report()

    def _new_machine(self) -> StreamMachine:
        return StreamMachine(
            replayable=self.stream.replay_endpoint is not None,
            snapshots=self.stream.snapshot_url is not None or self._subscriber.has_peers,
            first_sequence=self.stream.first_sequence,
            max_batches=self._config.recovery_batches_per_pod,
            max_bytes=self._config.recovery_bytes_per_pod,
        )

    def _perform(self, actions: Sequence[Action], now_s: float) -> None:
        batches: list[Apply] = []
        for action in actions:
            if isinstance(action, Apply):
                batches.append(action)
                self._changed_s = now_s
                continue
            self._apply(batches)
            batches = []
            match action:
                case Clear(reason):
                    self._source = "none"
                    self._ingest.clear(self.name, reason)
                case Replay():
                    self._stop_fetch()
                    self._begin_replay(now_s)
                case Fetch(peers):
                    self._stop_replay()
                    self._stop_fetch()
                    self._peers = peers
                    self._timers[self._fetch] = max(now_s, self._fetched_s + _FETCH_SPACING_S)
        self._apply(batches)
        if self._feed is not None:
            self._feed.flush(self._machine)
        self.report()
        can_repair = self._machine.can_repair(snapshots=self._snapshot_offered or self._subscriber.has_peers)
        if can_repair and self._repair not in self._timers:
            self._timers[self._repair] = now_s + self._repair_pause_s * random.uniform(0.5, 1.0)
            self._repair_pause_s = min(2 * self._repair_pause_s, _REPAIR_LAST_S)

    def _apply(self, batches: Sequence[Apply]) -> None:
        if not batches:
            return
        verdict = self._outcome([batch.payload for batch in batches])
        if verdict.emptied or verdict.is_complete:
            self._machine.emptied(batches[0].view, holds_nothing=verdict.ends_empty)
        if verdict.damage is not None:
            self._machine.damaged(batches[0].view, verdict.damage)
        elif self._restoring is not None and any(event == "BlockStored" for event, _ in verdict.skipped):
            # Live, such a store is of blocks that the view need not know; a snapshot names no others.
            self._machine.damaged(batches[0].view, "snapshot_incomplete")

    def _outcome(self, payloads: Sequence[bytes]) -> Outcome:
        return self._ingest.apply(self.name, payloads)

    def _begin_replay(self, now_s: float) -> None:
        """Request a replay from the machine's `replay_start` on; for replayable streams only."""
        raise NotImplementedError

    def _stop_replay(self) -> None:
        """Cancel a running replay."""

    def _stop_fetch(self) -> None:
        for act in (self._fetch, self._restore):
            self._timers.pop(act, None)
        self._ticket = self._restoring = None
        self._left.clear()

    def _fetch(self, now_s: float) -> None:
        self._fetched_s = now_s
        ticket = self._ticket = object()

        def deliver(fetched: Fetched, now_s: float) -> None:
            # The answer to a cancelled request may still arrive.
            if self._ticket is ticket:
                self._ticket = None
                self._on_fetched(fetched, now_s)

        self._request(deliver)

    def _request(self, deliver: Callable[[Fetched, float], None]) -> None:
        def fetched(answer: Fetched) -> None:
            self._subscriber.call(lambda: self._subscriber.guarded(self, partial(deliver, answer)))

        self._subscriber.fetcher.fetch(self.stream, fetched, others=self._peers)

    def _on_fetched(self, fetched: Fetched, now_s: float) -> None:
        if fetched.refusal is not None:
            self._ingest.records.snapshot(self.name, fetched.refusal)
        if fetched.answer is None:
            self._snapshot_offered = fetched.refusal != "not_offered"
            self._perform(self._machine.snapshot_failed(), now_s)
            return
        self._perform(self._machine.snapshot_begun(), now_s)
        self._restoring, self._source = fetched, "none"
        self._timers[self._restore] = -math.inf
        if isinstance(fetched.answer, Snapshot):
            self._left.extend(fetched.answer.batches)
        else:
            self._ingest.restore_facts(self.name, fetched.answer.facts)
            self._left.extend(fetched.answer.parts)

    def _restore(self, now_s: float) -> None:
        """Apply one turn's share of the snapshot: some batches of an engine, or one part of a peer's view."""
        assert self._restoring is not None
        actions: list[Action] = []
        taken_bytes = 0
        while self._left and taken_bytes < TURN_BYTES:
            following = self._left.popleft()
            if isinstance(following, bytes):
                taken_bytes += len(following)
                actions += self._machine.snapshot_batch(following)
            else:
                taken_bytes = TURN_BYTES
                if self._machine.part_imported():
                    self._ingest.restore(self.name, following)
        self._perform(actions, now_s)
        if self._left:
            self._timers[self._restore] = -math.inf
        else:
            self._restored(self._restoring, now_s)

    def _restored(self, fetched: Fetched, now_s: float) -> None:
        self._restoring = None
        # Batches published before the subscription took effect are found by the tail check.
        self._check_tail_later(now_s)
        answer = fetched.answer
        if isinstance(answer, Snapshot):
            self._ingest.records.snapshot(self.name, "completed")
            self._source = "engine"
            actions = self._machine.snapshot_ended(answer.sequence)
        else:
            assert answer is not None
            self._source = fetched.source
            actions = self._machine.imported(answer.sequence, answer.digest)
        self._ingest.records.restored(self.name, fetched, now_s - self._fetched_s)
        self._perform(actions, now_s)
