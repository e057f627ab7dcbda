"""Events of one pod life to index operations.

Typed events come in, additions to and removals from the index go out, and a count of what could not be used.
Knows neither sockets nor sequences: events must come in order and belong to one life (see `stream`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from indexer.config import IndexerConfig
from indexer.engine_blocks import EngineBlock, EngineBlocks
from indexer.errors import TokenError
from indexer.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from indexer.extras import read_extras
from indexer.index import Index
from indexer.keys import BlockHasher
from indexer.orphans import CopyChange, Orphans
from indexer.tiers import tier_of

# Kinds of groups whose blocks are all needed, from the first to the last. None: an engine that tells no kind.
_FULL_ATTENTION = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
_MAX_GROUPS = 64


@dataclass(slots=True)
class Applied:
    """What applying one batch did.

    Attributes:
        stored: Keys of the blocks that were announced with their tokens, parents first.
        removals: Hashes removed whose "last" copy of a tier went, and those of which another "copy" stays.
        skipped: Events or hashes that could not be used, by (event type, reason).
        cleared: Whether the engine told that its cache is empty.
    """

    stored: list[int] = field(default_factory=list)
    removals: Counter[str] = field(default_factory=Counter)
    skipped: Counter[tuple[str, str]] = field(default_factory=Counter)
    cleared: bool = False


class PodView:
    """The index's view of one pod, kept up by its events.

    Args:
        pod: The pod's identity.
        model: The base model's name, root of all keys.
        index: Where the pod's blocks go.
        hasher: Makes their keys.
        config: The bounds of what is remembered.
    """

    def __init__(
        self, pod: str, model: str, *, index: Index, hasher: BlockHasher, config: IndexerConfig
    ) -> None:
        self._pod = pod
        self._model = model
        self._index = index
        self._hasher = hasher
        self._blocks = EngineBlocks(config.engine_hashes_per_pod, config.released_hashes_per_pod)
        self._orphans = Orphans(config.orphan_tokens_per_pod)
        # Of each KV cache group seen: whether it is the one that is indexed.
        self._groups: dict[int, bool] = {}
        self._zero_is_a_hash = False

    @property
    def orphans(self) -> int:
        """Stores that wait for their parent."""
        return len(self._orphans)

    def apply(self, batch: EventBatch) -> Applied:
        """Applies a batch's events in order."""
        applied = Applied()
        for event in batch.events:
            match event:
                case BlockStored():
                    self._store(event, applied)
                case BlockRemoved():
                    self._remove(event, applied)
                case AllBlocksCleared():
                    self._empty()
                    applied.cleared = True
        return applied

    def clear(self) -> None:
        """Begins a new life: forgets the old one, its groups and its blocks in the index."""
        self._empty()
        self._groups.clear()
        self._zero_is_a_hash = False

    def _empty(self) -> None:
        self._blocks.clear()
        self._orphans.clear()
        self._index.clear_pod(self._pod)

    def _store(self, event: BlockStored, applied: Applied) -> None:
        if not event.block_hashes:
            # Sliding-window groups announce runs of which they keep no block.
            return
        if not self._is_indexed(event.group_idx, event.kv_cache_spec_kind):
            applied.skipped["BlockStored", "unsupported_cache_kind"] += 1
        elif not event.token_ids:
            # Offloading connectors name only the hash; its tokens came with the store in device memory.
            for engine_hash in event.block_hashes:
                self._change(CopyChange(engine_hash, tier_of(event.medium), stored=True), applied)
        elif reason := self._unusable(event):
            applied.skipped["BlockStored", reason] += 1
        else:
            self._store_run(event, applied)

    def _is_indexed(self, group: int | None, kind: str | None) -> bool:
        """Whether blocks of this KV cache group count: those of the pod's first full-attention group do."""
        if group is None:
            return kind in _FULL_ATTENTION
        if group not in self._groups and len(self._groups) < _MAX_GROUPS:
            self._groups[group] = kind in _FULL_ATTENTION and not any(self._groups.values())
        return self._groups.get(group, False)

    def _unusable(self, run: BlockStored) -> str | None:
        """Why a run cannot be given keys; None if it can."""
        if run.lora_id and not run.lora_name:
            return "lora_without_name"
        if not run.block_size or run.block_size % self._hasher.block_tokens:
            # Also engine blocks that are smaller than ours: several of them would make one of our blocks.
            return "block_size"
        if len(run.token_ids) != len(run.block_hashes) * run.block_size:
            return "token_span"
        return None

    def _store_run(self, event: BlockStored, applied: Applied) -> None:
        """Stores a run whose tokens are told, and all runs that waited for it."""
        ready: list[tuple[BlockStored, Sequence[CopyChange]]] = [(event, ())]
        while ready:
            run, later = ready.pop()
            starts_prompt = self._starts_prompt(run.parent_block_hash)
            parent = None if run.parent_block_hash is None else self._blocks.get(run.parent_block_hash)
            if not starts_prompt and parent is None:
                if dropped := self._orphans.hold(run):
                    applied.skipped["BlockStored", "orphan_dropped"] += dropped
                continue
            try:
                self._index_run(run, parent, applied)
            except TokenError:
                applied.skipped["BlockStored", "extra_keys"] += 1
                continue
            for change in later:
                self._change(change, applied)
            for engine_hash in run.block_hashes:
                ready.extend((orphan.event, orphan.later) for orphan in self._orphans.take(engine_hash))

    def _starts_prompt(self, parent_hash: int | bytes | None) -> bool:
        # llm-d's simulator writes 0 for "no parent". A real hash is 0 once in 2**64 blocks; an engine that
        # numbers its blocks from 0 has told of block 0 before it names it as a parent.
        return parent_hash is None or (parent_hash == 0 and not self._zero_is_a_hash)

    def _index_run(self, run: BlockStored, parent: EngineBlock | None, applied: Applied) -> None:
        extras = read_extras(run, self._hasher.block_tokens, starts_prompt=parent is None)
        if parent is None:
            parent_key = self._hasher.root(self._model, run.lora_name or None, extras.cache_salt)
        else:
            parent_key = parent.keys[-1]
        keys = self._hasher.chain(parent_key, run.token_ids, extras.blocks)
        tier = tier_of(run.medium)
        # Each announcement is one more physical copy. What vLLM announces again with
        # kv_cache_report_mode=full is none, but looks the same.
        self._index.add(self._pod, tier, keys)
        applied.stored.extend(keys)
        split = run.block_size // self._hasher.block_tokens
        for position, engine_hash in enumerate(run.block_hashes):
            self._register(engine_hash, tuple(keys[position * split : (position + 1) * split]), tier, applied)

    def _register(self, engine_hash: int | bytes, keys: tuple[int, ...], tier: str, applied: Applied) -> None:
        """Counts a copy that the index holds already."""
        self._zero_is_a_hash |= engine_hash == 0
        block = self._blocks.get(engine_hash)
        if block is not None and block.keys != keys:
            applied.skipped["BlockStored", "hash_reused"] += 1
            self._give_up(self._blocks.discard(engine_hash))
            block = None
        self._add_copy(engine_hash, block or EngineBlock(keys), tier, applied)

    def _add_copy(self, engine_hash: int | bytes, block: EngineBlock, tier: str, applied: Applied) -> None:
        given_up = self._blocks.add_copy(engine_hash, block, tier)
        if given_up is not None:
            applied.skipped["BlockStored", "too_many_hashes"] += 1
            self._give_up(given_up)

    def _give_up(self, block: EngineBlock | None) -> None:
        """Takes a block out of the index whose removal we could not follow any more."""
        if block is not None:
            for tier, copies in block.copies.items():
                self._index.remove(self._pod, tier, block.keys * copies)

    def _remove(self, event: BlockRemoved, applied: Applied) -> None:
        if event.group_idx is not None and not self._groups.get(event.group_idx, False):
            known = event.group_idx in self._groups
            applied.skipped["BlockRemoved", "unsupported_cache_kind" if known else "unknown_group"] += 1
            return
        tier = tier_of(event.medium)
        for engine_hash in event.block_hashes:
            self._change(CopyChange(engine_hash, tier, stored=False), applied)

    def _change(self, change: CopyChange, applied: Applied) -> None:
        """One copy more, or one less, of a block whose tokens were told before."""
        if change.stored:
            block = self._blocks.get(change.engine_hash)
            if block is not None:
                self._index.add(self._pod, change.tier, block.keys)
                self._add_copy(change.engine_hash, block, change.tier, applied)
                return
        else:
            block = self._blocks.drop_copy(change.engine_hash, change.tier)
            if block is not None:
                self._index.remove(self._pod, change.tier, block.keys)
                applied.removals["last" if change.tier not in block.copies else "copy"] += 1
                return
        dropped = self._orphans.follow_up(change)
        if dropped is None:
            applied.skipped["BlockStored" if change.stored else "BlockRemoved", "unknown_hash"] += 1
        elif dropped:
            applied.skipped["BlockStored", "orphan_dropped"] += dropped
