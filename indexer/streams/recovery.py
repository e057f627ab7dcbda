"""Keeps one engine's view up: link changes and live batches come in, the sink gets what they mean.

Drives the stream machine and does what it asks for: replays, snapshots, their retries and timers. Runs on the
subscriber's thread only; how live batches arrive is told by `follower`, `inbox` and `relayed`.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from indexer.config import PodStream
from indexer.index.contract import StreamState
from indexer.streams.actions import Action, Apply, Batch, Clear, Fetch, Replay
from indexer.streams.snapshot import Fetched, Snapshot
from indexer.streams.state_machine import StreamMachine
from indexer.streams.view_export import Feed, ViewExports, mark_of
from indexer.views.view_parts import Entry, Outcome, ViewPart, ViewSnapshot

if TYPE_CHECKING:
    from indexer.streams.subscriber import Subscriber

# What one source may take of the thread before the others have their turn.
TURN_MESSAGES = 64
TURN_BYTES = 1 << 20
# What waited while a view was listed is taken faster than more can come.
_HELD_TURN_MESSAGES = 4 * TURN_MESSAGES

# Up to here a message that is too long is read, counted and passed over; above it the connection is cut.
MESSAGE_FACTOR = 2

# Quiet for this long, a stream's tail is checked.
QUIET_S = 1.0
# Between two snapshots of one engine.
_FETCH_SPACING_S = 1.0
# Pauses before what a STALE view lacks is tried to be had again: the first at most, and the last. They are
# drawn a little at random, so that many views that broke together are not mended all at once.
HEAL_FIRST_S, _HEAL_LAST_S = 30.0, 600.0


class EngineStream:
    """One engine's stream: its view, and whatever keeps it up. An error costs the view and nothing else."""

    def __init__(self, stream: PodStream, sockets: Subscriber) -> None:
        self.stream, self.name, self._sockets = stream, stream.holder, sockets
        self._config, self._sink = sockets.config, sockets.sink
        self._machine = self._new_machine()
        self._reported: tuple[StreamState, str] | None = None
        self._gaps_reported = 0
        # The snapshot that is waited for; the one that is being applied, and what is left of it.
        self._ticket: object | None = None
        self._restoring: Fetched | None = None
        self._left: deque[bytes | ViewPart | Entry] = deque()
        self._exports: ViewExports | None = None  # None: no list is made, and no batch waits for one
        self._feed: Feed | None = None
        # Where the view comes from, if that was not told yet.
        self._source: str | None = "none"
        self._fetched_s, self._peers = -math.inf, True
        self._heal_pause_s = HEAL_FIRST_S
        self._snapshot_offered = True
        self._changed_s = -math.inf
        # When to do what; what is not here is not to be done.
        self._timers: dict[Callable[[float], None], float] = {}

    @property
    def due_s(self) -> float:
        exports_s = math.inf if self._exports is None else self._exports.due_s
        return min([exports_s, *self._timers.values()])

    def tick(self, now_s: float) -> None:
        if self._exports is not None:
            self._turn_export(self._exports, now_s)
        for act, due_s in tuple(self._timers.items()):
            # What was done before it may have put it off.
            if self._timers.get(act) == due_s <= now_s:
                del self._timers[act]
                act(now_s)

    def _turn_export(self, exports: ViewExports, now_s: float) -> None:
        if exports.running:
            # The tail must wait, too.
            self._check_tail_later(now_s)
            exports.turn(now_s)
        else:
            self._take(exports.take(_HELD_TURN_MESSAGES), now_s)
        if not exports.holds:
            self._exports = None

    def close(self) -> None:
        self.stop()

    def reset(self, now_s: float) -> None:  # noqa: ARG002 (whoever connects needs it)
        """Begins anew after an error of our own, so that it costs one view and nothing else."""
        self.restart()

    def _check_tail(self, now_s: float) -> None:
        self._perform(self._machine.check_tail(), now_s)

    def _check_tail_later(self, now_s: float) -> None:
        self._timers[self._check_tail] = now_s + QUIET_S

    def _heal(self, now_s: float) -> None:
        self._perform(self._machine.heal(), now_s)

    def report(self) -> None:
        current = (self._machine.state, self._machine.reason)
        if current == self._reported:
            return
        self._reported = current
        self._sink.state(self.name, *current)
        if self._source is not None and current[0] is not StreamState.RECOVERING:
            source = self._source if current[0] is StreamState.EXACT else "none"
            self._sink.built(self.name, source)
            self._source = None
        if current[0] is StreamState.EXACT:
            self._timers.pop(self._heal, None)
            self._heal_pause_s = HEAL_FIRST_S

    def link_up(self, now_s: float) -> None:
        self._snapshot_offered = True
        self._perform(self._machine.link_up(), now_s)

    def link_down(self, now_s: float) -> None:
        self._end_export(now_s)
        self.stop()
        self._perform(self._machine.link_down(), now_s)

    def live(self, batches: Sequence[Batch], now_s: float) -> None:
        """The publisher sent these; what they lead to is applied together."""
        if self._exports is None:
            self._take(batches, now_s)
        elif not self._exports.hold(batches):
            self._end_export(now_s)

    def export(self, told: Future[ViewSnapshot], now_s: float, feed: Feed | None) -> None:
        """List the view for a peer, or for the relay, whose feed gets all changes from there on.

        That takes some turns; then the future gets it, or a PeerError.

        Raises:
            PeerError: It is not listed.
        """
        if self._machine.forgo_tail():
            self._stop_replay()
        mark = mark_of(self._machine)
        if feed is not None:
            self._feed = feed
            feed.list_from(self._sink.state_of(self.name), self._machine, mark)
        exports = self._exports or ViewExports(self._config.snapshot_max_bytes)
        exports.begin(told, mark, self._sink.list_view(self.name), now_s)
        self._exports = exports

    def _end_export(self, now_s: float) -> None:
        if (exports := self._exports) is not None:
            self._exports = None
            exports.abort("changed", "its view changed while it was listed")
            self._take(exports.take(), now_s)

    def _take(self, batches: Sequence[Batch], now_s: float) -> None:
        actions: list[Action] = []
        for batch in batches:
            actions += self._machine.live(batch.sequence, batch.payload)
        gaps = self._machine.gaps
        self._sink.received(self.name, len(batches), gaps - self._gaps_reported)
        self._gaps_reported = gaps
        self._check_tail_later(now_s)
        self._perform(actions, now_s)

    def doubted(self, reason: str, now_s: float) -> None:
        self._end_export(now_s)
        self._perform(self._machine.doubted(reason), now_s)

    def emptied_silently(self, reason: str, seen_s: float | None, now_s: float) -> None:
        """See `StreamMachine.emptied_silently`; a view that has changed since `seen_s` (None: now) stays."""
        self._end_export(now_s)
        if seen_s is not None and self._changed_s >= seen_s:
            return
        self._perform(self._machine.emptied_silently(reason), now_s)

    def stop(self) -> None:
        if self._exports is not None:
            self._exports.abort("changed", "it is not followed any more")
            self._exports = None
        self._stop_replay()
        self._stop_fetch()
        self._timers.pop(self._check_tail, None)
        self._timers.pop(self._heal, None)
        if self._feed is not None:
            self._feed.end()
            self._feed = None

    def restart(self, reason: str = "internal_error") -> None:
        self.stop()
        self._machine = self._new_machine()
        self._gaps_reported, self._source = 0, "none"
        self._sink.clear(self.name, reason)
        self.report()

    def _new_machine(self) -> StreamMachine:
        return StreamMachine(
            replayable=self.stream.replay_endpoint is not None,
            snapshots=self.stream.snapshot_url is not None or self._sockets.has_peers,
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
                    self._sink.clear(self.name, reason)
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
        healable = self._machine.healable(snapshots=self._snapshot_offered or self._sockets.has_peers)
        if healable and self._heal not in self._timers:
            self._timers[self._heal] = now_s + self._heal_pause_s * random.uniform(0.5, 1.0)
            self._heal_pause_s = min(2 * self._heal_pause_s, _HEAL_LAST_S)

    def _apply(self, batches: Sequence[Apply]) -> None:
        if not batches:
            return
        verdict = self._outcome([batch.payload for batch in batches])
        if verdict.emptied:
            self._machine.emptied(batches[0].view, holds_nothing=verdict.ends_empty)
        if verdict.damage is not None:
            self._machine.damaged(batches[0].view, verdict.damage)

    def _outcome(self, payloads: Sequence[bytes]) -> Outcome:
        return self._sink.apply(self.name, payloads)

    def _begin_replay(self, now_s: float) -> None:
        """Ask for all from the machine's `replay_start` on; only of a stream that can be replayed."""
        raise NotImplementedError

    def _stop_replay(self) -> None:
        """End a replay, if one runs."""

    def _stop_fetch(self) -> None:
        for act in (self._fetch, self._restore):
            self._timers.pop(act, None)
        self._ticket = self._restoring = None
        self._left.clear()

    def _fetch(self, now_s: float) -> None:
        self._fetched_s = now_s
        ticket = self._ticket = object()

        def deliver(fetched: Fetched, now_s: float) -> None:
            # The one that was given up comes late.
            if self._ticket is ticket:
                self._ticket = None
                self._on_fetched(fetched, now_s)

        self._request(deliver)

    def _request(self, deliver: Callable[[Fetched, float], None]) -> None:
        def fetched(answer: Fetched) -> None:
            self._sockets.call(lambda: self._sockets.guarded(self, partial(deliver, answer)))

        self._sockets.fetcher.fetch(self.stream, fetched, others=self._peers)

    def _on_fetched(self, fetched: Fetched, now_s: float) -> None:
        if fetched.refusal is not None:
            self._sink.snapshot(self.name, fetched.refusal)
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
            self._sink.restore_facts(self.name, fetched.answer.facts)
            self._left.extend(fetched.answer.parts)

    def _restore(self, now_s: float) -> None:
        """Applies a turn's share of the snapshot: some batches of the engine's, or one part of a peer's."""
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
                    self._sink.restore(self.name, following)
        self._perform(actions, now_s)
        if self._left:
            self._timers[self._restore] = -math.inf
        else:
            self._restored(self._restoring, now_s)

    def _restored(self, fetched: Fetched, now_s: float) -> None:
        self._restoring = None
        # What was published before the subscription took effect shows as a lost tail.
        self._check_tail_later(now_s)
        answer = fetched.answer
        if isinstance(answer, Snapshot):
            self._sink.snapshot(self.name, "completed")
            self._source = "engine"
            actions = self._machine.snapshot_ended(answer.sequence)
        else:
            assert answer is not None
            self._source = fetched.source
            actions = self._machine.imported(answer.sequence, answer.digest)
        self._sink.restored(self.name, fetched, now_s - self._fetched_s)
        self._perform(actions, now_s)
