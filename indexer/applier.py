"""The outcome of applying the payloads of one pod's stream: values only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from indexer.applied import Applied
from indexer.decode import UNKNOWN_EVENT

# Skipped for these reasons, a store leaves the view as it should be.
_HARMLESS = frozenset({"unknown_hash"})


@dataclass(slots=True)
class Outcome:
    """What applying payloads did.

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
        """The view is not what the engine holds."""
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
