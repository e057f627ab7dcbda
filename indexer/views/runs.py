"""Runs of engine blocks with tokens: keys of those whose parent is known, and a buffer of the others.

Input: stores of the lead group whose parents are known. Engine blocks are as long as index blocks, a multiple
of them, or shorter. A shorter one either ends an index block or is a partial block: it lies at the beginning
or in the middle of an index block, is kept here, and adds its tokens to the blocks that follow it. The cache
identifies an index block by its last part, and holds it as long as that part: engines free the end of a chain
first (vLLM's free block queue, SGLang's leaves). If an engine freed a partial block but kept the last part,
the index would hold one block too many until the last part is freed.

`Orphans` buffers, up to a limit, runs whose parent is not known yet and copies in KV cache groups without
positions whose block is not known yet. It identifies blocks by the engine's hashes and knows no keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from indexer.errors import TokenError
from indexer.keys import BlockHasher, Keys, RunExtras, pack, read_extras, token_words
from indexer.views.block_cache import BlockCache, Dropped
from indexer.views.view_parts import Outcome, StoredRun
from indexer.wire.events import BlockStored, EngineHash
from indexer.wire.tiers import Tiers

PARTIAL_BLOCKS_MAX = 131_072
"""Maximum of partial blocks per pod; each takes about 1 KB."""
_EXTRAS_BYTES_MAX = 4096
# The least that a hash or a later change counts against the bound, in tokens: about the memory that it takes.
_HASH_TOKENS = 16


class PlainRuns(msgspec.Struct, frozen=True):
    """Conditions of plain runs, apart from a known parent: they need no state but the index."""

    block_tokens: int  # tokens of an engine block
    group: int | None  # the lead group; None where the engine names none
    awaited: Collection[EngineHash]  # hashes that orphans wait for; a plain run stores none of them


class _PartialBlock(msgspec.Struct):
    """Engine block that ends within an index block."""

    parent_key: int  # key of the previous index block, or the prompt's root
    words: bytes = b""  # uint32 tokens of the index block up to the end of this engine block
    extras: bytes = b""  # packed extra keys of the index block up to there
    # Physical copies by tier, without zeros. Kept when empty, because a child may still refer to the block.
    copies: dict[str, int] = {}

    def is_of(self, other: _PartialBlock) -> bool:
        return (self.parent_key, self.words, self.extras) == (other.parent_key, other.words, other.extras)


class _ParsedRun(msgspec.Struct):
    """Blocks of a run: partial blocks by hash, and hashes of blocks that end index blocks, with keys."""

    parent: int | None  # parent key of the run; None if it may begin within an index block
    partials: dict[EngineHash, _PartialBlock]
    hashes: Sequence[EngineHash]
    keys: Keys


class Runs:
    """Blocks of one pod epoch's lead group by engine hash, with at most `PARTIAL_BLOCKS_MAX` partial ones."""

    def __init__(
        self, model: str, cache: BlockCache, hasher: BlockHasher, tiers: Tiers, *, max_partials: int
    ) -> None:
        self._model = model
        self._cache = cache
        self._hasher = hasher
        self._tiers = tiers
        self._max_partials = min(max_partials, PARTIAL_BLOCKS_MAX)
        self._partials: OrderedDict[EngineHash, _PartialBlock] = OrderedDict()
        # Tokens per engine block of the last run; None before the first run.
        self.block_tokens: int | None = None

    @property
    def are_partial(self) -> bool:
        return self.block_tokens is not None and self.block_tokens < self._hasher.block_tokens

    def fits(self, block_size: int) -> bool:
        """Return whether runs of this block size can be stored; the epoch's first run decides."""
        if self.are_partial:
            return block_size == self.block_tokens
        block_tokens = self._hasher.block_tokens
        if block_size % block_tokens == 0:
            return True
        return self.block_tokens is None and block_tokens % block_size == 0

    def knows(self, engine_hash: EngineHash) -> bool:
        return engine_hash in self._partials or self._cache.tail_key(engine_hash) is not None

    def holds(self, run: BlockStored, tier: str) -> bool:
        """Return whether all blocks of a run that begins a prompt are held in this tier.

        Raises:
            TokenError: Its tokens or its extras cannot be parsed.
        """
        parsed = self._parse(run, starts_prompt=True)
        for engine_hash, partial in parsed.partials.items():
            known = self._partials.get(engine_hash)
            if known is None or tier not in known.copies or not known.is_of(partial):
                return False
        return not parsed.hashes or self._cache.holds_all(parsed.hashes, parsed.keys, tier)

    def store(self, run: BlockStored, tier: str, outcome: Outcome, *, starts_prompt: bool) -> None:
        """Add one copy of each block of a run, whose parent is known unless it starts a prompt.

        Raises:
            TokenError: Its tokens or its extras cannot be parsed.
        """
        parsed = self._parse(run, starts_prompt=starts_prompt)
        reused = sum(self._keep(each, partial, tier) for each, partial in parsed.partials.items())
        if parsed.hashes:
            if self._partials:
                reused += sum(self._partials.pop(each, None) is not None for each in parsed.hashes)
            reused += self._cache.store(parsed.hashes, parsed.keys, tier)
        outcome.skip("BlockStored", "hash_reused", reused)
        while len(self._partials) > self._max_partials:
            outcome.skip("BlockStored", "too_many_hashes", bool(self._partials.popitem(last=False)[1].copies))
        outcome.stored.append(parsed.keys)
        if outcome.runs is not None and parsed.parent is not None and len(parsed.keys):
            tokens = np.array(run.token_ids[: self._hasher.block_tokens], np.uint32)
            outcome.runs.append(StoredRun(parsed.parent, parsed.keys, tokens))

    def copy(self, engine_hash: EngineHash, tier: str) -> bool:
        """Add one copy of a block that was stored before; return False if it is unknown."""
        if (partial := self._partials.get(engine_hash)) is None:
            return self._cache.copy(engine_hash, tier)
        self._keep(engine_hash, partial, tier)
        return True

    def drop(self, engine_hash: EngineHash, tier: str) -> Dropped | None:
        """Remove one copy of a block; return None if the pod holds none in this tier."""
        if (partial := self._partials.get(engine_hash)) is None:
            return self._cache.drop(engine_hash, tier)
        if tier not in partial.copies:
            return None
        partial.copies[tier] -= 1
        if partial.copies[tier]:
            return Dropped.COPY
        del partial.copies[tier]
        if not partial.copies:
            # Moved to the front, where it is dropped first.
            self._partials.move_to_end(engine_hash, last=False)
        return Dropped.LAST

    def tail_key(self, engine_hash: EngineHash) -> int | None:
        """Return the key of the index block that ends with this engine block, or None."""
        return None if engine_hash in self._partials else self._cache.tail_key(engine_hash)

    def clear(self) -> None:
        """Forget the partial blocks; the cache is cleared by its owner."""
        self._partials.clear()

    def _keep(self, engine_hash: EngineHash, partial: _PartialBlock, tier: str) -> bool:
        known = self._partials.pop(engine_hash, None)
        if known is None:
            reused = self._cache.tail_key(engine_hash) is not None and self._forget_end(engine_hash)
        else:
            reused = not known.is_of(partial)
        kept = partial if known is None or reused else known
        kept.copies[tier] = kept.copies.get(tier, 0) + 1
        self._partials[engine_hash] = kept
        return reused

    def _forget_end(self, engine_hash: EngineHash) -> bool:
        dropped = False
        for tier in self._tiers.names:
            while self._cache.drop(engine_hash, tier) is not None:
                dropped = True
        return dropped

    def _parse(self, run: BlockStored, *, starts_prompt: bool) -> _ParsedRun:
        extras = read_extras(run, starts_prompt=starts_prompt)
        if starts_prompt:
            before = _PartialBlock(self._hasher.root(self._model, run.lora_name or None, extras.cache_salt))
        else:
            before = self._parent(run.parent_block_hash)
        block_tokens = self._hasher.block_tokens
        if run.block_size < block_tokens:
            return self._parse_partials(run, extras, before)
        blocks: Sequence[bytes] = ()
        if extras.entries:
            blocks = extras.of_index_blocks(run.block_size // block_tokens, block_tokens)
        keys = self._hasher.chain(before.parent_key, run.token_ids, blocks)
        return _ParsedRun(before.parent_key, {}, run.block_hashes, keys)

    def _parent(self, parent_hash: EngineHash | None) -> _PartialBlock:
        if parent_hash is not None:
            if (partial := self._partials.get(parent_hash)) is not None:
                return partial
            if (key := self._cache.tail_key(parent_hash)) is not None:
                return _PartialBlock(key)
        raise ValueError(f"parent {parent_hash!r} is not known")

    def _parse_partials(self, run: BlockStored, extras: RunExtras, before: _PartialBlock) -> _ParsedRun:
        size, block_tokens = run.block_size, self._hasher.block_tokens
        tokens = token_words(run.token_ids)
        partials: dict[EngineHash, _PartialBlock] = {}
        ends: dict[EngineHash, int] = {}
        for number, engine_hash in enumerate(run.block_hashes):
            entry: Sequence[Any] = extras.entries[number] if extras.entries else ()
            words = before.words + tokens[number * size : (number + 1) * size].tobytes()
            packed = before.extras + pack(entry, len(before.words) // tokens.itemsize, block_tokens)
            if len(packed) > _EXTRAS_BYTES_MAX:
                raise TokenError(f"the extra keys of a block take more than {_EXTRAS_BYTES_MAX} bytes")
            if len(words) >= block_tokens * tokens.itemsize:
                key = self._hasher.chain(before.parent_key, np.frombuffer(words, np.uint32), [packed])[0]
                ends[engine_hash] = int(key)
                before = _PartialBlock(int(key))
            else:
                before = partials[engine_hash] = _PartialBlock(before.parent_key, words, packed)
        keys = np.array(list(ends.values()), np.uint64)
        return _ParsedRun(None, partials, list(ends), keys)


@dataclass(frozen=True, slots=True)
class CopyChange:
    """Addition or removal of one copy of a block in a tier."""

    group: int | None  # the KV cache group that holds it; None for the lead group
    engine_hash: EngineHash
    tier: str
    stored: bool  # True: added; False: removed


@dataclass(slots=True, eq=False)
class Orphan:
    """Run that waits for its parent, or changes that wait for a block."""

    awaited: EngineHash  # block of the lead group that must be stored first
    run: BlockStored | None
    later: list[CopyChange] = field(default_factory=list)  # changes to apply after the run, in this order
    run_tokens: int = 0  # cost of the run in tokens

    def __post_init__(self) -> None:
        run = self.run
        if run is not None:
            blocks = max(len(run.token_ids), _HASH_TOKENS * len(run.block_hashes))
            # Names and extra keys may be as long as a message; each byte counts as a token.
            texts = len(run.lora_name or "") + len(run.cache_salt or "") + len(run.medium or "")
            self.run_tokens = blocks + texts + (len(msgspec.msgpack.encode(run.extra_keys)) - 1)

    @property
    def cost_tokens(self) -> int:
        return self.run_tokens + _HASH_TOKENS * len(self.later)


class Orphans:
    """Orphans by the engine hash that they wait for, in order of arrival."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens  # above it the oldest orphans are dropped
        self._tokens = 0
        self._waiting: OrderedDict[Orphan, None] = OrderedDict()
        self._by_awaited: dict[EngineHash, dict[Orphan, None]] = {}
        # Last orphan that stores a block, by group and hash.
        self._by_block: dict[tuple[int | None, EngineHash], Orphan] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def awaited(self) -> Collection[EngineHash]:
        return self._by_awaited.keys()

    def add(self, orphan: Orphan) -> int:
        """Add an orphan; return how many old ones were dropped to make room."""
        self._waiting[orphan] = None
        self._tokens += orphan.cost_tokens
        self._by_awaited.setdefault(orphan.awaited, {})[orphan] = None
        self._by_block.update(dict.fromkeys(_blocks(orphan), orphan))
        return self._make_room()

    def add_change(self, change: CopyChange) -> int | None:
        """Add a change of a waiting block, to be applied after the block is stored.

        Returns:
            How many orphans were dropped to make room; None if no orphan stores the block.
        """
        orphan = self._by_block.get((change.group, change.engine_hash))
        if orphan is None:
            orphan = self._by_block.get((None, change.engine_hash))
        if orphan is None:
            return None
        self._tokens -= orphan.cost_tokens
        orphan.later.append(change)
        self._tokens += orphan.cost_tokens
        return self._make_room()

    def pop(self, engine_hash: EngineHash) -> tuple[Orphan, ...]:
        """Remove and return the orphans that wait for this block, in order of arrival."""
        orphans = tuple(self._by_awaited.get(engine_hash, ()))
        for orphan in orphans:
            self._drop(orphan)
        return orphans

    def clear(self) -> None:
        self._waiting.clear()
        self._by_awaited.clear()
        self._by_block.clear()
        self._tokens = 0

    def _make_room(self) -> int:
        dropped = 0
        while self._tokens > self._max_tokens:
            self._drop(next(iter(self._waiting)))
            dropped += 1
        return dropped

    def _drop(self, orphan: Orphan) -> None:
        del self._waiting[orphan]
        self._tokens -= orphan.cost_tokens
        siblings = self._by_awaited[orphan.awaited]
        del siblings[orphan]
        if not siblings:
            del self._by_awaited[orphan.awaited]
        for block in _blocks(orphan):
            if self._by_block.get(block) is orphan:
                del self._by_block[block]


def _blocks(orphan: Orphan) -> list[tuple[int | None, EngineHash]]:
    if orphan.run is not None:
        return [(None, engine_hash) for engine_hash in orphan.run.block_hashes]
    first = orphan.later[0]
    return [(first.group, first.engine_hash)]
