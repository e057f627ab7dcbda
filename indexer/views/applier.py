"""Appliers of event payloads: decode a pod's payloads to columns and apply them to the index.

A kernel applies plain events. All others are applied by the pod's view, one by one and in order. The kernel
is only a faster way to the state that the view alone would reach.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain

import msgspec
import numpy as np

from indexer.config import IndexerConfig, PodStream
from indexer.errors import PayloadError
from indexer.index.index import TURN_BLOCKS, FlatIndex
from indexer.keys import EMPTY, BlockHasher, Keys
from indexer.views import apply_kernel
from indexer.views.apply_kernel import ALL_DONE, HASHES_DONE, NOT_PLAIN, ROW, PlainPod, apply_rows, progress
from indexer.views.block_cache import BlockCache
from indexer.views.full_reports import LaterEvents
from indexer.views.hybrid import BlockDrop, HybridMatcher, group_holder
from indexer.views.pod_view import PodView
from indexer.views.view_parts import Change, ChangeLog, Entry, Kind, Outcome, StoredRun, ViewFacts
from indexer.wire import columns as rows
from indexer.wire.columns import Columns, EventDecoder, hash_to_uint64
from indexer.wire.events import BlockRemoved, BlockStored, KVEvent
from indexer.wire.tiers import CPU_TIER, GPU_TIER, SPECULATIVE_TIER, Tiers

# Maximum of awaited hashes that the kernel compares with each store; above it the view applies all events.
_AWAITED_MAX = 16
# Stored blocks from which a tier without any removal counts as not proven.
_UNPROVEN_BLOCKS = 1000

_TYPES = {rows.STORED: "BlockStored", rows.REMOVED: "BlockRemoved", rows.CLEARED: "AllBlocksCleared"}
_REMOVALS = ((apply_kernel.LAST_COPIES, "last"), (apply_kernel.EXTRA_COPIES, "copy"))


class ApplierContext:
    """State shared by the appliers of all pods; not thread-safe."""

    def __init__(self, config: IndexerConfig, index: FlatIndex, hasher: BlockHasher) -> None:
        self.config = config
        self.index = index
        self.hasher = hasher
        self.decoder = EventDecoder(config.max_payload_bytes)
        self.progress = progress(2 * TURN_BLOCKS)
        tiers = index.tiers
        self.tier_numbers = np.array([tiers.number(tiers.of_medium(medium)) for medium in rows.MEDIA])


class TierProof:
    """Evidence that one engine reports what leaves its tiers.

    Some connectors publish the blocks that they store and none that they evict, so a view
    of such a tier only grows.
    """

    def __init__(self) -> None:
        self.reports_evictions = False  # whether removals from host memory are known to be published
        self._stored: Counter[str] = Counter()
        self._proven: set[str] = set()

    def count(self, tier: str, hashes: int, *, stored: bool) -> None:
        if stored:
            self._stored[tier] += hashes
        else:
            self._proven.add(tier)

    def evidence(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the tiers that stored many blocks, and those with a removal; both in order."""
        stored = sorted(tier for tier, hashes in self._stored.items() if hashes >= _UNPROVEN_BLOCKS)
        return tuple(stored), tuple(sorted(self._proven))

    def restore(self, stored: Sequence[str], proven: Sequence[str]) -> None:
        """Add the evidence of another router."""
        self._stored.update(dict.fromkeys(stored, _UNPROVEN_BLOCKS))
        self._proven.update(proven)

    @property
    def has_further_tiers(self) -> bool:
        return bool((self._stored.keys() | self._proven) - {GPU_TIER})

    @property
    def unproven(self) -> tuple[str, ...]:
        """Return tiers that stored many blocks and lost none, while device memory evicts."""
        if GPU_TIER not in self._proven:
            return ()
        proven = self._proven | {CPU_TIER} if self.reports_evictions else self._proven
        # Copied in one step, because other threads read this while events are counted.
        stored = list(self._stored.items())
        return tuple(tier for tier, hashes in stored if hashes >= _UNPROVEN_BLOCKS and tier not in proven)


class EventApplier:
    """Applier of one engine's payloads; starts without knowledge of the engine."""

    def __init__(self, context: ApplierContext, stream: PodStream) -> None:
        self.change_log = ChangeLog()  # records changes of the index
        self.drop = BlockDrop()
        self._context = context
        self._stream = stream
        self._holder = stream.holder
        self._cache = BlockCache(context.index, stream.holder, stream.model, change_log=self.change_log)
        # State learned from the engine's events.
        self.view = PodView(
            stream.model,
            cache_of=self._cache_of,
            tiers=context.index.tiers,
            hasher=context.hasher,
            config=context.config,
        )
        self.tier_proof = TierProof()
        self._unproven_media = context.tier_numbers != context.index.tiers.number(GPU_TIER)
        self._aging: list[Change] = []  # removals of what was in unproven tiers at the last `age_tiers`
        self._root = np.uint64(context.hasher.root(stream.model))
        self._scope = np.uint64(self._cache.scope)

    def apply(self, payloads: Sequence[bytes], *, with_runs: bool = False) -> Outcome:
        columns = self._context.decoder.decode(payloads)
        outcome = Outcome(runs=[] if with_runs or self.drop.is_learning else None)
        self._count_tiers(columns)
        self._context.progress.counts[:] = 0
        for batch in columns.batches:
            if batch.unread is None:
                outcome.published_s.append(batch.ts)
            else:
                # Earlier batches are applied before the unreadable one is rejected.
                self._apply_up_to(batch.first, columns, outcome)
                outcome.reject(batch.unread)
        self._apply_up_to(len(columns.events), columns, outcome)
        for kind, name in _TYPES.items():
            if events := columns.kinds[kind]:
                outcome.events[name] += events
        if self.view.is_paired:
            # Such an engine stores pages with other next tokens again, and drops nothing.
            self.drop.has_drafter = False
        if outcome.runs and self.drop.is_learning:
            self.drop.observe(
                outcome.runs,
                self.stride,
                lambda keys: self._context.index.copies(keys, self._holder, GPU_TIER),
                outcome.published_s[-1] if outcome.published_s else 0.0,
                is_hybrid=self.view.groups is not None,
            )
        return outcome

    @property
    def stride(self) -> int:
        """Return the index blocks per block of the engine, at least 1."""
        return max(1, (self.view.runs.block_tokens or 0) // self._context.hasher.block_tokens)

    def facts(self) -> ViewFacts:
        stored, proven = self.tier_proof.evidence()
        return msgspec.structs.replace(self.view.facts(), tiers_stored=stored, tiers_proven=proven)

    def restore_facts(self, facts: ViewFacts) -> None:
        self.view.restore_facts(facts)
        self.tier_proof.restore(facts.tiers_stored, facts.tiers_proven)

    def apply_entry(self, entry: Entry) -> tuple[list[Keys], str | None]:
        """See `PodView.apply_entry`."""
        if entry.facts is not None:
            self.tier_proof.restore(entry.facts.tiers_stored, entry.facts.tiers_proven)
        return self.view.apply_entry(entry)

    def clear(self) -> None:
        """Delete the view and its blocks in the index; keep what is true of the engine's process."""
        self.view.clear()
        self.drop.reopen()

    def age_tiers(self) -> Iterator[None]:
        """Remove the copies in unproven tiers that were there at the last call already, turn by turn."""
        tiers = [self._context.index.tiers.number(tier) for tier in self.tier_proof.unproven]
        due, self._aging = self._aging, []
        for change in due:
            if change.tier in tiers:
                self.view.expire(change)
                yield
        for change in chain.from_iterable(map(self.view.removals, tiers)):
            self._aging.append(change)
            yield

    def _count_tiers(self, columns: Columns) -> None:
        """Count the blocks of all events but those of kind OTHER."""
        table, proof, tiers = columns.events, self.tier_proof, self._context.index.tiers
        if not self._unproven_media[table[:, rows.MEDIUM]].any():
            if columns.kinds[rows.REMOVED]:
                proof.count(GPU_TIER, 1, stored=False)
            return
        for kind, medium, hashes in table[:, (rows.KIND, rows.MEDIUM, rows.HASH_COUNT)].tolist():
            if kind in (rows.STORED, rows.REMOVED):
                proof.count(tiers.of_medium(rows.MEDIA[medium]), hashes, stored=kind == rows.STORED)
                self._unproven_media[medium] &= kind == rows.STORED

    def _cache_of(self, group: int | None) -> BlockCache:
        if group is None:
            return self._cache
        # Other groups hold only the last index block of each engine block, hence a scope of their own.
        holder, model = group_holder(self._holder, group), f"{self._stream.model}#tail"
        return BlockCache(self._context.index, holder, model, group, self.change_log)

    def _apply_up_to(self, last: int, columns: Columns, outcome: Outcome) -> None:
        counts = self._context.progress.counts
        while counts[ROW] < last:
            if self._run_kernel(columns, last, outcome) == NOT_PLAIN:
                self._apply_slowly(columns, outcome)

    def _apply_slowly(self, columns: Columns, outcome: Outcome) -> None:
        """Apply the rest of the next row's batch, beginning with that row by the view."""
        counts = self._context.progress.counts
        batch = next(batch for batch in columns.batches if batch.first <= counts[ROW] < batch.end)
        events = columns.typed(batch)
        for event, kind in zip(events, columns.events[batch.first : batch.end, rows.KIND], strict=True):
            if kind == rows.OTHER and not isinstance(event, PayloadError):
                outcome.events[type(event).__name__] += 1
                if isinstance(event, BlockStored | BlockRemoved):
                    tier = self._context.index.tiers.of_medium(event.medium)
                    self.tier_proof.count(
                        tier, len(event.block_hashes), stored=isinstance(event, BlockStored)
                    )
        later = LaterEvents(events)
        ended = NOT_PLAIN
        while counts[ROW] < batch.end:
            if ended == NOT_PLAIN:
                later.position = int(counts[ROW]) - batch.first
                event, hashes_done = events[later.position], int(counts[HASHES_DONE])
                if hashes_done and isinstance(event, BlockStored | BlockRemoved):
                    event = msgspec.structs.replace(event, block_hashes=event.block_hashes[hashes_done:])
                if not isinstance(event, PayloadError):
                    self.view.apply_event(event, later, outcome)
                counts[ROW] += 1
                counts[HASHES_DONE] = 0
                ended = ALL_DONE
            else:
                ended = self._run_kernel(columns, batch.end, outcome)
        self.view.end_batch(outcome)
        # Rejected last: a broken event may have come before or after a clear of the same batch.
        for event in events:
            if isinstance(event, PayloadError):
                outcome.reject(event.reason)

    def _run_kernel(self, columns: Columns, last: int, outcome: Outcome) -> int:
        """Run the kernel as far as possible; return NOT_PLAIN if the view must apply the next row."""
        context, done, plain = self._context, self._context.progress, self.view.plain
        if plain is None or len(plain.awaited) > _AWAITED_MAX:
            return NOT_PLAIN
        split = plain.block_tokens // context.hasher.block_tokens
        self._cache.add_split(split)
        row, hashes_done = int(done.counts[ROW]), int(done.counts[HASHES_DONE])
        awaited = np.array(list(map(hash_to_uint64, plain.awaited)), np.uint64) if plain.awaited else EMPTY
        with context.index.lock:
            pod = PlainPod(
                number=context.index.number(self._holder),
                block_tokens=plain.block_tokens,
                split=split,
                group=-1 if plain.group is None else plain.group,
                root=self._root,
                scope=self._scope,
            )
            context.index.sweep_to_fit(len(done.keys))
            ended = apply_rows(
                context.index.arrays,
                pod,
                columns.events,
                last,
                columns.hashes,
                columns.tokens,
                context.hasher.multipliers,
                context.tier_numbers,
                awaited,
                done,
            )
        self._collect(columns, outcome)
        if self.change_log.is_on:
            self._record(columns, split, row, hashes_done)
        return ended

    def _record(self, columns: Columns, split: int, row: int, hashes_done: int) -> None:
        """Record the kernel's changes from `row` on, of which `hashes_done` hashes were applied before."""
        counts, keys = self._context.progress.counts, self._context.progress.keys
        stored = 0
        for each in range(row, int(counts[ROW]) + (counts[HASHES_DONE] > 0)):
            event = columns.events[each]
            first = int(event[rows.HASH_START])
            end = first + int(counts[HASHES_DONE] if each == counts[ROW] else event[rows.HASH_COUNT])
            scoped = self._cache.scoped(columns.hashes[first + hashes_done * (each == row) : end], split)
            tier = int(self._context.tier_numbers[event[rows.MEDIUM]])
            if event[rows.KIND] == rows.REMOVED:
                self._cache.record(Kind.REMOVED, tier, scoped)
            elif event[rows.TOKEN_COUNT] == 0:
                self._cache.record(Kind.COPIED, tier, scoped)
            else:
                self._cache.record(Kind.STORED, tier, scoped, keys[stored : stored + len(scoped)])
                stored += len(scoped)

    def _collect(self, columns: Columns, outcome: Outcome) -> None:
        done = self._context.progress
        counts = done.counts.tolist()
        if stored := counts[apply_kernel.STORED_BLOCKS]:
            keys = done.keys[:stored].copy()
            outcome.stored.append(keys)
            if outcome.runs is not None:
                outcome.runs += self._runs(columns, keys, counts[apply_kernel.RUNS])
        for count, which in _REMOVALS:
            if counts[count]:
                outcome.removals[which] += counts[count]
        outcome.skip("BlockStored", "hash_reused", counts[apply_kernel.REUSED_HASHES])

    def _runs(self, columns: Columns, keys: Keys, number: int) -> list[StoredRun]:
        done, block_tokens = self._context.progress, self._context.hasher.block_tokens
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
    """Compile or load the indexer's kernels by calling each of them once on a separate index.

    Takes one to two minutes with an empty cache, about a second with a filled one; see `kernel_cache`.
    """
    config = IndexerConfig(block_tokens=1, hash_seed=0, max_payload_bytes=_WARM_BYTES)
    hasher = BlockHasher(1, 0)
    index = FlatIndex(_WARM_BYTES, Tiers())
    context = ApplierContext(config, index, hasher)
    for pod in _WARM_PODS:
        state = EventApplier(context, PodStream(pod, "warm", "tcp://127.0.0.1:1", None))
        state.apply([_batch(_store(1, 2), _store(3, parent=2))])
        copy = BlockStored([1], medium="GPU")
        removals = [BlockRemoved([engine_hash], "GPU") for engine_hash in (4, 9)]
        state.apply([_batch(_store(4, parent=3), copy, *removals)])
    # Read-only tokens are a separate type, compiled separately.
    hasher.chain(0, np.frombuffer(bytes(4), np.uint32))
    keys = hasher.chain(hasher.root("warm"), [1, 2, 3])
    index.add(_WARM_PODS[0], SPECULATIVE_TIER, keys)
    index.set_stride(_WARM_PODS[0], 2)
    index.match(keys, frozenset(_WARM_PODS))
    index.copies(keys, _WARM_PODS[0], GPU_TIER)
    index.held(keys, _WARM_PODS[0])
    HybridMatcher(index, hasher)
    index.remove(_WARM_PODS[0], SPECULATIVE_TIER, keys)
    copied = EventApplier(context, PodStream("warm-copy", "warm", "tcp://127.0.0.1:1", None)).view
    for part in state.view.parts():
        if part is not None:
            copied.restore(part)
    # More blocks than the initial tables hold, so that they grow.
    index.add(_WARM_PODS[0], "cpu", np.arange(2048, dtype=np.uint64))
    index.add(_WARM_PODS[0], "cpu", np.arange(2048, dtype=np.uint64))
    index.clear_pod(_WARM_PODS[1])
    index.tier_blocks(_WARM_PODS[0], "cpu")
    index.stats()


def _batch(*events: KVEvent) -> bytes:
    return msgspec.msgpack.encode([0.0, events, None])


def _store(*tokens: int, parent: int | None = None) -> BlockStored:
    return BlockStored(list(tokens), parent, list(tokens), block_size=1, medium="GPU")
