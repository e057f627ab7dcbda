"""Payloads of one pod's stream to changes of the index: many columns at once, plain events by one kernel.

What is not plain goes to the pod's view, event by event, in its place; so the view's rules hold for all, and
the kernel is only a faster way to the same state.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import msgspec
import numpy as np

from indexer.config import IndexerConfig, PodStream
from indexer.errors import PayloadError
from indexer.index.index import TURN_BLOCKS, FlatIndex
from indexer.keys import BlockHasher, Keys
from indexer.tiers import SPECULATIVE_TIER, Tiers
from indexer.views.apply_kernel import (
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
from indexer.views.block_cache import FlatCache
from indexer.views.full_reports import Ahead
from indexer.views.hybrid import HybridMatcher, group_holder
from indexer.views.pod_view import PodView
from indexer.views.view_parts import ChangeLog, Kind, Outcome, StoredRun
from indexer.wire import columns as rows
from indexer.wire.columns import Columns, EventDecoder, hash_to_uint64
from indexer.wire.events import BlockRemoved, BlockStored

# So many hashes that something waits for are looked for in each store; with more the view applies all stores.
_AWAITED_MAX = 16
_NONE_AWAITED = np.empty(0, np.uint64)

_TYPES = {rows.STORED: "BlockStored", rows.REMOVED: "BlockRemoved", rows.CLEARED: "AllBlocksCleared"}
_REMOVALS = ((LAST_COPIES, "last"), (FURTHER_COPIES, "copy"))


class FlatEngine:
    """State that the appliers of all pods share, for one thread."""

    def __init__(self, config: IndexerConfig, index: FlatIndex, hasher: BlockHasher) -> None:
        self.config = config
        self.index = index
        self.hasher = hasher
        self.decoder = EventDecoder(config.max_payload_bytes)
        self.progress = progress(2 * TURN_BLOCKS)
        tiers = index.tiers
        self.tier_numbers = np.array([tiers.number(tiers.of_medium(medium)) for medium in rows.MEDIA])


class FlatApplier:
    """Applies the payloads of one engine, of which nothing is known at first."""

    def __init__(self, engine: FlatEngine, stream: PodStream) -> None:
        self.change_log = ChangeLog()  # records what they change in the index
        self._engine = engine
        self._holder, self._model = stream.holder, stream.model
        self._cache = FlatCache(engine.index, self._holder, self._model, change_log=self.change_log)
        # State that its events made known.
        self.view = PodView(
            stream.model,
            cache_of=self._cache_of,
            tiers=engine.index.tiers,
            hasher=engine.hasher,
            config=engine.config,
        )
        self._root = np.uint64(engine.hasher.root(stream.model))
        self._scope = np.uint64(self._cache.scope)

    def apply(self, payloads: Sequence[bytes], *, with_runs: bool = False) -> Outcome:
        columns = self._engine.decoder.decode(payloads)
        outcome = Outcome(runs=[] if with_runs else None)
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

    def _cache_of(self, group: int | None) -> FlatCache:
        if group is None:
            return self._cache
        # Other groups name the last index block of an engine block only.
        holder, model = group_holder(self._holder, group), f"{self._model}#tail"
        return FlatCache(self._engine.index, holder, model, group, self.change_log)

    def _apply_up_to(self, last: int, columns: Columns, outcome: Outcome) -> None:
        counts = self._engine.progress.counts
        while counts[ROW] < last:
            if self._run_kernel(columns, last, outcome) == NOT_PLAIN:
                self._apply_slowly(columns, outcome)

    def _apply_slowly(self, columns: Columns, outcome: Outcome) -> None:
        """Apply the batch of the row to go on with from there to its end; that row is the view's."""
        counts = self._engine.progress.counts
        batch = next(batch for batch in columns.batches if batch.first <= counts[ROW] < batch.end)
        events = columns.typed(batch)
        for event, kind in zip(events, columns.events[batch.first : batch.end, rows.KIND], strict=True):
            if kind == rows.OTHER and not isinstance(event, PayloadError):
                outcome.events[type(event).__name__] += 1
        ahead = Ahead(events)
        ended = NOT_PLAIN
        while counts[ROW] < batch.end:
            if ended == NOT_PLAIN:
                ahead.position = int(counts[ROW]) - batch.first
                event, hashes_done = events[ahead.position], int(counts[HASHES_DONE])
                if hashes_done and isinstance(event, BlockStored | BlockRemoved):
                    event = msgspec.structs.replace(event, block_hashes=event.block_hashes[hashes_done:])
                if not isinstance(event, PayloadError):
                    self.view.apply_event(event, ahead, outcome)
                counts[ROW] += 1
                counts[HASHES_DONE] = 0
                ended = ALL_DONE
            else:
                ended = self._run_kernel(columns, batch.end, outcome)
        self.view.end_batch(outcome)
        # After a clear in the same batch: nobody knows on which side of it a broken event was.
        for event in events:
            if isinstance(event, PayloadError):
                outcome.reject(event.reason)

    def _run_kernel(self, columns: Columns, last: int, outcome: Outcome) -> int:
        """Lets the kernel go on as far as it can; returns NOT_PLAIN where the view must take the next row."""
        engine, done, plain = self._engine, self._engine.progress, self.view.plain
        if plain is None or len(plain.awaited) > _AWAITED_MAX:
            return NOT_PLAIN
        split = plain.block_tokens // engine.hasher.block_tokens
        self._cache.expect(split)
        row, hashes_done = int(done.counts[ROW]), int(done.counts[HASHES_DONE])
        awaited = _NONE_AWAITED
        if plain.awaited:
            awaited = np.array([hash_to_uint64(engine_hash) for engine_hash in plain.awaited], np.uint64)
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
        self._harvest(columns, outcome)
        if self.change_log.is_on:
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

    def _harvest(self, columns: Columns, outcome: Outcome) -> None:
        done = self._engine.progress
        counts = done.counts.tolist()
        if stored := counts[STORED_BLOCKS]:
            keys = done.keys[:stored].copy()
            outcome.stored.append(keys)
            if outcome.runs is not None:
                outcome.runs += self._runs(columns, keys, counts[RUNS])
        for count, which in _REMOVALS:
            if counts[count]:
                outcome.removals[which] += counts[count]
        outcome.skip("BlockStored", "hash_reused", counts[REUSED_NAMES])

    def _runs(self, columns: Columns, keys: Keys, number: int) -> list[StoredRun]:
        done, block_tokens = self._engine.progress, self._engine.hasher.block_tokens
        starts = done.runs[:number].tolist()
        parents = done.parents[:number].tolist()
        ends = [start for _, start in starts[1:]]
        return [
            StoredRun(parent, keys[start:end], columns.tokens[at : at + block_tokens])
            for parent, (at, start), end in zip(parents, starts, (*ends, len(keys)), strict=True)
        ]


_WARM_PODS = tuple(f"warm-{number}" for number in range(6))
_WARM_BYTES = 1 << 20


@cache
def warm_kernels() -> None:
    """Compile the indexer's kernels, or load them, by calling each once on an index of its own.

    From an empty cache this takes a minute or two, from a filled one about a second; see `kernel_cache`.
    """
    config = IndexerConfig(block_tokens=1, hash_seed=0, max_payload_bytes=_WARM_BYTES)
    hasher = BlockHasher(1, 0)
    index = FlatIndex(_WARM_BYTES, Tiers())
    engine = FlatEngine(config, index, hasher)
    for pod in _WARM_PODS:
        state = FlatApplier(engine, PodStream(pod, "warm", "tcp://127.0.0.1:1", None))
        state.apply([_batch(_store([1, 2], None), _store([3], 2))])
        state.apply([_batch(_store([4], 3), _store([], None), _removal(4), _removal(9))])
    # Tokens that may be written to, and ones that may not, are different types.
    hasher.chain(0, np.frombuffer(bytes(4), np.uint32))
    keys = hasher.chain(hasher.root("warm"), [1, 2, 3])
    index.add(_WARM_PODS[0], SPECULATIVE_TIER, keys)
    index.learn_stride(_WARM_PODS[0], 2)
    index.match(keys, frozenset(_WARM_PODS))
    index.held(keys, _WARM_PODS[0])
    HybridMatcher(index, 1)
    index.remove(_WARM_PODS[0], SPECULATIVE_TIER, keys)
    copied = FlatApplier(engine, PodStream("warm-copy", "warm", "tcp://127.0.0.1:1", None)).view
    for part in state.view.parts():
        if part is not None:
            copied.restore(part)
    # More than fits into what is there at first: arrays and tables are made anew.
    index.add(_WARM_PODS[0], "cpu", np.arange(2048, dtype=np.uint64))
    index.add(_WARM_PODS[0], "cpu", np.arange(2048, dtype=np.uint64))
    index.clear_pod(_WARM_PODS[1])
    index.tier_blocks(_WARM_PODS[0], "cpu")
    index.stats()


def _batch(*events: dict[str, object]) -> bytes:
    return msgspec.msgpack.encode([0.0, events, None])


def _store(tokens: list[int], parent: int | None) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": tokens or [1],
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": 1 if tokens else 0,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


def _removal(engine_hash: int) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": [engine_hash], "medium": "GPU"}
