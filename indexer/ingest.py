"""Takes the streams of all pods: decodes their batches, applies them to the index, counts what happens.

What the streams bring ends here; everything runs on the subscriber's thread. A `pod` is one engine, by its
name in the index: `PodStream.holder`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from indexer.applied import Outcome
from indexer.apply import PodView
from indexer.config import IndexerConfig, PodStream
from indexer.errors import PayloadError, PeerError
from indexer.flat_applier import PodState, PodStates
from indexer.flat_index import FlatIndex
from indexer.hybrid import EngineStrides, HybridMatcher
from indexer.journal import Entry, decode_entry
from indexer.keys import BlockHasher, Keys
from indexer.metrics import IndexerMetrics
from indexer.parity import OTHER_TOKENS, ParityWatch
from indexer.parity_alarm import ParityAlarm
from indexer.peer_metrics import PeerMetrics
from indexer.repeated_log import RepeatedLog
from indexer.roster import Roster
from indexer.snapshot import Fetched, Snapshot
from indexer.speculate import Speculation
from indexer.stream import StreamState
from indexer.tiers import GPU_TIER
from indexer.view_parts import HeldBlocks, ViewContent, ViewFacts, ViewPart

_log = logging.getLogger(__name__)
# A publisher can make its stream change at each message.
_repeated = RepeatedLog(_log, lines=20, sources_max=1024)

_COUNT_MARGIN = 16
_NO_KEYS = np.empty(0, np.uint64)


class Ingest:
    """The views of all pods that are followed.

    Args:
        config: Bounds.
        index: Where blocks go.
        hasher: Makes their keys.
        parity: Is told of new blocks' tokens.
        alarm: Is told of pods that went away.
        hybrid: Is told of the pods' KV cache groups.
        speculation: Is told what is confirmed.
        metrics: Where all is counted.
        peer_metrics: Where it is counted how views are built.
        on_stored: See `KvIndexer`.
        on_link: See `KvIndexer`.
        clock: A monotonic clock, in seconds.
        wall_clock: The clock of event time stamps, seconds since the epoch.
        strides: Is told of the engines' block sizes.
    """

    def __init__(
        self,
        config: IndexerConfig,
        *,
        index: FlatIndex,
        hasher: BlockHasher,
        parity: ParityWatch,
        alarm: ParityAlarm,
        hybrid: HybridMatcher,
        speculation: Speculation,
        metrics: IndexerMetrics,
        peer_metrics: PeerMetrics,
        on_stored: Callable[[str, Keys, float], None],
        on_link: Callable[[str, bool], None],
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
        strides: EngineStrides | None = None,
    ) -> None:
        self._config = config
        self._index = index
        self._hasher = hasher
        self._parity = parity
        self._alarm = alarm
        self._hybrid = hybrid
        self._strides = strides or EngineStrides()
        self._speculation = speculation
        self._metrics = metrics
        self._peer_metrics = peer_metrics
        self._on_stored = on_stored
        self._on_link = on_link
        self._clock = clock
        self._wall_clock = wall_clock
        self._states = PodStates(config, index, hasher)
        self._pods: dict[str, PodState] = {}
        # Of each pod, as the metrics show them.
        self._orphans: dict[str, int] = {}
        self.roster = Roster()

    @property
    def states(self) -> Mapping[str, StreamState]:
        """State of every pod's stream; any thread may read it."""
        return self.roster.states

    def held_blocks(self, holder: str, *, on_device: bool) -> int:
        """Blocks of its engine that a view holds, at least; any thread may ask.

        Args:
            holder: The engine's name in the index.
            on_device: Only those in device memory; takes milliseconds for each million blocks of the index.
        """
        state = self._pods.get(holder)
        plain = None if state is None else state.view.plain
        if plain is None:
            return 0
        split = max(1, plain.block_tokens // self._hasher.block_tokens)
        if not on_device:
            return self._index.pod_blocks(holder) // split
        held = self._index.tier_blocks(holder, GPU_TIER)
        # What came and went while they were counted may count twice.
        return (held - held // _COUNT_MARGIN) // split

    def opened(self, stream: PodStream) -> None:
        """A pod is followed from now on."""
        self._pods[stream.holder] = self._states.make(stream)
        self.roster.opened(stream)
        at = stream.events_endpoint or "our socket"
        _repeated.event(
            "stream_opened",
            stream.holder,
            "following %s (%s) at %s",
            stream.holder,
            stream.model,
            at,
            level=logging.INFO,
        )

    def closed(self, pod: str) -> None:
        """A pod is not followed any more."""
        self._pods.pop(pod).view.clear()
        self._hybrid.learn(pod, None)
        self._strides.learn(pod, 1)
        self._speculation.drop_pod(self.roster.pod(pod))
        self._alarm.forget_pod(self.roster.pod(pod))
        self.roster.closed(pod)
        self._metrics.subscribers.set(self.roster.linked_engines())
        self._orphans.pop(pod, None)
        self._metrics.forget(pod)
        _repeated.event("stream_closed", pod, "%s is not followed any more", pod, level=logging.INFO)

    def apply(self, pod: str, payloads: Sequence[bytes]) -> Outcome:
        """Applies batches, in order."""
        state = self._pods[pod]
        serving = self.roster.pod(pod)
        outcome = state.applier.apply(payloads, with_runs=self._parity.waits_for(serving))
        self._learn(pod, state.view)
        self._count(pod, outcome)
        keys = _joined(outcome.applied.stored)
        told = keys.tolist()
        self._doubt(pod, "events", state.view.doubt)
        if outcome.applied.runs:
            self._parity.stored(serving, outcome.applied.runs, told)
            self.reconsider(serving)
        if outcome.emptied:
            self._speculation.drop_pod(serving)
        if outcome.applied.stored:
            self._tell_stored(serving, keys, told)
        return outcome

    def apply_entries(self, pod: str, entries: Sequence[bytes]) -> Outcome:
        """Applies what another router recorded of an engine, in order."""
        view, outcome = self._pods[pod].view, Outcome()
        for data in entries:
            try:
                stored, damage = view.take(decode_entry(data, len(self._index.tiers.names)))
            except PayloadError as error:
                self.rejected(pod, error.reason)
                outcome.doubt(error.reason)
            else:
                outcome.applied.stored += stored
                outcome.damage = outcome.damage or damage
        self._learn(pod, view)
        if outcome.applied.stored:
            keys = _joined(outcome.applied.stored)
            self._tell_stored(self.roster.pod(pod), keys, keys.tolist())
        return outcome

    def state_of(self, pod: str) -> PodState:
        """What is kept of an engine."""
        return self._pods[pod]

    def clear(self, pod: str, reason: str) -> None:
        """Drops the view of the pod."""
        self._pods[pod].view.clear()
        self._doubt(pod, "events", None)
        self._hybrid.learn(pod, None)
        self._speculation.drop_pod(self.roster.pod(pod))
        self._metrics.clears.labels(reason).inc()
        _repeated.event("view_dropped", pod, "view of %s dropped: %s", pod, reason)

    def link(self, pod: str, up: bool) -> None:
        """The connection to the pod's publisher was made or lost."""
        changed = self.roster.link(pod, up)
        if not up:
            self._metrics.reconnections.labels(pod).inc()
        self._metrics.subscribers.set(self.roster.linked_engines())
        _repeated.event(
            "publisher_link",
            pod,
            "publisher of %s is %s",
            pod,
            "connected" if up else "gone",
            level=logging.INFO,
        )
        if changed is not None:
            _call(self._on_link, self.roster.pod(pod), changed)

    def state(self, pod: str, state: StreamState, reason: str) -> None:
        """The state of the pod's stream changed."""
        self.roster.told(pod, state, reason)
        self._show_state(pod)

    def reconsider(self, serving: str) -> None:
        """Doubts a pod's views while it computes other tokens than we do; any thread may call."""
        reason = OTHER_TOKENS if self._parity.distrusts(serving) else None
        for pod in self.roster.members(serving):
            self._doubt(pod, "parity", reason)

    def _doubt(self, pod: str, source: str, reason: str | None) -> None:
        if self.roster.doubt(pod, source, reason):
            self._show_state(pod)

    def _show_state(self, pod: str) -> None:
        engine = self.roster.engines.get(pod)
        if engine is None:
            return
        state, because = engine.state, f" ({engine.reason})" if engine.reason else ""
        self._metrics.set_state(pod, state)
        _repeated.event("stream_state", pod, "stream of %s is %s%s", pod, state, because, level=logging.INFO)

    def received(self, pod: str, batches: int, gaps: int) -> None:
        """Live batches came in, and gaps were found between them."""
        with self._metrics.lock:
            self._metrics.messages.add((pod,), batches)
        if gaps:
            self._metrics.gaps.labels(pod).inc(gaps)

    def replay(self, pod: str, outcome: str) -> None:
        """A replay ended."""
        self._metrics.replays.labels(outcome).inc()
        _log.debug("replay of %s: %s", pod, outcome)

    def snapshot(self, pod: str, outcome: str) -> None:
        """A snapshot of the engine itself was applied, or could not be had."""
        self._metrics.snapshots.labels(outcome).inc()
        _repeated.event("snapshot", pod, "snapshot of %s: %s", pod, outcome, level=logging.INFO)

    def list_view(self, pod: str) -> ViewContent:
        """Begins to list the view for a peer; until its last part the pod is told nothing.

        Raises:
            PeerError: The list would not be all of it.
        """
        view = self._pods[pod].view
        if view.unlisted is not None:
            raise PeerError(view.unlisted, "what its events told cannot be listed now")
        return ViewContent(view.facts(), self._evicted_blocks(), view.parts())

    def restore_facts(self, pod: str, facts: ViewFacts) -> None:
        """Begins a new view from a peer's: what its events told."""
        self._pods[pod].view.restore_facts(facts)
        self._learn(pod, self._pods[pod].view)

    def restore(self, pod: str, part: ViewPart | Entry) -> None:
        """Adds a part of another router's view, or what changed since it was listed."""
        if isinstance(part, Entry):
            self._pods[pod].view.take(part)
            self._learn(pod, self._pods[pod].view)
            return
        self._pods[pod].view.restore(part)
        if part.group is None and isinstance(part.part, HeldBlocks):
            self._tell_stored(self.roster.pod(pod), part.part.keys, part.part.keys.tolist())

    def restored(self, pod: str, fetched: Fetched, took_s: float) -> None:
        """A snapshot was applied, so long after it was asked for."""
        answer = fetched.answer
        self._peer_metrics.snapshot_bytes.labels(fetched.source).inc(fetched.size_bytes)
        self._peer_metrics.snapshot_s.labels(fetched.source).observe(took_s)
        if answer is not None and not isinstance(answer, Snapshot) and answer.evicted_blocks:
            _log.warning(
                "view of %s is a peer's whose index has evicted %d blocks of all pods: some may lack",
                pod,
                answer.evicted_blocks,
            )

    def built(self, pod: str, source: str) -> None:
        """A view settled.

        Args:
            pod: Whose.
            source: Where it comes from: "engine", "peer", "redis" or "replay"; "none" where something lacks.
        """
        self._peer_metrics.bootstraps.labels(source).inc()
        _repeated.event(
            "view_built", pod, "view of %s was built; source: %s", pod, source, level=logging.INFO
        )

    def rejected(self, pod: str, reason: str) -> None:
        """A message could not be read."""
        self._metrics.rejected.labels(reason).inc()
        _log.debug("message of %s rejected: %s", pod, reason)

    def socket_error(self, pod: str, operation: str) -> None:
        """A socket could not be used."""
        self._metrics.zmq_errors.labels(pod, operation).inc()
        _repeated.event("socket_error", pod, "cannot %s at %s", operation, pod)

    def _learn(self, pod: str, view: PodView) -> None:
        """Pass on what the view's events tell of its engine."""
        self._hybrid.learn(pod, view.groups)
        # A view that was cleared knows no block size; the engine's next life most likely has the same.
        if (block_tokens := view.block_tokens) is not None:
            self._strides.learn(pod, max(1, block_tokens // self._hasher.block_tokens))

    def _tell_stored(self, serving: str, keys: Keys, told: Sequence[int]) -> None:
        """Tells whoever waits for blocks, `told` being their keys once more."""
        now_s = self._clock()
        self._speculation.stored(serving, told, now_s)
        _call(self._on_stored, serving, keys, now_s)

    def _evicted_blocks(self) -> int:
        return self._index.evicted_blocks

    def _count(self, pod: str, outcome: Outcome) -> None:
        metrics, applied = self._metrics, outcome.applied
        for reason, rejected in outcome.rejected.items():
            metrics.rejected.labels(reason).inc(rejected)
            _log.debug("%d messages or events of %s rejected: %s", rejected, pod, reason)
        for (event_type, reason), skipped in applied.skipped.items():
            stored = event_type == "BlockStored"
            (metrics.stores_skipped if stored else metrics.removals_skipped).labels(reason).inc(skipped)
        orphans = self._pods[pod].view.orphans
        if self._orphans.get(pod) != orphans:
            metrics.orphans.labels(pod).set(orphans)
            self._orphans[pod] = orphans
        times_s = outcome.published_s
        if self.roster.engines[pod].state is StreamState.RECOVERING:
            times_s = []
        now_s = self._wall_clock()
        with metrics.lock:
            for event_type, events in outcome.events.items():
                metrics.events.add((event_type,), events)
            metrics.admissions.add(number=sum(map(len, applied.stored)))
            for removed, counter in (("last", metrics.removals_last), ("copy", metrics.removals_copy)):
                if hashes := applied.removals[removed]:
                    counter.add(number=hashes)
                    metrics.evictions.add(number=hashes)
            for published_s in filter(math.isfinite, times_s):
                metrics.lag_s.observe(max(0.0, now_s - published_s))


def _joined(runs: Sequence[Keys]) -> Keys:
    return runs[0] if len(runs) == 1 else np.concatenate([_NO_KEYS, *runs])


def _call(callback: Callable[..., None], *args: object) -> None:
    """An error of a callback's owner must not cost the stream."""
    try:
        callback(*args)
    except Exception:
        _log.exception("callback failed")
