"""Stores that tell again what is there, as vLLM does for requests with kv_cache_report_mode=full.

Such a store announces the blocks that a request found in the cache, from its prompt's start, before those
that it adds. It looks like a store of further copies, but no removals will follow. Pure bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from indexer.errors import TokenError
from indexer.events import BlockStored, EngineHash, KVEvent


class Ahead:
    """What comes in a batch behind the event at `position`.

    Attributes:
        position: Place of the event that is applied now.
    """

    def __init__(self, events: Sequence[KVEvent]) -> None:
        self.position = 0
        self._events = events
        self._last_child: dict[tuple[int | None, EngineHash], int] | None = None

    def continues(self, run: BlockStored) -> bool:
        """Whether a later store of the same group continues this run."""
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
    other the first was not new, if the pod holds all of it. An engine that did this once does it also for
    requests that add nothing, whose store nothing continues.
    """

    def __init__(self) -> None:
        self._seen = False

    @property
    def seen(self) -> bool:
        """Whether the engine did it once."""
        return self._seen

    def of_lead(self, run: BlockStored, ahead: Ahead, holds: Callable[[BlockStored], bool]) -> bool:
        """Whether a lead group's run from a prompt's start is told again.

        Args:
            run: The store.
            ahead: What follows it.
            holds: Whether the lead group holds such a run; may raise TokenError, then it does not.
        """
        is_continued = ahead.continues(run)
        told_again = (is_continued or self._seen) and _safely(holds, run)
        self._seen |= told_again and is_continued
        return told_again

    def of_group(self, run: BlockStored, ahead: Ahead, holds: Callable[[BlockStored], bool]) -> bool | None:
        """Whether another group's run from a prompt's start is told again; None if it may be either.

        Such a run names all blocks of the prefix, also those that the group does not hold; it is the lead
        group that holds them.
        """
        is_continued = ahead.continues(run)
        if not ((is_continued or self._seen) and _safely(holds, run)):
            return False
        return True if is_continued else None

    def forget(self, *, seen: bool = False) -> None:
        """Begins a new life, of which is known whether it did it once."""
        self._seen = seen


def _safely(holds: Callable[[BlockStored], bool], run: BlockStored) -> bool:
    try:
        return holds(run)
    except TokenError:
        return False
