"""Stores that tell again what is there, as vLLM does for requests with kv_cache_report_mode=full.

Such a report announces the blocks that a request found in the cache, from its prompt's start, before those
that it adds in the same batch. A report of a request that adds nothing equals, byte for byte, the store of a
request that computes its whole chain once more (prompt_logprobs, or the same prompt twice at once): after the
first, one removal ends a block, after the second two. Few clients ask for reports, so such a store counts as
a copy, except in an episode of reports: there it is uncertain until later events tell. Pure bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from indexer.errors import PayloadError, TokenError
from indexer.wire.events import BlockStored, EngineHash, KVEvent

# Stores of a lead group after the last report that shows itself; the episode ends with them.
_EPISODE_STORES = 1000


class Ahead:
    """Events of a batch behind the one at `position`."""

    def __init__(self, events: Sequence[KVEvent | PayloadError]) -> None:
        self.position = 0  # of the event that is applied now
        self._events = events
        self._last_child: dict[tuple[int | None, EngineHash], int] | None = None

    def continues(self, run: BlockStored) -> bool:
        if self.position + 1 >= len(self._events):
            return False
        if self._last_child is None:
            self._last_child = {
                (event.group_idx, event.parent_block_hash): position
                for position, event in enumerate(self._events)
                if isinstance(event, BlockStored) and event.parent_block_hash is not None
            }
        return self._last_child.get((run.group_idx, run.block_hashes[-1]), -1) > self.position


class Reannouncements:
    """Tells which stores of one pod life add no copy.

    A step announces the new blocks of one request as one run, so of two runs in a batch that continue each
    other the first was not new, if the pod holds all of it. That begins an episode, in which a run that
    nothing continues may be either; out of it such a run is a copy.
    """

    def __init__(self) -> None:
        self._stores_left = 0

    @property
    def in_episode(self) -> bool:
        return self._stores_left > 0

    def of_lead(self, run: BlockStored, ahead: Ahead, holds: Callable[[BlockStored], bool]) -> bool | None:
        """Whether a lead group's run from a prompt's start is told again; None if it may be either.

        Args:
            holds: Whether the lead group holds such a run; may raise TokenError, then it does not.
        """
        is_held = _safely(holds, run)
        if is_held and ahead.continues(run):
            self._stores_left = _EPISODE_STORES
            return True
        was_in_episode = self.in_episode
        self._stores_left -= was_in_episode
        return None if is_held and was_in_episode else False

    def of_group(self, run: BlockStored, ahead: Ahead, holds: Callable[[BlockStored], bool]) -> bool | None:
        """Whether another group's run from a prompt's start is told again; None if it may be either.

        Such a run names all blocks of the prefix, also those that the group does not hold; it is the lead
        group that holds them.
        """
        is_continued = ahead.continues(run)
        if not ((is_continued or self.in_episode) and _safely(holds, run)):
            return False
        return True if is_continued else None

    def forget(self, *, in_episode: bool = False) -> None:
        """Begin a new life, of which is known whether it reports."""
        self._stores_left = _EPISODE_STORES if in_episode else 0


class UncertainCopies:
    """Copies in one pod life that an engine may hold or not, and blocks of which no other copy is left.

    The index counts certain copies only. When a block's last certain copy is removed, an uncertain one takes
    its place: the block is doubtful until a later event tells whether it is there. Engines evict what was
    used least recently: when a block is evicted that was stored after a doubt began, an uncertain copy that
    no event showed in use since has gone before it.
    """

    def __init__(self, max_blocks: int = 20_000) -> None:
        self._max_blocks = max_blocks  # with uncertain copies; so many take some megabytes
        # By hash and tier.
        self._copies: dict[tuple[EngineHash, str], int] = {}
        # Doubtful blocks, and blocks stored while there were any: by the number of doubts begun until then.
        self._doubtful: dict[tuple[EngineHash, str], int] = {}
        self._stored_later: dict[tuple[EngineHash, str], int] = {}
        self._doubts = 0
        self.has_inferred = False  # whether a block counts as gone because others went: likely, not certain

    def __len__(self) -> int:
        return len(self._copies) + len(self._doubtful)

    @property
    def in_doubt(self) -> bool:
        """Whether a block counts as held of which nobody knows whether it is there."""
        return bool(self._doubtful)

    def add(self, hashes: Collection[EngineHash], tier: str) -> bool:
        """Note one uncertain copy more of each block; False, and nothing noted, where there is no room."""
        if len(self) + len(hashes) > self._max_blocks:
            return False
        for engine_hash in hashes:
            self._copies[engine_hash, tier] = self._copies.get((engine_hash, tier), 0) + 1
        return True

    def replaces_last(self, engine_hash: EngineHash, tier: str) -> bool:
        """Take note that a block's last counted copy went; tell whether an uncertain one takes its place."""
        block = engine_hash, tier
        self._doubtful.pop(block, None)
        if (copies := self._copies.pop(block, 0)) == 0:
            return False
        if copies > 1:
            self._copies[block] = copies - 1
        self._doubts += 1
        self._doubtful[block] = self._doubts
        return True

    def outlived(self, engine_hash: EngineHash, tier: str) -> list[EngineHash]:
        """Take note that a block is gone; return the doubtful blocks that must have gone before it."""
        begun = self._stored_later.pop((engine_hash, tier), 0)
        gone = [block for block, doubt in self._doubtful.items() if doubt <= begun and block[1] == tier]
        self.has_inferred |= bool(gone)
        for block in gone:
            del self._doubtful[block]
            self._copies.pop(block, None)
        if not self._doubtful:
            self._stored_later.clear()
        return [engine_hash for engine_hash, _ in gone]

    def present(self, hashes: Collection[EngineHash], tier: str) -> None:
        if self._doubtful:
            for engine_hash in hashes:
                self._doubtful.pop((engine_hash, tier), None)

    def stored(self, hashes: Collection[EngineHash], tier: str) -> list[EngineHash]:
        """Take note of one certain copy more of each block; return those that were doubtful."""
        if not self._doubtful:
            return []
        doubtful = [engine_hash for engine_hash in hashes if (engine_hash, tier) in self._doubtful]
        for engine_hash in doubtful:
            del self._doubtful[engine_hash, tier]
            self._copies[engine_hash, tier] = self._copies.get((engine_hash, tier), 0) + 1
        if len(self._stored_later) + len(hashes) <= self._max_blocks:
            self._stored_later.update(dict.fromkeys([(each, tier) for each in hashes], self._doubts))
        return doubtful

    def clear(self) -> None:
        self._copies.clear()
        self._doubtful.clear()
        self._stored_later.clear()
        self.has_inferred = False


def _safely(holds: Callable[[BlockStored], bool], run: BlockStored) -> bool:
    try:
        return holds(run)
    except TokenError:
        return False
