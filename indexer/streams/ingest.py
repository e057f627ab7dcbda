"""Event ingest: decode the batches of all streams and apply them to the index.

Runs on the subscriber's thread unless a docstring says otherwise. `pod` is the name of one engine in the
index, `PodStream.holder`; `serving` is the pod that requests are sent to.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from indexer.audit.late_view import LateView
from indexer.audit.mismatch_watch import OTHER_TOKENS, MismatchWatch
from indexer.audit.speculation import Speculation
from indexer.config import IndexerConfig, PodStream
from indexer.errors import PayloadError, PeerError
from indexer.index.contract import StreamState
from indexer.index.index import FlatIndex
from indexer.keys import EMPTY, BlockHasher, Keys
from indexer.metrics import IndexerMetrics
from indexer.streams.engine_registry import EngineRegistry
from indexer.streams.records import StreamRecords
from indexer.views.applier import ApplierContext, EventApplier
from indexer.views.hybrid import HybridMatcher
from indexer.views.view_parts import Entry, Outcome, ViewFacts, ViewPart, ViewSnapshot, decode_entry
from indexer.wire.tiers import GPU_TIER, TIER_NOT_PROVEN, Tiers

_log = logging.getLogger(__name__)
_COUNT_MARGIN = 16


class Ingest:
    """Index with the views of all followed engines, and the callbacks that report changes.

    Callbacks and `clock` are those of `KvIndexer`; `wall_clock` is compared with the time stamps of batches,
    in seconds since the epoch.
    """

    def __init__(
        self,
        config: IndexerConfig,
        registry: CollectorRegistry,
        on_stored: Callable[[str, Keys, float], None],
        on_link: Callable[[str, bool], None],
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
        index: FlatIndex | None = None,
    ) -> None:
        self.config = config
        self.on_stored, self.on_link = on_stored, on_link
        self.clock, self.wall_clock = clock, wall_clock
        seed = secrets.randbits(64) if config.hash_seed is None else config.hash_seed
        self.hasher = BlockHasher(config.block_tokens, seed)
        if index is None:
            tiers = Tiers(config.tier_weights, config.tier_by_medium)
            index = FlatIndex(config.capacity_bytes, tiers, capacity_blocks=config.capacity_blocks)
        self.index = index
        self.speculation = Speculation(
            self.index,
            ttl_s=config.speculative_ttl_s,
            max_s=config.speculative_max_s,
            max_entries=config.speculative_entries,
        )
        self.hybrid = HybridMatcher(self.index, self.hasher)
        metrics = IndexerMetrics(registry, stats=self.index.stats, speculative=self._speculative_entries)
        self.records = StreamRecords(metrics)
        self.mismatches = MismatchWatch()
        self.engine_registry = EngineRegistry()
        self._engine = ApplierContext(self.config, self.index, self.hasher)
        self._pods: dict[str, EventApplier] = {}
        self._late: dict[str, LateView] = {}

    def held_blocks(self, holder: str, *, on_device: bool) -> int:
        """Return a lower bound of the blocks in a view, in the engine's block size. Thread-safe.

        Args:
            on_device: Count only blocks in device memory; takes milliseconds per million blocks of the index.
        """
        state = self._pods.get(holder)
        plain = None if state is None else state.view.plain
        if plain is None:
            return 0
        split = max(1, plain.block_tokens // self.hasher.block_tokens)
        if not on_device:
            return self.index.pod_blocks(holder) // split
        held = self.index.tier_blocks(holder, GPU_TIER)
        # Blocks that were added and removed during the count may have been counted twice.
        return (held - held // _COUNT_MARGIN) // split

    def states(self, serving: str) -> list[EventApplier]:
        """Return the appliers of a pod's engines. Thread-safe."""
        members = self.engine_registry.members(serving)
        return [state for each in members if (state := self._pods.get(each)) is not None]

    def opened(self, stream: PodStream) -> None:
        self._pods[stream.holder] = EventApplier(self._engine, stream)
        self._late[stream.holder] = LateView()
        self.engine_registry.add(stream)
        self.records.opened(stream, stream.events_endpoint or self.config.events_bind)

    def closed(self, pod: str) -> None:
        self.index.set_time(self.clock())
        self._pods.pop(pod).view.clear()
        del self._late[pod]
        self.hybrid.set_groups(pod, None)
        self.hybrid.set_drop(pod, False)
        self.index.set_stride(pod, 1)
        self.index.set_drop(pod, False)
        self._end_speculation(pod)
        serving = self.engine_registry.pod(pod)
        self.mismatches.forget_pod(serving)
        self.engine_registry.remove(pod)
        self.records.closed(pod, serving, self.engine_registry.linked_engines())

    def apply(self, pod: str, payloads: Sequence[bytes]) -> Outcome:
        state = self._pods[pod]
        serving = self.engine_registry.pod(pod)
        self.index.set_time(self.clock())
        is_late = self.engine_registry.engines[pod].is_late
        outcome = state.apply(payloads, with_runs=is_late or self.mismatches.waits_for(serving))
        self._learn(pod)
        if is_late or outcome.damage is not None:
            self._prove(pod, state, outcome, is_late=is_late)
        is_live = self.engine_registry.engines[pod].state is not StreamState.RECOVERING
        lag_from_s = self.wall_clock() if is_live else None
        self.records.applied(pod, outcome, state.view.orphans, lag_from_s=lag_from_s)
        keys = _joined(outcome.stored)
        key_list = keys.tolist()
        self._set_invalid(pod, "events", state.view.invalid_reason)
        if outcome.runs and self.mismatches.waits_for(serving):
            late = self.mismatches.stored(serving, outcome.runs, key_list, state.stride)
            if late and state.drop.drops and state.drop.is_learning:
                state.drop.count(-late)
                self._set_drop(pod, state)
            self.reconsider(serving)
        if outcome.emptied:
            self._end_speculation(pod)
            self.engine_registry.set_emptied(pod, self.clock())
        if outcome.stored:
            self._notify_stored(pod, keys, key_list)
        return outcome

    def apply_entries(self, pod: str, entries: Sequence[bytes]) -> Outcome:
        state, outcome = self._pods[pod], Outcome()
        self.index.set_time(self.clock())
        for data in entries:
            try:
                stored, damage = state.apply_entry(decode_entry(data, len(self.index.tiers.names)))
            except PayloadError as error:
                self.records.rejected(pod, error.reason)
                outcome.invalidate(error.reason)
            else:
                outcome.stored += stored
                outcome.damage = outcome.damage or damage
        self._learn(pod)
        if outcome.stored:
            keys = _joined(outcome.stored)
            self._notify_stored(pod, keys, keys.tolist())
        return outcome

    def state_of(self, pod: str) -> EventApplier:
        return self._pods[pod]

    def clear(self, pod: str, reason: str) -> None:
        self.index.set_time(self.clock())
        self._pods[pod].clear()
        self._late[pod].reset()
        self._set_invalid(pod, "events", None)
        self.hybrid.set_groups(pod, None)
        self._end_speculation(pod)
        self.records.cleared(pod, reason)

    def link(self, pod: str, up: bool) -> None:
        changed = self.engine_registry.set_linked(pod, up)
        self.records.link(pod, up, self.engine_registry.linked_engines())
        if changed is not None:
            _call(self.on_link, self.engine_registry.pod(pod), changed)

    def state(self, pod: str, state: StreamState, reason: str) -> None:
        self.engine_registry.set_state(pod, state, reason)
        self._show_state(pod)

    def reconsider(self, serving: str) -> None:
        """Mark a pod's views as invalid while its tokens differ from ours, else as valid. Thread-safe."""
        reason = OTHER_TOKENS if self.mismatches.is_mismatched(serving) else None
        for pod in self.engine_registry.members(serving):
            self._set_invalid(pod, "parity", reason)

    def _set_invalid(self, pod: str, source: str, reason: str | None) -> None:
        if self.engine_registry.set_invalid(pod, source, reason):
            self._show_state(pod)

    def _show_state(self, pod: str) -> None:
        engine = self.engine_registry.engines.get(pod)
        if engine is not None:
            self.records.state(pod, engine.state, engine.reason)

    def list_view(
        self, pod: str, last_batch: tuple[int, bytes]
    ) -> tuple[ViewSnapshot, Iterator[ViewPart | None]]:
        """Return a view's snapshot as of its last batch, without parts, and its parts; see `PodView.parts`.

        Raises:
            PeerError: The view holds state that an export cannot carry.
        """
        state, view = self._pods[pod], self._pods[pod].view
        if view.unexportable is not None:
            raise PeerError(view.unexportable, "the view cannot be exported in its present state")
        return ViewSnapshot(*last_batch, state.facts(), self.index.evicted_blocks), view.parts()

    def restore_facts(self, pod: str, facts: ViewFacts) -> None:
        self._pods[pod].restore_facts(facts)
        self._learn(pod)

    def restore(self, pod: str, part: ViewPart | Entry) -> None:
        """Add a part of another router's view, or apply changes recorded since it was exported."""
        if isinstance(part, Entry):
            self._pods[pod].apply_entry(part)
            self._learn(pod)
            return
        self._pods[pod].view.restore(part)
        if part.group is None:
            self._notify_stored(pod, part.blocks.keys, part.blocks.keys.tolist())

    def set_drafter(self, pod: str, has_drafter: bool | None) -> None:
        """Set whether an engine's metrics name a drafter. Thread-safe."""
        state = self._pods.get(pod)
        if state is not None and has_drafter is not None and state.drop.has_drafter != has_drafter:
            state.drop.has_drafter = has_drafter
            self._set_drop(pod, state)

    def drops(self, pod: str) -> bool:
        """Return whether an engine is predicted to drop the last block of each hit. Thread-safe."""
        state = self._pods.get(pod)
        return state is not None and state.drop.drops

    def drafter(self, pod: str) -> str:
        """Return what is known of an engine's drafter; empty without a sign of one. Thread-safe."""
        state = self._pods.get(pod)
        return "" if state is None else state.drop.describe(state.view.runs.block_tokens or 0)

    def set_capacity(self, pod: str, blocks: int | None) -> None:
        """Set the blocks of an engine's device memory, None: unknown. Thread-safe."""
        if (late := self._late.get(pod)) is not None:
            late.capacity_blocks = blocks

    def proven(self, pod: str, keys: Keys, held: NDArray[np.uint8], stride: int) -> tuple[int, bool]:
        """Return how many blocks of a prompt are proven to be held, and whether no more are. Thread-safe.

        Args:
            held: uint8 [blocks], see `FlatIndex.held`; speculative blocks do not count.
            stride: Index blocks per block of the engine.
        """
        engine, late = self.engine_registry.engines.get(pod), self._late.get(pod)
        whole = len(keys) // stride * stride
        real = held[:whole] & np.uint8(~(1 << self.index.tiers.speculative) & 0xFF)
        missing = np.flatnonzero(real == 0)
        blocks = int(missing[0]) // stride * stride if len(missing) else whole
        if engine is None or late is None:
            return 0, False
        if engine.state is StreamState.EXACT:
            return blocks, True
        if not engine.is_late or late.is_damaged:
            return 0, False
        return blocks, late.is_end(keys[stride - 1 : blocks + stride : stride], whole=blocks == whole)

    def _prove(self, pod: str, state: EventApplier, outcome: Outcome, *, is_late: bool) -> None:
        """Learn what is proven of a view without history; set `is_complete` if all of it is."""
        late, view = self._late[pod], state.view
        is_simple = view.groups is None and not view.is_paired and not state.tier_proof.has_further_tiers
        may_drop = state.drop.has_drafter is not False
        late.applied(outcome, state.stride, may_drop=may_drop, is_simple=is_simple)
        if is_late and late.may_be_full(self.index.pod_blocks(pod) // state.stride, self.clock()):
            outcome.is_complete = late.is_full(self.index.tier_blocks(pod, GPU_TIER) // state.stride)

    def _learn(self, pod: str) -> None:
        state = self._pods[pod]
        self.hybrid.set_groups(pod, state.view.groups, is_paired=state.view.is_paired)
        self._set_drop(pod, state)
        self._set_invalid(pod, "tiers", TIER_NOT_PROVEN if state.tier_proof.unproven else None)
        # A cleared view has no block size; the engine's next process most likely has the same one.
        if state.view.runs.block_tokens is not None:
            self.index.set_stride(pod, state.stride)

    def _set_drop(self, pod: str, state: EventApplier) -> None:
        drops, is_hybrid = state.drop.drops, state.view.groups is not None
        is_new = self.index.set_drop(pod, drops and not is_hybrid)
        if self.hybrid.set_drop(pod, drops and is_hybrid) or is_new:
            self.records.drop(pod, self.drafter(pod))

    def _end_speculation(self, pod: str) -> None:
        for name in {pod, self.engine_registry.pod(pod)}:
            self.speculation.drop_pod(name)

    def _notify_stored(self, pod: str, keys: Keys, key_list: Sequence[int]) -> None:
        now_s, serving = self.clock(), self.engine_registry.pod(pod)
        self.speculation.stored(pod, key_list, now_s)
        if serving != pod:
            self.speculation.stored(serving, key_list, now_s)
        _call(self.on_stored, serving, keys, now_s)

    def _speculative_entries(self) -> int:
        self.speculation.expire(self.clock())
        return len(self.speculation)


def _joined(runs: Sequence[Keys]) -> Keys:
    return runs[0] if len(runs) == 1 else np.concatenate([EMPTY, *runs])


def _call(callback: Callable[..., None], *args: object) -> None:
    """Call a callback; log its errors, so that they do not stop the stream."""
    try:
        callback(*args)
    except Exception:
        _log.exception("callback failed, the stream continues")
