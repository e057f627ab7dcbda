"""Payloads of one pod's stream to changes of the index: many columns at once, plain events by one kernel.

What is not plain goes to the pod's view, event by event, in its place; so the view's rules hold for all, and
the kernel is only a faster way to the same state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from indexer import event_rows as rows
from indexer.applied import Applied, Outcome, StoredRun
from indexer.apply import PodView
from indexer.config import IndexerConfig, PodStream
from indexer.errors import PayloadError
from indexer.event_columns import Columns, EventDecoder, handle_of
from indexer.events import BlockRemoved, KVEvent
from indexer.flat_apply import (
    ALL_DONE,
    FURTHER_COPIES,
    HASHES_DONE,
    LAST_COPIES,
    NOT_PLAIN,
    REUSED_NAMES,
    ROW,
    RUNS,
    STORED_BLOCKS,
    PlainPod,
    apply_rows,
    progress,
)
from indexer.flat_cache import FlatCache
from indexer.flat_index import TURN_BLOCKS, FlatIndex
from indexer.hybrid import group_holder
from indexer.journal import Journal, Kind
from indexer.keys import BlockHasher, Keys
from indexer.reannounce import Ahead

# So many hashes that something waits for are looked for in each store; with more the view applies all stores.
_AWAITED_MAX = 16
_NONE_AWAITED = np.empty(0, np.uint64)

_TYPES = {rows.STORED: "BlockStored", rows.REMOVED: "BlockRemoved", rows.CLEARED: "AllBlocksCleared"}
_REMOVALS = ((LAST_COPIES, "last"), (FURTHER_COPIES, "copy"))
_REUSED = "hash_reused"


class FlatEngine:
    """What the appliers of all pods share, for one thread.

    Args:
        max_bytes: A longer payload is not read.
    """

    def __init__(self, index: FlatIndex, hasher: BlockHasher, max_bytes: int) -> None:
        self.index = index
        self.hasher = hasher
        self.decoder = EventDecoder(max_bytes)
        self.progress = progress(2 * TURN_BLOCKS)
        tiers = index.tiers
        self.tier_numbers = np.array([tiers.number(tiers.of_medium(medium)) for medium in rows.MEDIA])


class FlatApplier:
    """Applies the payloads of one pod.

    Args:
        view: The pod's view, whose lead group is in `cache`.
        holder: The pod's name in the index.
    """

    def __init__(self, engine: FlatEngine, view: PodView, cache: FlatCache, holder: str, model: str) -> None:
        self._engine = engine
        self._view = view
        self._cache = cache
        self._journal = cache.journal
        self._holder = holder
        self._root = np.uint64(engine.hasher.root(model))
        self._scope = np.uint64(cache.scope)

    def apply(self, payloads: Sequence[bytes], *, with_runs: bool = False) -> Outcome:
        """Applies payloads in order, whatever they hold.

        Args:
            with_runs: Whether `Applied.runs` are wanted.
        """
        columns = self._engine.decoder.decode(payloads)
        outcome = Outcome(_applied(with_runs))
        self._engine.progress.counts[:] = 0
        for batch in columns.batches:
            if batch.unread is None:
                outcome.published_s.append(batch.ts)
            else:
                # What was published before it is applied before it.
                self._apply_up_to(batch.first, columns, outcome)
                outcome.reject(batch.unread)
        self._apply_up_to(len(columns.events), columns, outcome)
        for kind, name in _TYPES.items():
            if events := columns.kinds[kind]:
                outcome.events[name] += events
        return outcome

    def _apply_up_to(self, last: int, columns: Columns, outcome: Outcome) -> None:
        """Applies the events from the row to go on with up to `last`, where a batch ends."""
        counts = self._engine.progress.counts
        while counts[ROW] < last:
            ended = self._run_kernel(columns, last, outcome.applied)
            if counts[REUSED_NAMES]:
                outcome.doubt(_REUSED)
            if ended == NOT_PLAIN:
                self._apply_slowly(columns, outcome)

    def _apply_slowly(self, columns: Columns, outcome: Outcome) -> None:
        """Applies the batch of the row to go on with, which the view must take, from there to its end."""
        counts = self._engine.progress.counts
        slow = _SlowBatch(columns, int(counts[ROW]), outcome)
        applied = _applied(outcome.applied.runs is not None)
        ended = NOT_PLAIN
        while counts[ROW] < slow.last:
            if ended == NOT_PLAIN:
                slow.apply_event(int(counts[ROW]), int(counts[HASHES_DONE]), self._view, applied)
                counts[ROW] += 1
                counts[HASHES_DONE] = 0
                ended = ALL_DONE
            else:
                ended = self._run_kernel(columns, slow.last, applied)
        self._view.end_batch(applied)
        outcome.take(applied)
        # After a clear in the same batch: nobody knows on which side of it a broken event was.
        for reason in slow.rejected:
            outcome.reject(reason)

    def _run_kernel(self, columns: Columns, last: int, applied: Applied) -> int:
        """Lets the kernel go on as far as it can; returns NOT_PLAIN where the view must take the next row."""
        engine, done, plain = self._engine, self._engine.progress, self._view.plain
        if plain is None or len(plain.awaited) > _AWAITED_MAX:
            done.counts[STORED_BLOCKS:] = 0
            return NOT_PLAIN
        split = plain.block_tokens // engine.hasher.block_tokens
        self._cache.expect(split)
        row, hashes_done = int(done.counts[ROW]), int(done.counts[HASHES_DONE])
        awaited = _NONE_AWAITED
        if plain.awaited:
            awaited = np.array([handle_of(engine_hash) for engine_hash in plain.awaited], np.uint64)
        with engine.index.lock:
            pod = PlainPod(
                number=engine.index.number(self._holder),
                block_tokens=plain.block_tokens,
                split=split,
                group=-1 if plain.group is None else plain.group,
                root=self._root,
                scope=self._scope,
            )
            engine.index.sweep_for(len(done.keys))
            ended = apply_rows(
                engine.index.arrays,
                pod,
                columns.events,
                last,
                columns.hashes,
                columns.tokens,
                engine.hasher.multipliers,
                engine.tier_numbers,
                awaited,
                done,
            )
        self._harvest(columns, applied)
        if self._journal.is_on:
            self._record(columns, split, row, hashes_done)
        return ended

    def _record(self, columns: Columns, split: int, row: int, hashes_done: int) -> None:
        """Records what the kernel has done since this row, of which it had removed so many hashes before."""
        counts, keys = self._engine.progress.counts, self._engine.progress.keys
        stored = 0
        for each in range(row, int(counts[ROW]) + (counts[HASHES_DONE] > 0)):
            event = columns.events[each]
            first = int(event[rows.HASH_START])
            end = first + int(counts[HASHES_DONE] if each == counts[ROW] else event[rows.HASH_COUNT])
            names = self._cache.names_of(columns.hashes[first + hashes_done * (each == row) : end], split)
            tier = int(self._engine.tier_numbers[event[rows.MEDIUM]])
            if event[rows.KIND] == rows.REMOVED:
                self._cache.record(Kind.REMOVED, tier, names)
            elif event[rows.TOKEN_COUNT] == 0:
                self._cache.record(Kind.COPIED, tier, names)
            else:
                self._cache.record(Kind.STORED, tier, names, keys[stored : stored + len(names)])
                stored += len(names)

    def _harvest(self, columns: Columns, applied: Applied) -> None:
        done = self._engine.progress
        counts = done.counts.tolist()
        if stored := counts[STORED_BLOCKS]:
            keys = done.keys[:stored].copy()
            applied.stored.append(keys)
            if applied.runs is not None:
                applied.runs += self._runs(columns, keys, counts[RUNS])
        for count, which in _REMOVALS:
            if counts[count]:
                applied.removals[which] += counts[count]
        if counts[REUSED_NAMES]:
            applied.skipped["BlockStored", _REUSED] += counts[REUSED_NAMES]

    def _runs(self, columns: Columns, keys: Keys, number: int) -> list[StoredRun]:
        done, block_tokens = self._engine.progress, self._engine.hasher.block_tokens
        starts = done.runs[:number].tolist()
        parents = done.parents[:number].tolist()
        ends = [start for _, start in starts[1:]]
        return [
            StoredRun(parent, keys[start:end], columns.tokens[at : at + block_tokens])
            for parent, (at, start), end in zip(parents, starts, (*ends, len(keys)), strict=True)
        ]


def _applied(with_runs: bool) -> Applied:
    return Applied(runs=[] if with_runs else None)


class _SlowBatch:
    """The events of one batch as the view takes them; made only for a batch that is not plain.

    Attributes:
        last: Row behind its last event.
        rejected: Why some of its events cannot be read.
    """

    def __init__(self, columns: Columns, row: int, outcome: Outcome) -> None:
        batch = next(batch for batch in columns.batches if batch.first <= row < batch.end)
        self.last = batch.end
        self.rejected: list[str] = []
        # By row: the event, and its place among those that can be read.
        self._events: dict[int, tuple[int, KVEvent]] = {}
        for each in range(batch.first, batch.end):
            try:
                event = columns.event(each)
            except PayloadError as error:
                self.rejected.append(error.reason)
                continue
            self._events[each] = len(self._events), event
            if columns.events[each, rows.KIND] == rows.OTHER:
                outcome.events[type(event).__name__] += 1
        self._ahead = Ahead([event for _, event in self._events.values()])

    def apply_event(self, row: int, hashes_done: int, view: PodView, applied: Applied) -> None:
        """Lets the view apply the event of this row, if it can be read: what is left of it."""
        if row in self._events:
            self._ahead.position, event = self._events[row]
            if hashes_done and isinstance(event, BlockRemoved):
                event = msgspec.structs.replace(event, block_hashes=event.block_hashes[hashes_done:])
            view.apply_event(event, self._ahead, applied)


@dataclass(frozen=True, slots=True)
class PodState:
    """The state of one followed engine."""

    view: PodView
    applier: FlatApplier
    journal: Journal


class PodStates:
    """Makes the states of engines that share an index and a hasher."""

    def __init__(self, config: IndexerConfig, index: FlatIndex, hasher: BlockHasher) -> None:
        self._config = config
        self._hasher = hasher
        self._flat = FlatEngine(index, hasher, config.max_payload_bytes)

    def make(self, stream: PodStream) -> PodState:
        """Make the state of an engine of which nothing is known yet."""
        flat, journal, holder = self._flat, Journal(), stream.holder
        own = FlatCache(flat.index, holder, stream.model, journal=journal)

        def cache_of(group: int | None) -> FlatCache:
            if group is None:
                return own
            # Other groups name the last index block of an engine block only.
            model = f"{stream.model}#tail"
            return FlatCache(flat.index, group_holder(holder, group), model, group, journal)

        view = PodView(
            stream.model,
            cache_of=cache_of,
            tiers=flat.index.tiers,
            hasher=self._hasher,
            config=self._config,
        )
        return PodState(view, FlatApplier(flat, view, own, holder, stream.model), journal)
