"""Runs of engine blocks that come with their tokens: from tokens to keys, from keys to the pod's cache.

Stores of the lead group come in, blocks of the index go out. Engine blocks are as long as index blocks or a
multiple of them here; shorter ones are in `part_runs`. Knows neither groups nor what waits for its parent.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from indexer.events import BlockStored, EngineHash
from indexer.extras import RunExtras, read_extras
from indexer.flat_cache import Dropped, FlatCache
from indexer.keys import BlockHasher, Keys


@dataclass(frozen=True, slots=True)
class Stored:
    """What storing one run did.

    Attributes:
        keys: The index blocks that are held with it, parents first.
        parent: The key in front of them; None where it is not known.
        reused: Hashes that stood for other blocks before.
        given_up: Old blocks that were given up to make room.
    """

    keys: Keys
    parent: int | None
    reused: int
    given_up: int


class PlainRuns(msgspec.Struct, frozen=True):
    """Runs of the lead group that are what they seem, if their parent is known and no hash of theirs awaited.

    Attributes:
        block_tokens: Tokens of an engine block.
        group: The lead group; None where the engine names none.
        awaited: Hashes that something waits for.
    """

    block_tokens: int
    group: int | None
    awaited: Collection[EngineHash]


class Runs(Protocol):
    """Blocks of one pod life's lead group. Tells and bounds as `FlatCache` does."""

    def fits(self, block_size: int) -> bool:
        """Whether runs of engine blocks of this length, in tokens, can be stored."""
        ...

    def knows(self, engine_hash: EngineHash) -> bool:
        """Whether this block's place in its prompt is known."""
        ...

    def holds(self, run: BlockStored, tier: str) -> bool:
        """Whether a run that begins a prompt is held in this tier, all of it.

        Raises:
            TokenError: Its tokens or its extras cannot be read.
        """
        ...

    def store(self, run: BlockStored, tier: str, *, starts_prompt: bool) -> Stored:
        """Counts one copy of each block of a run; its parent is known, unless it starts a prompt.

        Raises:
            TokenError: Its tokens or its extras cannot be read.
        """
        ...

    def copy(self, engine_hash: EngineHash, tier: str) -> bool:
        """See `FlatCache.copy`."""
        ...

    def drop(self, engine_hash: EngineHash, tier: str) -> Dropped | None:
        """See `FlatCache.drop`."""
        ...

    def tail_key(self, engine_hash: EngineHash) -> int | None:
        """See `FlatCache.tail_key`; None also for a block at whose end no index block ends."""
        ...

    def clear(self) -> None:
        """Drops all, in the index too."""
        ...


class BlockRuns:
    """`Runs` of engine blocks that are one or more index blocks long.

    Args:
        model: The base model's name.
        cache: Where the blocks go.
        hasher: Makes their keys.
    """

    def __init__(self, model: str, cache: FlatCache, hasher: BlockHasher) -> None:
        self._model = model
        self._cache = cache
        self._hasher = hasher

    def fits(self, block_size: int) -> bool:
        """See `Runs.fits`."""
        return block_size % self._hasher.block_tokens == 0

    def knows(self, engine_hash: EngineHash) -> bool:
        """See `Runs.knows`."""
        return self._cache.tail_key(engine_hash) is not None

    def holds(self, run: BlockStored, tier: str) -> bool:
        """See `Runs.holds`."""
        return self._cache.holds_all(run.block_hashes, self._chain(run, starts_prompt=True)[1], tier)

    def store(self, run: BlockStored, tier: str, *, starts_prompt: bool) -> Stored:
        """See `Runs.store`."""
        parent, keys = self._chain(run, starts_prompt=starts_prompt)
        return Stored(keys, parent, self._cache.store(run.block_hashes, keys, tier), 0)

    def copy(self, engine_hash: EngineHash, tier: str) -> bool:
        """See `Runs.copy`."""
        return self._cache.copy(engine_hash, tier)

    def drop(self, engine_hash: EngineHash, tier: str) -> Dropped | None:
        """See `Runs.drop`."""
        return self._cache.drop(engine_hash, tier)

    def tail_key(self, engine_hash: EngineHash) -> int | None:
        """See `Runs.tail_key`."""
        return self._cache.tail_key(engine_hash)

    def clear(self) -> None:
        """See `Runs.clear`."""
        self._cache.clear()

    def _chain(self, run: BlockStored, *, starts_prompt: bool) -> tuple[int, Keys]:
        """The key in front of a run, and its keys."""
        extras = read_extras(run, starts_prompt=starts_prompt)
        if starts_prompt:
            parent = prompt_root(self._hasher, self._model, run, extras)
        else:
            parent = self._parent_key(run.parent_block_hash)
        block_tokens = self._hasher.block_tokens
        blocks: Sequence[bytes] = ()
        if extras.entries:
            blocks = extras.of_index_blocks(run.block_size // block_tokens, block_tokens)
        return parent, self._hasher.chain(parent, run.token_ids, blocks)

    def _parent_key(self, parent_hash: EngineHash | None) -> int:
        key = None if parent_hash is None else self._cache.tail_key(parent_hash)
        if key is None:
            raise ValueError(f"parent {parent_hash!r} is not known")
        return key


def prompt_root(hasher: BlockHasher, model: str, run: BlockStored, extras: RunExtras) -> int:
    """The key in front of a run that starts a prompt."""
    return hasher.root(model, run.lora_name or None, extras.cache_salt)
