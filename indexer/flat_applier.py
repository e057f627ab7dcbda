"""An `Applier` on the flat index: many payloads parsed at once, plain events applied by one kernel.

What is not plain goes to the pod's view, event by event, in its place; so the view's rules hold for all, and
the kernel is only a faster way to the same state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from indexer import event_rows as rows
from indexer.applier import Outcome
from indexer.apply import Applied, PodView, StoredRun
from indexer.decode import decode_event
from indexer.errors import PayloadError
from indexer.events import BlockRemoved, KVEvent
from indexer.flat_apply import (
    ALL_DONE,
    COPIED_BLOCKS,
    FURTHER_COPIES,
    HASHES_DONE,
    LAST_COPIES,
    NOT_PLAIN,
    REMOVED_BLOCKS,
    REUSED_NAMES,
    ROW,
    RUNS,
    STORED_BLOCKS,
    PlainPod,
    apply_rows,
    progress,
)
from indexer.flat_cache import FlatCache, handle_of
from indexer.flat_index import TURN_BLOCKS, FlatIndex
from indexer.keys import BlockHasher, Keys
from indexer.parse import EventParser, Parsed
from indexer.reannounce import Ahead

# So many hashes that something waits for are looked for in each store; with more the view applies all stores.
_AWAITED_MAX = 16

_TYPES = {rows.STORED: "BlockStored", rows.REMOVED: "BlockRemoved", rows.CLEARED: "AllBlocksCleared"}
_REASONS = {rows.BROKEN_BATCH: "broken_batch", rows.OVERSIZE: "oversize"}


class FlatEngine:
    """What the appliers of all pods share, for one thread.

    Args:
        index: Where blocks go.
        hasher: Makes their keys.
        max_bytes: A longer payload is not read.
    """

    def __init__(self, index: FlatIndex, hasher: BlockHasher, max_bytes: int) -> None:
        self.index = index
        self.hasher = hasher
        self.parser = EventParser(max_bytes)
        self.progress = progress(2 * TURN_BLOCKS)
        tiers = index.tiers
        self.tier_numbers = np.array([tiers.number(tiers.of_medium(medium)) for medium in rows.MEDIA])


class FlatApplier:
    """Applies the payloads of one pod.

    Args:
        engine: Shared with other pods.
        view: The pod's view, whose lead group is in `cache`.
        cache: The pod's own blocks.
        holder: The pod's name in the index.
        model: The base model's name.
    """

    def __init__(self, engine: FlatEngine, view: PodView, cache: FlatCache, holder: str, model: str) -> None:
        self._engine = engine
        self._view = view
        self._cache = cache
        self._holder = holder
        self._root = np.uint64(engine.hasher.root(model))

    def apply(self, payloads: Sequence[bytes], *, with_runs: bool = False) -> Outcome:
        """See `Applier.apply`."""
        parsed = self._engine.parser.parse(payloads)
        outcome = Outcome(_applied(with_runs))
        statuses = parsed.batches[:, rows.STATUS]
        read = statuses == rows.OK
        outcome.published_s = parsed.batches[read, rows.TS_BITS].view(np.float64).tolist()
        self._engine.progress.counts[:] = 0
        for place in np.flatnonzero(~read).tolist():
            # What was published before a broken batch is applied before it.
            self._apply_up_to(int(parsed.batches[place, rows.FIRST_EVENT]), parsed, outcome)
            outcome.reject(_REASONS[int(statuses[place])])
        self._apply_up_to(len(parsed.events), parsed, outcome)
        kinds = np.bincount(parsed.events[:, rows.KIND], minlength=rows.CLEARED + 1)
        for kind, name in _TYPES.items():
            outcome.events[name] += int(kinds[kind])
        return outcome

    def _apply_up_to(self, last: int, parsed: Parsed, outcome: Outcome) -> None:
        """Applies the events from the row to go on with up to `last`, where a batch ends."""
        counts = self._engine.progress.counts
        with_runs = outcome.applied.runs is not None
        applied = _applied(with_runs)
        slow: _SlowBatch | None = None
        while counts[ROW] < last:
            if self._run_kernel(parsed, slow.last if slow else last, applied) == NOT_PLAIN:
                if slow is None:
                    outcome.take(self._harvest(applied))
                    applied, slow = _applied(with_runs), _SlowBatch(parsed, int(counts[ROW]), outcome)
                slow.apply_event(int(counts[ROW]), int(counts[HASHES_DONE]), self._view, applied)
                counts[ROW] += 1
                counts[HASHES_DONE] = 0
            if slow is not None and counts[ROW] == slow.last:
                self._view.end_batch(applied)
                outcome.take(self._harvest(applied))
                # After a clear in the same batch: nobody knows on which side of it a broken event was.
                for reason in slow.rejected:
                    outcome.reject(reason)
                applied, slow = _applied(with_runs), None
        outcome.take(self._harvest(applied))

    def _harvest(self, applied: Applied) -> Applied:
        """Adds the kernel's sums to those of the view."""
        counts = self._engine.progress.counts
        applied.removals["last"] += int(counts[LAST_COPIES])
        applied.removals["copy"] += int(counts[FURTHER_COPIES])
        if counts[REUSED_NAMES]:
            applied.skipped["BlockStored", "hash_reused"] += int(counts[REUSED_NAMES])
        counts[STORED_BLOCKS:] = 0
        return applied

    def _run_kernel(self, parsed: Parsed, last: int, applied: Applied) -> int:
        """Lets the kernel go on as far as it can."""
        engine, done = self._engine, self._engine.progress
        plain = self._view.plain
        if plain is None or len(plain.awaited) > _AWAITED_MAX:
            return NOT_PLAIN
        split = plain.block_tokens // engine.hasher.block_tokens
        self._cache.expect(split)
        awaited = np.array([handle_of(engine_hash) for engine_hash in plain.awaited], np.uint64)
        done.counts[[STORED_BLOCKS, RUNS, COPIED_BLOCKS, REMOVED_BLOCKS]] = 0
        with engine.index.lock:
            pod = PlainPod(
                number=engine.index.number(self._holder),
                block_tokens=plain.block_tokens,
                split=split,
                group=-1 if plain.group is None else plain.group,
                root=self._root,
                scope=np.uint64(self._cache.scope),
            )
            ended = apply_rows(
                engine.index.prepare(len(done.keys)),
                pod,
                parsed.events,
                last,
                parsed.hashes,
                parsed.tokens,
                engine.hasher.multipliers,
                engine.tier_numbers,
                awaited,
                done,
            )
        if stored := int(done.counts[STORED_BLOCKS]):
            keys = done.keys[:stored].copy()
            applied.stored.append(keys)
            if applied.runs is not None:
                applied.runs += self._runs(parsed, keys)
        return ended if ended == NOT_PLAIN else ALL_DONE

    def _runs(self, parsed: Parsed, keys: Keys) -> Iterator[StoredRun]:
        """The runs that the kernel stored."""
        done, block_tokens = self._engine.progress, self._engine.hasher.block_tokens
        number = int(done.counts[RUNS])
        ends = [*done.runs[1:number, 1].tolist(), len(keys)]
        for (row, start), end, parent in zip(
            done.runs[:number].tolist(), ends, done.parents[:number].tolist(), strict=True
        ):
            at = int(parsed.events[row, rows.TOKEN_START])
            yield StoredRun(parent, keys[start:end], parsed.tokens[at : at + block_tokens].copy())


def _applied(with_runs: bool) -> Applied:
    return Applied(runs=[] if with_runs else None)


class _SlowBatch:
    """The events of one batch as the view takes them; made only for a batch that is not plain.

    Attributes:
        last: Row behind its last event.
        rejected: Why some of its events cannot be read.
    """

    def __init__(self, parsed: Parsed, row: int, outcome: Outcome) -> None:
        first, self.last = _batch_of(parsed, row)
        self.rejected: list[str] = []
        # By row: the event, and its place among those that can be read.
        self._events: dict[int, tuple[int, KVEvent]] = {}
        for each in range(first, self.last):
            try:
                event = decode_event(parsed.event_bytes(each))
            except PayloadError as error:
                self.rejected.append(error.reason)
                continue
            self._events[each] = len(self._events), event
            if parsed.events[each, rows.KIND] == rows.OTHER:
                outcome.events[type(event).__name__] += 1
        self._ahead = Ahead([event for _, event in self._events.values()])

    def apply_event(self, row: int, hashes_done: int, view: PodView, applied: Applied) -> None:
        """Lets the view apply the event of this row, if it can be read: what is left of it."""
        if row in self._events:
            self._ahead.position, event = self._events[row]
            if hashes_done and isinstance(event, BlockRemoved):
                event = msgspec.structs.replace(event, block_hashes=event.block_hashes[hashes_done:])
            view.apply_event(event, self._ahead, applied)


def _batch_of(parsed: Parsed, row: int) -> tuple[int, int]:
    """The rows of the batch in which this row is: its first, and the one behind its last."""
    batches = parsed.batches
    holding = (batches[:, rows.FIRST_EVENT] <= row) & (
        row < batches[:, rows.FIRST_EVENT] + batches[:, rows.EVENT_COUNT]
    )
    batch = batches[np.argmax(holding)]
    first = int(batch[rows.FIRST_EVENT])
    return first, first + int(batch[rows.EVENT_COUNT])
