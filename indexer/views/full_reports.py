"""Full cache reports: stores of blocks that are already cached (vLLM's kv_cache_report_mode=full).

A full report lists the blocks that a request found in the cache, from its prompt's start, followed in the
same batch by the blocks that it adds. If a request adds nothing, its report equals, byte for byte, the store
of a request that computes its whole chain again (prompt_logprobs, or the same prompt twice at once). After a
report, one removal ends a block; after a second computation, it takes two. Few clients request reports, so
such a store counts as a copy. Only during an episode of reports is it uncertain, until later events decide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from indexer.errors import PayloadError, TokenError
from indexer.wire.events import BlockStored, EngineHash, KVEvent

_Holds = Callable[[BlockStored], bool]
# An episode ends after this many stores of the lead group without an unambiguous report.
_EPISODE_STORES = 1000


class LaterEvents:
    """Events of a batch after the one at `position`."""

    def __init__(self, events: Sequence[KVEvent | PayloadError]) -> None:
        self.position = 0  # of the event that is being applied
        self._events = events
        self._last_child: dict[tuple[int | None, EngineHash], int] | None = None

    def continues(self, run: BlockStored) -> bool:
        """Return whether a later store of the batch has the run's last block as its parent."""
        if self.position + 1 >= len(self._events):
            return False
        if self._last_child is None:
            self._last_child = {
                (event.group_idx, event.parent_block_hash): position
                for position, event in enumerate(self._events)
                if isinstance(event, BlockStored) and event.parent_block_hash is not None
            }
        return self._last_child.get((run.group_idx, run.block_hashes[-1]), -1) > self.position


class FullReports:
    """Detector of full reports, which add no copies, among the stores of one pod epoch.

    An engine step publishes the new blocks of a request as one run. Hence, if a run is continued by another
    one in its batch and the pod holds all of it, the run is a report. That starts an episode, in which a run
    without continuation may be a report or a copy. Outside of an episode such a run is a copy.
    """

    def __init__(self) -> None:
        self._stores_left = 0

    @property
    def in_episode(self) -> bool:
        return self._stores_left > 0

    def repeats_lead_run(self, run: BlockStored, later: LaterEvents, holds: _Holds) -> bool | None:
        """Return whether a lead group's run from a prompt's start is a report; None if it is ambiguous.

        Args:
            holds: Returns whether the lead group holds a run; a TokenError counts as False.
        """
        is_held = _safely(holds, run)
        if is_held and later.continues(run):
            self._stores_left = _EPISODE_STORES
            return True
        was_in_episode = self.in_episode
        self._stores_left -= was_in_episode
        return None if is_held and was_in_episode else False

    def repeats_group_run(self, run: BlockStored, later: LaterEvents, holds: _Holds) -> bool | None:
        """Return whether another group's run from a prompt's start is a report; None if it is ambiguous.

        Such a run lists all blocks of the prefix, including those that only the lead group holds.
        """
        is_continued = later.continues(run)
        if not ((is_continued or self.in_episode) and _safely(holds, run)):
            return False
        return True if is_continued else None

    def reset(self, *, in_episode: bool = False) -> None:
        """Start a new epoch, in an episode or not."""
        self._stores_left = _EPISODE_STORES if in_episode else 0


class UncertainCopies:
    """Copies in one pod epoch that the engine may or may not hold, and blocks that have no other copy.

    The index counts only certain copies. When a block's last certain copy is removed, an uncertain one
    replaces it, and the block is doubtful until a later event decides. Engines evict the least recently used
    block. So when a block is evicted that was stored after a doubt began, the doubtful block was evicted
    before it, unless an event has shown it in use since.
    """

    def __init__(self, max_blocks: int = 20_000) -> None:
        self._max_blocks = max_blocks  # of blocks with uncertain copies; the default takes a few megabytes
        # Number of uncertain copies, by hash and tier.
        self._copies = Counter[tuple[EngineHash, str]]()
        # Doubtful blocks, and blocks stored while there were any, with the value of `_doubts` at that time.
        self._doubtful: dict[tuple[EngineHash, str], int] = {}
        self._stored_later: dict[tuple[EngineHash, str], int] = {}
        self._doubts = 0
        self.has_inferred = False  # whether a block was removed by inference from evictions, not by an event

    def __len__(self) -> int:
        return len(self._copies) + len(self._doubtful)

    @property
    def has_doubtful(self) -> bool:
        """Return whether a block counts as held although the engine may have evicted it."""
        return bool(self._doubtful)

    def add(self, hashes: Collection[EngineHash], tier: str) -> bool:
        """Add an uncertain copy of each block; return False without effect if the limit is reached."""
        if len(self) + len(hashes) > self._max_blocks:
            return False
        self._copies.update((engine_hash, tier) for engine_hash in hashes)
        return True

    def replace_last(self, engine_hash: EngineHash, tier: str) -> bool:
        """Record that a block lost its last certain copy; return whether an uncertain one replaces it."""
        block = engine_hash, tier
        self._doubtful.pop(block, None)
        if (copies := self._copies.pop(block, 0)) == 0:
            return False
        if copies > 1:
            self._copies[block] = copies - 1
        self._doubts += 1
        self._doubtful[block] = self._doubts
        return True

    def on_evicted(self, engine_hash: EngineHash, tier: str) -> list[EngineHash]:
        """Record that a block was evicted; return the doubtful blocks that were evicted before it."""
        begun = self._stored_later.pop((engine_hash, tier), 0)
        gone = [block for block, doubt in self._doubtful.items() if doubt <= begun and block[1] == tier]
        self.has_inferred |= bool(gone)
        for block in gone:
            del self._doubtful[block]
            self._copies.pop(block, None)
        if not self._doubtful:
            self._stored_later.clear()
        return [engine_hash for engine_hash, _ in gone]

    def confirm(self, hashes: Collection[EngineHash], tier: str) -> None:
        """Record that the engine holds these blocks."""
        if self._doubtful:
            for engine_hash in hashes:
                self._doubtful.pop((engine_hash, tier), None)

    def on_stored(self, hashes: Collection[EngineHash], tier: str) -> list[EngineHash]:
        """Record a certain copy of each block; return the blocks that were doubtful."""
        if not self._doubtful:
            return []
        doubtful = [engine_hash for engine_hash in hashes if (engine_hash, tier) in self._doubtful]
        for engine_hash in doubtful:
            del self._doubtful[engine_hash, tier]
            self._copies[engine_hash, tier] += 1
        if len(self._stored_later) + len(hashes) <= self._max_blocks:
            self._stored_later.update(dict.fromkeys([(each, tier) for each in hashes], self._doubts))
        return doubtful

    def clear(self) -> None:
        self._copies.clear()
        self._doubtful.clear()
        self._stored_later.clear()
        self.has_inferred = False


def _safely(holds: _Holds, run: BlockStored) -> bool:
    try:
        return holds(run)
    except TokenError:
        return False
