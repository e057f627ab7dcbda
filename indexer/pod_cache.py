"""The contract between a pod's events and the index: blocks of one pod life, named by the engine's hashes.

Engine hashes and the block keys they stand for come in; references in the index are counted. One cache holds
one KV cache group of one life of one pod, so hashes of two pods, models, groups or lives never meet.
Backends: `MappedCache` on any index, `flat_cache` on the flat one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import Protocol

import numpy as np

from indexer.engine_blocks import EngineBlock, EngineBlocks
from indexer.events import EngineHash
from indexer.index import Holding, Index
from indexer.keys import Keys
from indexer.view_parts import PART_BLOCKS, CachePart, EngineBlockPart

# In one part; a part's last block may bring more.
_PART_KEYS = PART_BLOCKS // 2


class Dropped(StrEnum):
    """What removing one copy of a block did."""

    LAST = "last"
    COPY = "copy"


class PodCache(Protocol):
    """Blocks of one pod life in one KV cache group."""

    def store(self, hashes: Sequence[EngineHash], keys: Keys, tier: str) -> tuple[int, int]:
        """Counts one copy of each block.

        Args:
            hashes: Of consecutive engine blocks.
            keys: Their index blocks, the same number for each hash.
            tier: Where they lie.

        Returns:
            How many hashes stood for other blocks before (these are given up), and how many of the oldest
            blocks had to be given up to make room.
        """
        ...

    def copy(self, engine_hash: EngineHash, tier: str) -> bool:
        """Counts one copy more of a block that was stored before; False if it is not known (any more)."""
        ...

    def drop(self, engine_hash: EngineHash, tier: str) -> Dropped | None:
        """Counts one copy less of a block; None if none is held in this tier."""
        ...

    def holds_all(self, hashes: Sequence[EngineHash], keys: Keys, tier: str) -> bool:
        """Whether each hash stands for its keys and has a copy in this tier."""
        ...

    def tail_key(self, engine_hash: EngineHash) -> int | None:
        """Key of the block's last index block; None if it is not known (any more)."""
        ...

    def clear(self) -> None:
        """Begins a new life: drops all, in the index too."""
        ...

    def export(self) -> Iterator[CachePart | None]:
        """Lists all that is held, and what is remembered of blocks that went; see `ViewContent.parts`."""
        ...

    def restore(self, part: CachePart) -> None:
        """Adds a part that another cache of the same backend listed, to a life in which nothing was stored.

        Raises:
            TypeError: It is of another backend.
        """
        ...


class MappedCache:
    """A `PodCache` on any `Index`, with a bounded map of its own.

    Args:
        index: Where copies are counted.
        holder: The pod's name in the index.
        max_held: Most engine blocks with copies.
        max_released: Most blocks remembered after their last copy went.
    """

    def __init__(self, index: Index, holder: str, *, max_held: int, max_released: int) -> None:
        self._index = index
        self._holder = holder
        self._blocks: EngineBlocks[EngineBlock] = EngineBlocks(max_held, max_released)

    def store(self, hashes: Sequence[EngineHash], keys: Keys, tier: str) -> tuple[int, int]:
        """See `PodCache.store`."""
        self._index.add(self._holder, tier, keys)
        split = len(keys) // len(hashes)
        reused = given_up = 0
        for position, engine_hash in enumerate(hashes):
            block_keys = keys[position * split : (position + 1) * split]
            block = self._blocks.get(engine_hash)
            if block is not None and block.keys.tolist() != block_keys.tolist():
                reused += bool(block.copies)
                self._give_up(self._blocks.discard(engine_hash))
                block = None
            given_up += self._count(engine_hash, block or EngineBlock(block_keys), tier)
        return reused, given_up

    def copy(self, engine_hash: EngineHash, tier: str) -> bool:
        """See `PodCache.copy`."""
        block = self._blocks.get(engine_hash)
        if block is None:
            return False
        self._index.add(self._holder, tier, block.keys)
        self._count(engine_hash, block, tier)
        return True

    def drop(self, engine_hash: EngineHash, tier: str) -> Dropped | None:
        """See `PodCache.drop`."""
        block = self._blocks.drop_copy(engine_hash, tier)
        if block is None:
            return None
        self._index.remove(self._holder, tier, block.keys)
        return Dropped.COPY if tier in block.copies else Dropped.LAST

    def holds_all(self, hashes: Sequence[EngineHash], keys: Keys, tier: str) -> bool:
        """See `PodCache.holds_all`."""
        split = len(keys) // len(hashes)
        for position, engine_hash in enumerate(hashes):
            block = self._blocks.get(engine_hash)
            expected = keys[position * split : (position + 1) * split]
            if block is None or tier not in block.copies or block.keys.tolist() != expected.tolist():
                return False
        return True

    def tail_key(self, engine_hash: EngineHash) -> int | None:
        """See `PodCache.tail_key`."""
        block = self._blocks.get(engine_hash)
        return None if block is None else int(block.keys[-1])

    def clear(self) -> None:
        """See `PodCache.clear`."""
        self._blocks.clear()
        self._index.clear_pod(self._holder)

    def export(self) -> Iterator[CachePart | None]:
        """See `PodCache.export`."""
        number = self._index.tiers.number
        blocks: list[tuple[EngineHash, EngineBlock]] = []
        keys = 0
        for engine_hash, block in self._blocks.items():
            blocks.append((engine_hash, block))
            keys += len(block.keys)
            if keys >= _PART_KEYS:
                yield _part(blocks, number)
                blocks, keys = [], 0
        if blocks:
            yield _part(blocks, number)

    def restore(self, part: CachePart) -> None:
        """See `PodCache.restore`."""
        if not isinstance(part, EngineBlockPart):
            raise TypeError(f"{type(part).__name__} is no part of a map of engine hashes")
        names = self._index.tiers.names
        held: dict[int, tuple[list[Keys], list[int]]] = {}
        start = 0
        for engine_hash, count, copies in zip(part.hashes, part.key_counts, part.copies, strict=True):
            keys = part.keys[start : start + count].copy()
            start += count
            for tier, number in copies.items():
                runs, references = held.setdefault(tier, ([], []))
                runs.append(keys)
                references += [number] * count
            block = EngineBlock(keys, {names[tier]: number for tier, number in copies.items()})
            self._blocks.restore(engine_hash, block)
        self._index.restore(
            [
                Holding(self._holder, names[tier], np.concatenate(runs), np.array(references, np.int32))
                for tier, (runs, references) in held.items()
            ]
        )
        while evicted := self._blocks.pop_excess():
            self._give_up(evicted)

    def _count(self, engine_hash: EngineHash, block: EngineBlock, tier: str) -> int:
        """Counts a copy that the index has already; tells how many blocks were given up for it."""
        evicted = self._blocks.add_copy(engine_hash, block, tier)
        self._give_up(evicted)
        return evicted is not None

    def _give_up(self, block: EngineBlock | None) -> None:
        """Takes a block out of the index whose removal we could not follow any more."""
        if block is not None:
            for tier, copies in block.copies.items():
                for _ in range(copies):
                    self._index.remove(self._holder, tier, block.keys)


def _part(blocks: Sequence[tuple[EngineHash, EngineBlock]], number: Callable[[str], int]) -> EngineBlockPart:
    return EngineBlockPart(
        hashes=[engine_hash for engine_hash, _ in blocks],
        key_counts=[len(block.keys) for _, block in blocks],
        keys=np.concatenate([block.keys for _, block in blocks]),
        copies=[{number(tier): copies for tier, copies in block.copies.items()} for _, block in blocks],
    )
