"""Stores whose parent block is not known yet: they wait here, bounded, and leave when the parent comes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from indexer.events import BlockStored

# What one later change counts against the bound, in tokens: about the memory that it takes.
_CHANGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class CopyChange:
    """One copy more, or one less, of a block in a tier."""

    engine_hash: int | bytes
    tier: str
    stored: bool


@dataclass(slots=True, eq=False)
class Orphan:
    """A store that waits, and what was said about its blocks since."""

    event: BlockStored
    later: list[CopyChange] = field(default_factory=list)

    @property
    def cost_tokens(self) -> int:
        """What it counts against the buffer's bound."""
        return len(self.event.token_ids) + _CHANGE_TOKENS * len(self.later)


class Orphans:
    """Waiting stores by the engine hash of their missing parent.

    Args:
        max_tokens: Most tokens that wait; beyond it the oldest stores are dropped.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._waiting: OrderedDict[Orphan, None] = OrderedDict()
        self._by_parent: dict[int | bytes | None, list[Orphan]] = {}
        self._by_hash: dict[int | bytes, Orphan] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def hold(self, event: BlockStored) -> int:
        """Lets a store wait for its parent.

        Returns:
            How many waiting stores were dropped to make room.
        """
        orphan = Orphan(event)
        self._waiting[orphan] = None
        self._tokens += orphan.cost_tokens
        self._by_parent.setdefault(event.parent_block_hash, []).append(orphan)
        self._by_hash.update(dict.fromkeys(event.block_hashes, orphan))
        return self._make_room()

    def follow_up(self, change: CopyChange) -> int | None:
        """Keeps what is said of a waiting block until its store is applied.

        Returns:
            How many waiting stores were dropped to make room; None if no such block waits.
        """
        orphan = self._by_hash.get(change.engine_hash)
        if orphan is None:
            return None
        orphan.later.append(change)
        self._tokens += _CHANGE_TOKENS
        return self._make_room()

    def take(self, parent_hash: int | bytes) -> tuple[Orphan, ...]:
        """Lets go those that waited for this block, in the order of their arrival."""
        orphans = tuple(self._by_parent.get(parent_hash, ()))
        for orphan in orphans:
            self._drop(orphan)
        return orphans

    def clear(self) -> None:
        """Drops all."""
        self._waiting.clear()
        self._by_parent.clear()
        self._by_hash.clear()
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
        siblings = self._by_parent[orphan.event.parent_block_hash]
        siblings.remove(orphan)
        if not siblings:
            del self._by_parent[orphan.event.parent_block_hash]
        for engine_hash in orphan.event.block_hashes:
            if self._by_hash.get(engine_hash) is orphan:
                del self._by_hash[engine_hash]
