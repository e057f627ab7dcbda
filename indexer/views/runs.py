"""Runs of engine blocks that come with their tokens: stored runs, and runs that wait for their parent.

`Runs` turns the stores of the lead group into blocks of the index. Engine blocks are as long as index blocks,
a multiple of them, or shorter. A shorter one ends an index block or is a head: it lies in the beginning of
an index block, and its tokens count to the block that follows it. An index block is known to the cache by
its last part, and held while that part is: engines free the tail of a chain first (vLLM's queue of free
blocks and SGLang's leaves). An engine that freed a head and kept the tail would have a block too many in the
index until the tail goes, too.

`Orphans` keeps, within a bound, the runs whose parent block is not known yet, and copies in KV cache groups
without positions whose block is not known yet. It names blocks by engine hash and knows no keys.
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
from indexer.tiers import Tiers
from indexer.views.block_cache import Dropped, FlatCache
from indexer.views.view_parts import Outcome, StoredRun
from indexer.wire.events import BlockStored, EngineHash

HEADS_MAX = 131_072
"""Most heads of index blocks that one pod may have; each takes about 1 KB."""
_EXTRAS_BYTES_MAX = 4096
_NO_KEYS = np.empty(0, np.uint64)
# The least that a hash or a later change counts against the bound, in tokens: about the memory that it takes.
_HASH_TOKENS = 16


class PlainRuns(msgspec.Struct, frozen=True):
    """Runs that are what they seem, if their parent is known and nothing waits for a hash of theirs."""

    block_tokens: int  # tokens of an engine block
    group: int | None  # the lead group; None where the engine names none
    awaited: Collection[EngineHash]  # hashes that something waits for


class _Head(msgspec.Struct):
    """An engine block that ends within an index block."""

    parent_key: int  # key of the index block in front, or the prompt's root
    words: bytes = b""  # uint32 tokens of the index block up to the end of this part
    extras: bytes = b""  # what the index block depends on besides tokens, up to there
    # Physical copies by tier, none of them 0; empty: a child may still refer to it.
    copies: dict[str, int] = {}

    def is_of(self, other: _Head) -> bool:
        return (self.parent_key, self.words, self.extras) == (other.parent_key, other.words, other.extras)


class _Read(msgspec.Struct):
    """A run's blocks: heads by their hashes, and the hashes that end index blocks, whose keys follow."""

    parent: int | None  # key in front of them; None where the run may begin within an index block
    heads: dict[EngineHash, _Head]
    hashes: Sequence[EngineHash]
    keys: Keys


class Runs:
    """Blocks of one pod life's lead group, by the engine's hashes; of heads at most `HEADS_MAX`."""

    def __init__(
        self, model: str, cache: FlatCache, hasher: BlockHasher, tiers: Tiers, *, max_heads: int
    ) -> None:
        self._model = model
        self._cache = cache
        self._hasher = hasher
        self._tiers = tiers
        self._max_heads = min(max_heads, HEADS_MAX)
        self._heads: OrderedDict[EngineHash, _Head] = OrderedDict()
        # Tokens of an engine block of the last run; None while there was none.
        self.block_tokens: int | None = None

    @property
    def are_short(self) -> bool:
        return self.block_tokens is not None and self.block_tokens < self._hasher.block_tokens

    def fits(self, block_size: int) -> bool:
        """Whether runs of this block size can be stored; a life's first one tells what they are."""
        if self.are_short:
            return block_size == self.block_tokens
        block_tokens = self._hasher.block_tokens
        if block_size % block_tokens == 0:
            return True
        return self.block_tokens is None and block_tokens % block_size == 0

    def knows(self, engine_hash: EngineHash) -> bool:
        return engine_hash in self._heads or self._cache.tail_key(engine_hash) is not None

    def holds(self, run: BlockStored, tier: str) -> bool:
        """Whether a run that begins a prompt is held in this tier, all of it.

        Raises:
            TokenError: Its tokens or its extras cannot be read.
        """
        read = self._read(run, starts_prompt=True)
        for engine_hash, head in read.heads.items():
            known = self._heads.get(engine_hash)
            if known is None or tier not in known.copies or not known.is_of(head):
                return False
        return not read.hashes or self._cache.holds_all(read.hashes, read.keys, tier)

    def store(self, run: BlockStored, tier: str, outcome: Outcome, *, starts_prompt: bool) -> None:
        """Counts one copy of each block of a run; its parent is known, unless it starts a prompt.

        Raises:
            TokenError: Its tokens or its extras cannot be read.
        """
        read = self._read(run, starts_prompt=starts_prompt)
        reused = sum(self._keep(engine_hash, head, tier) for engine_hash, head in read.heads.items())
        if read.hashes:
            if self._heads:
                reused += sum(self._heads.pop(each, None) is not None for each in read.hashes)
            reused += self._cache.store(read.hashes, read.keys, tier)
        outcome.skip("BlockStored", "hash_reused", reused)
        while len(self._heads) > self._max_heads:
            outcome.skip("BlockStored", "too_many_hashes", bool(self._heads.popitem(last=False)[1].copies))
        outcome.stored.append(read.keys)
        if outcome.runs is not None and read.parent is not None and len(read.keys):
            tokens = np.array(run.token_ids[: self._hasher.block_tokens], np.uint32)
            outcome.runs.append(StoredRun(read.parent, read.keys, tokens))

    def copy(self, engine_hash: EngineHash, tier: str) -> bool:
        """Counts one copy more of a block that was stored before; False if it is not known (any more)."""
        if (head := self._heads.get(engine_hash)) is None:
            return self._cache.copy(engine_hash, tier)
        self._keep(engine_hash, head, tier)
        return True

    def drop(self, engine_hash: EngineHash, tier: str) -> Dropped | None:
        """Counts one copy less of a block; None if none is held in this tier."""
        if (head := self._heads.get(engine_hash)) is None:
            return self._cache.drop(engine_hash, tier)
        if tier not in head.copies:
            return None
        head.copies[tier] -= 1
        if head.copies[tier]:
            return Dropped.COPY
        del head.copies[tier]
        if not head.copies:
            # It is the first to go when there is no more room.
            self._heads.move_to_end(engine_hash, last=False)
        return Dropped.LAST

    def tail_key(self, engine_hash: EngineHash) -> int | None:
        """Key of the index block that ends with this block; None if none does, or it is not known."""
        return None if engine_hash in self._heads else self._cache.tail_key(engine_hash)

    def clear(self) -> None:
        self._heads.clear()
        self._cache.clear()

    def _keep(self, engine_hash: EngineHash, head: _Head, tier: str) -> bool:
        known = self._heads.pop(engine_hash, None)
        if known is None:
            reused = self._cache.tail_key(engine_hash) is not None and self._forget_end(engine_hash)
        else:
            reused = not known.is_of(head)
        kept = head if known is None or reused else known
        kept.copies[tier] = kept.copies.get(tier, 0) + 1
        self._heads[engine_hash] = kept
        return reused

    def _forget_end(self, engine_hash: EngineHash) -> bool:
        dropped = False
        for tier in self._tiers.names:
            while self._cache.drop(engine_hash, tier) is not None:
                dropped = True
        return dropped

    def _read(self, run: BlockStored, *, starts_prompt: bool) -> _Read:
        extras = read_extras(run, starts_prompt=starts_prompt)
        if starts_prompt:
            before = _Head(self._hasher.root(self._model, run.lora_name or None, extras.cache_salt))
        else:
            before = self._parent(run.parent_block_hash)
        block_tokens = self._hasher.block_tokens
        if run.block_size < block_tokens:
            return self._read_short(run, extras, before)
        blocks: Sequence[bytes] = ()
        if extras.entries:
            blocks = extras.of_index_blocks(run.block_size // block_tokens, block_tokens)
        keys = self._hasher.chain(before.parent_key, run.token_ids, blocks)
        return _Read(before.parent_key, {}, run.block_hashes, keys)

    def _parent(self, parent_hash: EngineHash | None) -> _Head:
        if parent_hash is not None:
            if (head := self._heads.get(parent_hash)) is not None:
                return head
            if (key := self._cache.tail_key(parent_hash)) is not None:
                return _Head(key)
        raise ValueError(f"parent {parent_hash!r} is not known")

    def _read_short(self, run: BlockStored, extras: RunExtras, before: _Head) -> _Read:
        size, block_tokens = run.block_size, self._hasher.block_tokens
        tokens = token_words(run.token_ids)
        heads: dict[EngineHash, _Head] = {}
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
                before = _Head(int(key))
            else:
                before = heads[engine_hash] = _Head(before.parent_key, words, packed)
        keys = np.array(list(ends.values()), np.uint64) if ends else _NO_KEYS
        return _Read(None, heads, list(ends), keys)


@dataclass(frozen=True, slots=True)
class CopyChange:
    """One copy more, or one less, of a block in a tier."""

    group: int | None  # the KV cache group that holds it; None for the lead group
    engine_hash: EngineHash
    tier: str
    stored: bool  # whether it is one more


@dataclass(slots=True, eq=False)
class Orphan:
    """A run that waits, if there is one, and what was said about its blocks since."""

    awaited: EngineHash  # the lead group's block that must come first
    run: BlockStored | None
    later: list[CopyChange] = field(default_factory=list)  # to be done after it, in this order
    run_tokens: int = 0  # what the run counts against the buffer's bound

    def __post_init__(self) -> None:
        run = self.run
        if run is not None:
            blocks = max(len(run.token_ids), _HASH_TOKENS * len(run.block_hashes))
            # Names and extras may be as long as a message; each byte counts as a token.
            texts = len(run.lora_name or "") + len(run.cache_salt or "") + len(run.medium or "")
            self.run_tokens = blocks + texts + (len(msgspec.msgpack.encode(run.extra_keys)) - 1)

    @property
    def cost_tokens(self) -> int:
        return self.run_tokens + _HASH_TOKENS * len(self.later)


class Orphans:
    """Stores that wait, by the engine hash that they wait for."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens  # beyond it the oldest orphans are dropped
        self._tokens = 0
        self._waiting: OrderedDict[Orphan, None] = OrderedDict()
        self._by_awaited: dict[EngineHash, dict[Orphan, None]] = {}
        # The last orphan that stores this block of this group.
        self._by_block: dict[tuple[int | None, EngineHash], Orphan] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def awaited(self) -> Collection[EngineHash]:
        return self._by_awaited.keys()

    def hold(self, orphan: Orphan) -> int:
        """Lets a run wait for its parent, or a copy for its block; tells how many were dropped for room."""
        self._waiting[orphan] = None
        self._tokens += orphan.cost_tokens
        self._by_awaited.setdefault(orphan.awaited, {})[orphan] = None
        self._by_block.update(dict.fromkeys(_blocks(orphan), orphan))
        return self._make_room()

    def follow_up(self, change: CopyChange) -> int | None:
        """Keeps what is said of a waiting block until it comes.

        Returns:
            How many orphans were dropped to make room; None if no such block waits.
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

    def take(self, engine_hash: EngineHash) -> tuple[Orphan, ...]:
        """Lets go those that waited for this block, in the order of their arrival."""
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
