"""The engine's hashes of one pod life: which block each stands for, and how many copies there are.

An engine names a block by its hash when it removes it or continues it. Hashes of two pods, models or lives
never meet: each life has a map of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

from indexer.events import EngineHash


class Copied(Protocol):
    """A block of which copies are counted."""

    copies: dict[str, int]


_Block = TypeVar("_Block", bound=Copied)


class EngineBlocks(Generic[_Block]):
    """Bounded map from engine hash to block.

    A block without copies stays known for a while: stores that name no tokens, and children, may refer to it.

    Args:
        max_held: Most blocks with copies; beyond it the oldest is given up.
        max_released: Most blocks without copies; beyond it the oldest is forgotten.
    """

    def __init__(self, max_held: int, max_released: int) -> None:
        self._max_held = max_held
        self._max_released = max_released
        self._held: OrderedDict[EngineHash, _Block] = OrderedDict()
        self._released: OrderedDict[EngineHash, _Block] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, engine_hash: EngineHash) -> _Block | None:
        """The block of this hash, with copies or without; None if unknown."""
        return self._held.get(engine_hash) or self._released.get(engine_hash)

    def add_copy(self, engine_hash: EngineHash, block: _Block, tier: str) -> _Block | None:
        """Counts one more copy of `block` under this hash.

        Returns:
            A block that had to be given up for it; its copies must leave the index too.
        """
        self._released.pop(engine_hash, None)
        self._held[engine_hash] = block
        block.copies[tier] = block.copies.get(tier, 0) + 1
        return self._held.popitem(last=False)[1] if len(self._held) > self._max_held else None

    def drop_copy(self, engine_hash: EngineHash, tier: str) -> _Block | None:
        """Counts one copy less.

        Returns:
            The block; None if it has no copy in this tier.
        """
        block = self._held.get(engine_hash)
        if block is None or tier not in block.copies:
            return None
        block.copies[tier] -= 1
        if not block.copies[tier]:
            del block.copies[tier]
        if not block.copies:
            del self._held[engine_hash]
            self._released[engine_hash] = block
            if len(self._released) > self._max_released:
                self._released.popitem(last=False)
        return block

    def discard(self, engine_hash: EngineHash) -> _Block | None:
        """Forgets a hash; returns its block, whose copies must leave the index too."""
        self._released.pop(engine_hash, None)
        return self._held.pop(engine_hash, None)

    def clear(self) -> None:
        """Forgets everything."""
        self._held.clear()
        self._released.clear()
