"""What is said of blocks that are not known yet: it waits here, bounded, and leaves when its block comes.

A run waits for its parent; a copy in a KV cache group that tells no positions waits for the block itself.
Blocks are named by the engine's hashes; nothing here knows keys or the index.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

from indexer.wire.events import BlockStored, EngineHash

# The least that a hash or a later change counts against the bound, in tokens: about the memory that it takes.
_HASH_TOKENS = 16


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
