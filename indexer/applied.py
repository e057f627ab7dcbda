"""What applying events, or payloads of one pod's stream, did to its view: values only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from indexer.decode import UNKNOWN_EVENT
from indexer.keys import Keys


class StoredRun(msgspec.Struct, frozen=True):
    """A run of new blocks."""

    parent: int  # key of the block before it, or the prompt's root
    keys: Keys
    # uint32: token ids of its first index block, at least; valid until the next batch of any pod is applied.
    tokens: NDArray[np.uint32]


# Skipped for these reasons, a store leaves the view as it should be.
_HARMLESS = frozenset({"unknown_hash"})


@dataclass(slots=True)
class Outcome:
    """What applying events or whole payloads did, and which of them could not be used."""

    # Keys of the blocks that were announced with their tokens, run by run, parents first.
    stored: list[Keys] = field(default_factory=list)
    runs: list[StoredRun] | None = None  # the same with parents and tokens; only if somebody asked for them
    removals: Counter[str] = field(default_factory=Counter)  # hashes: a tier's "last", or a "copy" stays
    skipped: Counter[tuple[str, str]] = field(default_factory=Counter)  # events or hashes, by (type, reason)
    events: Counter[str] = field(default_factory=Counter)  # events read, by type
    rejected: Counter[str] = field(default_factory=Counter)  # unreadable payloads and events, by reason
    published_s: list[float] = field(default_factory=list)  # the batches' time stamps, by the engine's clock
    emptied: bool = False  # the engine said that its cache is empty
    stored_before_clear: int = 0  # runs in `stored` that came before it said so the last time
    damage: str | None = None  # why the view is not what the engine holds, after that; None if it is

    @property
    def ends_empty(self) -> bool:
        """Whether the engine said that its cache is empty, and has stored nothing since."""
        return self.emptied and len(self.stored) == self.stored_before_clear

    def clear(self) -> None:
        """Record that the engine's cache is empty: what lacked before lacks no more."""
        self.emptied, self.damage, self.stored_before_clear = True, None, len(self.stored)

    def skip(self, event_type: str, reason: str, number: int = 1) -> None:
        """Count events or hashes that cannot be used; a store that is skipped mostly damages the view."""
        if number:
            self.skipped[event_type, reason] += number
            if event_type == "BlockStored" and reason not in _HARMLESS:
                self.doubt(reason)

    def reject(self, reason: str) -> None:
        """Count what could not be read; kinds of events that we do not know harm nothing."""
        self.rejected[reason] += 1
        if reason != UNKNOWN_EVENT:
            self.doubt(reason)

    def doubt(self, reason: str) -> None:
        self.damage = self.damage or reason
