"""Runs of engine blocks that are shorter than the index's: each is a part of one index block.

Parts may come one by one, leave and come again. An index block is held while each of its parts has a copy; it
lies in the slowest of the tiers in which these have their best ones, and counts as one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from indexer.engine_blocks import EngineBlocks
from indexer.errors import TokenError
from indexer.events import BlockStored, EngineHash
from indexer.extras import pack, read_extras
from indexer.flat_cache import Dropped, FlatCache
from indexer.keys import BlockHasher, token_words
from indexer.runs import Stored, prompt_root
from indexer.tiers import Tiers

PARTS_MAX = 131_072
"""Most parts with copies of one pod; each takes about 1 KB."""
_EXTRAS_BYTES_MAX = 4096


@dataclass(slots=True, eq=False)
class _Part:
    """One engine block.

    Attributes:
        engine_hash: Its name.
        position: Its place in its index block, from 0.
        before: The part in front of it in the same index block; None for the first.
        parent_key: Key of the index block in front of its own, or the prompt's root.
        words: uint32 tokens of its index block up to its end; of its last part none, `key` stands for them.
        extras: What its index block depends on besides tokens up to its end; of its last part none.
        key: The index block that it completes; None for all parts but the last.
        copies: Physical copies by tier, none of them 0.
        tier: Where the index block that it completes is counted; None while it is not held.
    """

    engine_hash: EngineHash
    position: int
    before: EngineHash | None
    parent_key: int
    words: bytes
    extras: bytes
    key: int | None
    copies: dict[str, int] = field(default_factory=dict)
    tier: str | None = None

    def same(self, other: _Part) -> bool:
        """Whether both are the same tokens after the same prefix."""
        return (self.parent_key, self.words, self.extras, self.key, self.before) == (
            other.parent_key,
            other.words,
            other.extras,
            other.key,
            other.before,
        )


class PartRuns:
    """`Runs` of engine blocks of which several make one index block.

    An index block is known to the cache by the hash of its last part.

    Args:
        model: The base model's name.
        cache: Where index blocks go.
        hasher: Makes their keys.
        tiers: Which tier is better than which.
        part_tokens: Tokens of an engine block; divides those of an index block.
        max_held: Most engine blocks with copies; no more than `PARTS_MAX` are held in any case.
        max_released: Most of them remembered after their last copy went.
    """

    def __init__(
        self,
        model: str,
        cache: FlatCache,
        hasher: BlockHasher,
        tiers: Tiers,
        *,
        part_tokens: int,
        max_held: int,
        max_released: int,
    ) -> None:
        self._model = model
        self._cache = cache
        self._hasher = hasher
        self._tiers = tiers
        self._part_tokens = part_tokens
        self._parts: EngineBlocks[_Part] = EngineBlocks(min(max_held, PARTS_MAX), max_released)
        # Of each part: the parts with copies that continue it in the same index block.
        self._after: dict[EngineHash, set[EngineHash]] = {}

    def fits(self, block_size: int) -> bool:
        """See `Runs.fits`."""
        return block_size == self._part_tokens

    def knows(self, engine_hash: EngineHash) -> bool:
        """See `Runs.knows`."""
        return self._parts.get(engine_hash) is not None

    def holds(self, run: BlockStored, tier: str) -> bool:
        """See `Runs.holds`."""
        for part in self._read(run, starts_prompt=True):
            known = self._parts.get(part.engine_hash)
            if known is None or tier not in known.copies or not known.same(part):
                return False
        return True

    def store(self, run: BlockStored, tier: str, *, starts_prompt: bool) -> Stored:
        """See `Runs.store`."""
        reused = given_up = 0
        completed: list[_Part] = []
        for part in self._read(run, starts_prompt=starts_prompt):
            known = self._parts.get(part.engine_hash)
            if known is not None and not known.same(part):
                self._give_up(self._parts.discard(part.engine_hash))
                reused += 1
                known = None
            given_up += self._count(known or part, tier)
            if part.key is not None:
                completed.append(known or part)
        keys = [part.key for part in completed if part.tier is not None]
        return Stored(np.array(keys, np.uint64), None, reused, given_up)

    def copy(self, engine_hash: EngineHash, tier: str) -> bool:
        """See `Runs.copy`."""
        part = self._parts.get(engine_hash)
        if part is None:
            return False
        self._count(part, tier)
        return True

    def drop(self, engine_hash: EngineHash, tier: str) -> Dropped | None:
        """See `Runs.drop`."""
        part = self._parts.drop_copy(engine_hash, tier)
        if part is None:
            return None
        if tier in part.copies:
            return Dropped.COPY
        self._settle(part)
        if not part.copies:
            self._unlink(part)
        return Dropped.LAST

    def tail_key(self, engine_hash: EngineHash) -> int | None:
        """See `Runs.tail_key`."""
        part = self._parts.get(engine_hash)
        return None if part is None else part.key

    def clear(self) -> None:
        """See `Runs.clear`."""
        self._parts.clear()
        self._after.clear()
        self._cache.clear()

    def _read(self, run: BlockStored, *, starts_prompt: bool) -> list[_Part]:
        """The run's engine blocks, without copies."""
        extras = read_extras(run, starts_prompt=starts_prompt)
        before: _Part | None = None
        if starts_prompt:
            parent_key = prompt_root(self._hasher, self._model, run, extras)
        else:
            before = self._parent(run.parent_block_hash)
            parent_key = before.parent_key
        tokens = token_words(run.token_ids)
        parts: list[_Part] = []
        for number, engine_hash in enumerate(run.block_hashes):
            if before is not None and before.key is not None:
                parent_key, before = before.key, None
            words = tokens[number * self._part_tokens : (number + 1) * self._part_tokens].tobytes()
            entry = extras.entries[number] if extras.entries else ()
            before = self._part(engine_hash, before, parent_key, words, entry)
            parts.append(before)
        return parts

    def _parent(self, parent_hash: EngineHash | None) -> _Part:
        part = None if parent_hash is None else self._parts.get(parent_hash)
        if part is None:
            raise ValueError(f"parent {parent_hash!r} is not known")
        return part

    def _part(
        self,
        engine_hash: EngineHash,
        before: _Part | None,
        parent_key: int,
        words: bytes,
        entry: Sequence[Any],
    ) -> _Part:
        position, front, extras = 0, None, b""
        if before is not None:
            position, front = before.position + 1, before.engine_hash
            words, extras = before.words + words, before.extras
        block_tokens = self._hasher.block_tokens
        extras += pack(entry, position * self._part_tokens, block_tokens)
        if len(extras) > _EXTRAS_BYTES_MAX:
            raise TokenError(f"the extra keys of a block take more than {_EXTRAS_BYTES_MAX} bytes")
        key = None
        if (position + 1) * self._part_tokens == block_tokens:
            key = int(self._hasher.chain(parent_key, np.frombuffer(words, np.uint32), [extras])[0])
            words = extras = b""
        return _Part(engine_hash, position, front, parent_key, words, extras, key)

    def _count(self, part: _Part, tier: str) -> int:
        """Counts one copy more; tells how many parts were given up for it."""
        evicted = self._parts.add_copy(part.engine_hash, part, tier)
        if part.before is not None:
            self._after.setdefault(part.before, set()).add(part.engine_hash)
        self._settle(part)
        self._give_up(evicted)
        return evicted is not None

    def _give_up(self, part: _Part | None) -> None:
        """Takes back what a part that is not known any more stood for."""
        if part is not None:
            part.copies.clear()
            self._settle(part)
            self._unlink(part)

    def _unlink(self, part: _Part) -> None:
        after = None if part.before is None else self._after.get(part.before)
        if after is not None and part.before is not None:
            after.discard(part.engine_hash)
            if not after:
                del self._after[part.before]

    def _settle(self, changed: _Part) -> None:
        """Counts the index blocks of which this is a part where they are held now."""
        pending = [changed]
        while pending:
            part = pending.pop()
            if part.key is not None:
                self._move(part, part.key, self._tier(part))
                continue
            for engine_hash in self._after.get(part.engine_hash, ()):
                after = self._parts.get(engine_hash)
                # An engine that reuses hashes could make a ring of them.
                if after is not None and after.position > part.position:
                    pending.append(after)

    def _tier(self, last: _Part) -> str | None:
        """Where the index block that ends with this part is held; None if one of its parts is not."""
        slowest = 0
        part: _Part | None = last
        for position in reversed(range(last.position + 1)):
            if part is None or not part.copies or part.position != position:
                return None
            slowest = max(slowest, min(map(self._tiers.number, part.copies)))
            part = None if part.before is None else self._parts.get(part.before)
        return self._tiers.names[slowest]

    def _move(self, last: _Part, key: int, tier: str | None) -> None:
        if tier == last.tier:
            return
        if tier is not None:
            self._cache.store([last.engine_hash], np.array([key], np.uint64), tier)
        if last.tier is not None:
            self._cache.drop(last.engine_hash, last.tier)
        last.tier = tier
