"""Pod view: applies the typed events of one pod epoch to the index.

Events must arrive in order and belong to one epoch; sequence numbers are checked in `indexer.streams`. Events
that cannot be used are counted in an `Outcome`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from indexer.config import IndexerConfig
from indexer.errors import TokenError
from indexer.index.index import TURN_BLOCKS
from indexer.keys import BlockHasher, Keys
from indexer.views.block_cache import BlockCache, Dropped, copies_in
from indexer.views.full_reports import FullReports, LaterEvents, UncertainCopies
from indexer.views.hybrid import NEXT_TOKENS, CacheGroups, PodGroups
from indexer.views.runs import CopyChange, Orphan, Orphans, PlainRuns, Runs
from indexer.views.view_parts import Change, Entry, Kind, Outcome, ViewFacts, ViewPart
from indexer.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, EngineHash, KVEvent
from indexer.wire.tiers import Tiers

# Reason: a store may have been a further physical copy or a repeated report.
AMBIGUOUS_COPIES = "ambiguous_copies"


class PodView:
    """View of one pod's cache, updated by the pod's events."""

    def __init__(
        self,
        model: str,
        *,
        cache_of: Callable[[int | None], BlockCache],
        tiers: Tiers,
        hasher: BlockHasher,
        config: IndexerConfig,
    ) -> None:
        # Creates the block cache of a KV cache group, once per group; None stands for the lead group.
        self._cache_of = cache_of
        self._tiers = tiers
        self._hasher = hasher
        self._groups = CacheGroups(hasher.block_tokens)
        self._orphans = Orphans(config.orphan_tokens_per_pod)
        self._lead_cache = cache_of(None)
        self.runs = Runs(model, self._lead_cache, hasher, tiers, max_partials=config.engine_hashes_per_pod)
        self._caches: dict[int | None, BlockCache] = {None: self._lead_cache}
        self._zero_is_a_hash = False
        self.is_paired = False  # whether the engine finds a block only in front of the same token
        self._full_reports = FullReports()
        self._uncertain = UncertainCopies()
        # Copies of this batch in groups other than the lead group that wait for their block.
        self._leaderless = 0

    @property
    def orphans(self) -> int:
        """Return the number of runs that wait for their parent and of copies that wait for their block."""
        return len(self._orphans)

    @property
    def groups(self) -> PodGroups | None:
        """Return the pod's KV cache groups, a new object after each change; None while one is usable."""
        return self._groups.rules

    def apply_event(self, event: KVEvent, later: LaterEvents, outcome: Outcome) -> None:
        match event:
            case BlockStored():
                self._store(event, later, outcome)
            case BlockRemoved():
                self._change_all(event, outcome)
            case AllBlocksCleared():
                self._empty()
                outcome.clear()

    def end_batch(self, outcome: Outcome) -> None:
        if self._leaderless and self._groups.lead is None:
            outcome.skip("BlockStored", "no_full_attention_group", self._leaderless)
        self._leaderless = 0

    @property
    def plain(self) -> PlainRuns | None:
        """Return the conditions under which runs need no state but the index; None if none do."""
        block_tokens = self.runs.block_tokens
        is_plain = not (self.runs.are_partial or self._uncertain or self._full_reports.in_episode)
        if block_tokens is None or not is_plain or self.is_paired:
            return None
        return PlainRuns(block_tokens, self._groups.lead, self._orphans.awaited)

    def clear(self) -> None:
        """Start a new epoch: delete the old one's groups and its blocks in the index."""
        self._empty()
        self._groups.restore(())
        self._caches = {None: self._lead_cache}
        self.runs.block_tokens = None
        self._zero_is_a_hash = False
        self.is_paired = False
        self._full_reports.reset()

    @property
    def unexportable(self) -> str | None:
        """Return why `parts` would not describe the whole view, or None if they would."""
        if len(self._orphans):
            return "orphans"
        if self._uncertain:
            return AMBIGUOUS_COPIES
        return "part_runs" if self.runs.are_partial or self.is_paired else None

    @property
    def invalid_reason(self) -> str | None:
        """Return why the view may differ from the engine's cache after all events, or None."""
        uncertain = self._uncertain
        has_inferred = uncertain.has_inferred and self._full_reports.in_episode
        return AMBIGUOUS_COPIES if uncertain.has_doubtful or has_inferred else None

    def facts(self) -> ViewFacts:
        return ViewFacts(
            run_tokens=self.runs.block_tokens,
            zero_is_a_hash=self._zero_is_a_hash,
            reannounces=self._full_reports.in_episode,
            groups=self._groups.facts(),
        )

    def parts(self) -> Iterator[ViewPart | None]:
        """List all blocks; None: a turn without any. The view must not change before the last part."""
        for group, cache in self._caches.items():
            for part in cache.export():
                yield None if part is None else ViewPart(group, part)

    def removals(self, tier: int) -> Iterator[Change]:
        """Yield the changes that would remove all present copies from a tier."""
        for part in filter(None, self.parts()):
            for start in range(0, len(names := copies_in(part.blocks, tier)), TURN_BLOCKS):
                yield Change(part.group, Kind.REMOVED, tier, names[start : start + TURN_BLOCKS].tobytes())

    def expire(self, change: Change) -> None:
        """Apply a change of `removals`; copies that are gone are ignored."""
        self._cache(change.group).apply_change(change)

    def restore_facts(self, facts: ViewFacts) -> None:
        self.clear()
        self._set_facts(facts)

    def _set_facts(self, facts: ViewFacts) -> None:
        self.runs.block_tokens = facts.run_tokens
        if facts.run_tokens is not None:
            self._lead_cache.add_split(max(1, facts.run_tokens // self._hasher.block_tokens))
        self._zero_is_a_hash = facts.zero_is_a_hash
        self._full_reports.reset(in_episode=facts.reannounces)
        self._groups.restore(facts.groups)

    def restore(self, part: ViewPart) -> None:
        """Add blocks that another view of this epoch exported. This view has stored nothing itself."""
        self._cache(part.group).restore(part.blocks)

    def apply_entry(self, entry: Entry) -> tuple[list[Keys], str | None]:
        """Apply changes that another router recorded of this epoch.

        Returns:
            Keys of the stored blocks, and why some changes could not be applied (None if all were).
        """
        if entry.facts is not None:
            self._set_facts(entry.facts)
        usable = {None, *(fact.group for fact in self._groups.facts() if fact.usable and not fact.leads)}
        stored: list[Keys] = []
        for change in entry.changes:
            if change.kind is Kind.CLEARED:
                # Clears all groups: only the lead group's clear is recorded, and the facts may lack groups.
                self._empty()
            elif change.group not in usable:
                return stored, "unknown_group"
            elif len(keys := self._cache(change.group).apply_change(change)) and change.group is None:
                stored.append(keys)
        return stored, None

    def _empty(self) -> None:
        self._orphans.clear()
        self._uncertain.clear()
        self.runs.clear()
        for cache in self._caches.values():
            cache.clear()

    def _store(self, event: BlockStored, later: LaterEvents, outcome: Outcome) -> None:
        if not event.block_hashes:
            # Groups that keep few blocks publish runs of which they keep none.
            return
        if not event.token_ids:
            # Offloading connectors report only hashes; the tokens came with the store in device memory.
            self._change_all(event, outcome)
            return
        rule = self._groups.rule_of_store(event)
        if not rule.usable:
            outcome.skip("BlockStored", "unsupported_cache_kind")
        elif event.lora_id and not event.lora_name:
            outcome.skip("BlockStored", "lora_without_name")
        elif not rule.leads:
            self._store_in_group(event, rule.group, later, outcome)
        elif reason := self._unusable(event):
            outcome.skip("BlockStored", reason)
        else:
            self._store_lead_run(event, later, outcome)

    def _store_lead_run(self, event: BlockStored, later: LaterEvents, outcome: Outcome) -> None:
        is_repeat = self._full_reports.repeats_lead_run(event, later, self._lead_holds)
        tier = self._tiers.of_medium(event.medium)
        if is_repeat is not False:
            self._uncertain.confirm(event.block_hashes, tier)
        if is_repeat:
            return
        self._store_run(event, outcome)
        if is_repeat is None:
            if self._uncertain.add(event.block_hashes, tier):
                self._remove_copies(event.block_hashes, tier)
            else:
                outcome.skip("BlockStored", AMBIGUOUS_COPIES)

    def _remove_copies(self, hashes: Sequence[EngineHash], tier: str) -> None:
        for engine_hash in hashes:
            self.runs.drop(engine_hash, tier)

    def _unusable(self, run: BlockStored) -> str | None:
        if not run.block_size or not self.runs.fits(run.block_size):
            return "block_size"
        self.runs.block_tokens = run.block_size
        if len(run.token_ids) != len(run.block_hashes) * run.block_size:
            return "token_span"
        return None

    def _store_run(self, event: BlockStored, outcome: Outcome) -> None:
        ready: list[tuple[BlockStored | None, Sequence[CopyChange]]] = [(event, ())]
        brought: Counter[tuple[int | None, EngineHash]] = Counter()  # copies by the orphans
        while ready:
            run, later = ready.pop()
            if run is not None and not self._index_run(run, outcome):
                continue
            hashes = () if run is None else run.block_hashes
            if run is not event:
                brought.update((None, engine_hash) for engine_hash in hashes)
            for change in later:
                block = change.group, change.engine_hash
                brought[block] += 1 if change.stored else -1
                if brought[block] < 0:
                    # Of a copy from before the stream was joined.
                    brought[block] = 0
                    outcome.skip("BlockRemoved", "unknown_hash")
                else:
                    self._change(change, outcome)
            for engine_hash in hashes:
                # In order of arrival: removals are attached to the last of several stores of a block.
                orphans = reversed(self._orphans.pop(engine_hash))
                ready.extend((orphan.run, orphan.later) for orphan in orphans)

    def _index_run(self, run: BlockStored, outcome: Outcome) -> bool:
        """Store a run or add it to the orphans; return whether it was stored."""
        parent_hash = run.parent_block_hash
        starts_prompt = self._starts_prompt(parent_hash)
        if parent_hash is not None and not starts_prompt and not self.runs.knows(parent_hash):
            outcome.skip("BlockStored", "orphan_dropped", self._orphans.add(Orphan(parent_hash, run)))
            return False
        tier = self._tiers.of_medium(run.medium)
        try:
            self.runs.store(run, tier, outcome, starts_prompt=starts_prompt)
        except TokenError:
            outcome.skip("BlockStored", "extra_keys")
            return False
        if run.next_tokens:
            self._store_next_tokens(run, tier)
        if self._uncertain:
            if parent_hash is not None:
                # A request that continues a block has that block.
                self._uncertain.confirm((parent_hash,), tier)
            self._remove_copies(self._uncertain.on_stored(run.block_hashes, tier), tier)
        self._zero_is_a_hash |= 0 in run.block_hashes
        return True

    def _store_next_tokens(self, run: BlockStored, tier: str) -> None:
        """Store, per index block that ends with an engine block, the token that must follow it."""
        self.is_paired = True
        keys = {
            engine_hash: self._hasher.next_key(tail_key, next_token)
            for engine_hash, next_token in zip(run.block_hashes, run.next_tokens or (), strict=False)
            if (tail_key := self.runs.tail_key(engine_hash)) is not None
        }
        if keys:
            self._cache(NEXT_TOKENS).store([*keys], np.array([*keys.values()], np.uint64), tier)

    def _starts_prompt(self, parent_hash: EngineHash | None) -> bool:
        # llm-d's simulator writes 0 for "no parent". A real hash is 0 once in 2**64 blocks; an engine that
        # numbers its blocks from 0 stores block 0 before it refers to it as a parent.
        return parent_hash is None or (parent_hash == 0 and not self._zero_is_a_hash)

    def _store_in_group(self, event: BlockStored, group: int, later: LaterEvents, outcome: Outcome) -> None:
        """Store blocks of a group other than the lead group, by hashes, because positions are unknown."""
        is_repeat = self._full_reports.repeats_group_run(event, later, self._lead_holds)
        if is_repeat is None:
            outcome.skip("BlockStored", AMBIGUOUS_COPIES)
        if is_repeat is not False:
            return
        tier = self._tiers.of_medium(event.medium)
        keys = {engine_hash: self.runs.tail_key(engine_hash) for engine_hash in event.block_hashes}
        known = [engine_hash for engine_hash in event.block_hashes if keys[engine_hash] is not None]
        if known:
            tail_keys = np.array([keys[engine_hash] for engine_hash in known], np.uint64)
            outcome.skip("BlockStored", "hash_reused", self._cache(group).store(known, tail_keys, tier))
        for engine_hash in event.block_hashes:
            if keys[engine_hash] is None:
                change = CopyChange(group, engine_hash, tier, stored=True)
                dropped = self._orphans.add_change(change)
                if dropped is None:
                    dropped = self._orphans.add(Orphan(engine_hash, None, [change]))
                outcome.skip("BlockStored", "orphan_dropped", dropped)
                self._leaderless += 1

    def _lead_holds(self, run: BlockStored) -> bool:
        return (
            self._starts_prompt(run.parent_block_hash)
            and self.runs.fits(run.block_size)
            and len(run.token_ids) == len(run.block_hashes) * run.block_size
            and self.runs.holds(run, self._tiers.of_medium(run.medium))
        )

    def _change_all(self, event: BlockStored | BlockRemoved, outcome: Outcome) -> None:
        """Add or remove one copy of each block of an event that carries only hashes."""
        stored, tag = isinstance(event, BlockStored), type(event).__name__
        rule = self._groups.rule_of(event.group_idx)
        if rule is None:
            outcome.skip(tag, "unknown_hash" if stored else "unknown_group")
            return
        if not rule.usable:
            outcome.skip(tag, "unsupported_cache_kind")
            return
        group = None if rule.leads else rule.group
        tier = self._tiers.of_medium(event.medium)
        for engine_hash in event.block_hashes:
            self._change(CopyChange(group, engine_hash, tier, stored), outcome)

    def _change(self, change: CopyChange, outcome: Outcome) -> None:
        if change.stored:
            if self._add_copy(change, outcome):
                return
        elif dropped := self._drop_copy(change):
            outcome.removals[dropped] += 1
            return
        lost = self._orphans.add_change(change)
        if lost is None:
            outcome.skip("BlockStored" if change.stored else "BlockRemoved", "unknown_hash")
        else:
            outcome.skip("BlockStored", "orphan_dropped", lost)

    def _add_copy(self, change: CopyChange, outcome: Outcome) -> bool:
        if change.group is None:
            if self.is_paired:
                self._cache(NEXT_TOKENS).copy(change.engine_hash, change.tier)
            return self.runs.copy(change.engine_hash, change.tier)
        cache = self._cache(change.group)
        if cache.copy(change.engine_hash, change.tier):
            return True
        if (key := self.runs.tail_key(change.engine_hash)) is None:
            return False
        reused = cache.store([change.engine_hash], np.array([key], np.uint64), change.tier)
        outcome.skip("BlockStored", "hash_reused", reused)
        return True

    def _drop_copy(self, change: CopyChange) -> Dropped | None:
        engine_hash, tier = change.engine_hash, change.tier
        if change.group is None:
            if self.is_paired:
                self._cache(NEXT_TOKENS).drop(engine_hash, tier)
            dropped = self.runs.drop(engine_hash, tier)
            if dropped is Dropped.LAST and self._uncertain:
                if self._uncertain.replace_last(engine_hash, tier):
                    return Dropped.COPY if self.runs.copy(engine_hash, tier) else dropped
                self._remove_copies(self._uncertain.on_evicted(engine_hash, tier), tier)
            return dropped
        return self._cache(change.group).drop(change.engine_hash, change.tier)

    def _cache(self, group: int | None) -> BlockCache:
        if group not in self._caches:
            self._caches[group] = self._cache_of(group)
        return self._caches[group]
