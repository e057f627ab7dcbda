"""Results of applying events to a view, and payloads of one pod's stream: values only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from indexer.decode import UNKNOWN_EVENT
from indexer.keys import Keys


class StoredRun(msgspec.Struct, frozen=True):
    """A run of new blocks.

    Attributes:
        parent: Key of the block before it, or the prompt's root.
        keys: Its blocks.
        tokens: uint32: the token ids of its first index block, at least; valid until the next batch
            of any pod is applied.
    """

    parent: int
    keys: Keys
    tokens: NDArray[np.uint32]


@dataclass(slots=True)
class Applied:
    """Result of applying one batch.

    Attributes:
        stored: Keys of the blocks that were announced with their tokens, run by run, parents first.
        runs: The same, each with its parent and its tokens; kept only if somebody asked for them.
        removals: Hashes removed whose "last" copy of a tier went, and those of which another "copy" stays.
        skipped: Events or hashes that could not be used, by (event type, reason).
        cleared: Whether the engine told that its cache is empty.
        stored_before_clear: Runs in `stored` that it announced before it said so the last time.
    """

    stored: list[Keys] = field(default_factory=list)
    runs: list[StoredRun] | None = None
    removals: Counter[str] = field(default_factory=Counter)
    skipped: Counter[tuple[str, str]] = field(default_factory=Counter)
    cleared: bool = False
    stored_before_clear: int = 0


# Skipped for these reasons, a store leaves the view as it should be.
_HARMLESS = frozenset({"unknown_hash"})


@dataclass(slots=True)
class Outcome:
    """The outcome of applying payloads.

    Attributes:
        applied: Of all batches together.
        events: Events read, by type.
        rejected: Payloads and events that could not be read, by reason.
        published_s: Time stamps of the batches, by the engine's clock.
        emptied: The engine said that its cache is empty.
        damage: Why the view is not what the engine holds, after that; None if it is.
    """

    applied: Applied = field(default_factory=Applied)
    events: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    published_s: list[float] = field(default_factory=list)
    emptied: bool = False
    damage: str | None = None

    @property
    def ends_empty(self) -> bool:
        """Whether the engine said that its cache is empty, and has stored nothing since."""
        return self.emptied and len(self.applied.stored) == self.applied.stored_before_clear

    def reject(self, reason: str) -> None:
        """Counts what could not be read; kinds of events that we do not know harm nothing."""
        self.rejected[reason] += 1
        if reason != UNKNOWN_EVENT:
            self.doubt(reason)

    def doubt(self, reason: str) -> None:
        self.damage = self.damage or reason

    def take(self, applied: Applied) -> None:
        """Adds what further events did, all of them together."""
        if applied.cleared:
            self.emptied, self.damage = True, None
            self.applied.cleared = True
            self.applied.stored_before_clear = len(self.applied.stored) + applied.stored_before_clear
        self.applied.stored += applied.stored
        if applied.runs and self.applied.runs is not None:
            self.applied.runs += applied.runs
        self.applied.removals += applied.removals
        self.applied.skipped += applied.skipped
        for event_type, reason in applied.skipped:
            if event_type == "BlockStored" and reason not in _HARMLESS:
                self.doubt(reason)
