"""Buffer of orphans: stores whose parent or block is not known yet. Its size is limited.

A run of blocks waits for its parent. A copy in a KV cache group without positions waits for the block itself.
Blocks are identified by the engine's hashes; this module knows neither keys nor the index.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

from indexer.wire.events import BlockStored, EngineHash

# Minimum cost of a hash or a later change in tokens, about the memory that it uses.
_HASH_TOKENS = 16


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
