"""Payloads of one pod's stream to changes of the index, and what came of them.

Payloads come in, in order; the pod's view applies their events. An applier counts, and says whether the view
is still what the engine holds; it knows no sequences, no metrics and no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from indexer.applied import Applied
from indexer.apply import PodView
from indexer.decode import UNKNOWN_EVENT, decode_batch
from indexer.errors import PayloadError

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


class Applier(Protocol):
    """Applies the payloads of one pod."""

    def apply(self, payloads: Sequence[bytes], *, with_runs: bool = False) -> Outcome:
        """Applies payloads in order, whatever they hold.

        Args:
            with_runs: Whether `Applied.runs` are wanted.
        """
        ...


class DecodingApplier:
    """An `Applier` for any index: decodes each batch, and applies it event by event.

    Args:
        view: The pod's view.
        max_bytes: A longer payload is not read.
    """

    def __init__(self, view: PodView, max_bytes: int) -> None:
        self._view = view
        self._max_bytes = max_bytes

    def apply(self, payloads: Sequence[bytes], *, with_runs: bool = False) -> Outcome:
        """See `Applier.apply`."""
        outcome = Outcome(Applied(runs=[] if with_runs else None))
        for payload in payloads:
            try:
                decoded = decode_batch(payload, self._max_bytes)
            except PayloadError as error:
                outcome.reject(error.reason)
                continue
            outcome.events.update(type(event).__name__ for event in decoded.batch.events)
            outcome.published_s.append(decoded.batch.ts)
            outcome.take(self._view.apply(decoded.batch, with_runs=with_runs))
            # After a clear in the same batch: nobody knows on which side of it a broken event was.
            for reason in decoded.rejected:
                outcome.reject(reason)
        return outcome
