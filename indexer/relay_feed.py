"""What one engine's view tells the relay, while this router holds the engine's lease.

An epoch begins with a list of the view, and each entry is what the batches since the last one did. It ends as
soon as the view is not exact any more. Runs on the subscriber's thread only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from xxhash import xxh3_128_digest

from indexer.journal import Entry, encode_entry
from indexer.stream import StreamMachine, StreamState
from indexer.view_parts import ViewFacts

if TYPE_CHECKING:
    from indexer.ingest import Ingest
    from indexer.relay import Relay

# Number of an epoch's first entry, which changes nothing: no number before it was ever an epoch's.
FIRST = 1


class Position(NamedTuple):
    """A place in an epoch: number and XXH3-128 of the entry there."""

    number: int
    digest: bytes


class Feed:
    """Entries of one engine.

    Args:
        holder: The engine's name in the index.
        sink: Where its view is.
        relay: Takes the entries.
    """

    def __init__(self, holder: str, sink: Ingest, relay: Relay) -> None:
        self._holder = holder
        self._sink = sink
        self._relay = relay
        self._epoch: str | None = None
        self._last = Position(0, b"")
        self._facts: ViewFacts | None = None

    @property
    def epoch(self) -> str | None:
        """The epoch that entries are told of; None: none are told."""
        return self._epoch

    def begin(self, epoch: str, mark: tuple[int, bytes]) -> Position:
        """Begin an epoch with the view as it is, or go on with it; return the last entry's position.

        Args:
            epoch: Its name.
            mark: Number and digest of the last batch in the view.
        """
        if epoch != self._epoch:
            state = self._sink.state_of(self._holder)
            state.journal.begin()
            self._epoch, self._last, self._facts = epoch, Position(FIRST - 1, b""), state.view.facts()
            self._tell(epoch, Entry(*mark))
        return self._last

    def flush(self, machine: StreamMachine) -> None:
        """Tell what changed since the last entry, or end the epoch of a view that is not exact."""
        if self._epoch is None:
            return
        state = self._sink.state_of(self._holder)
        if machine.state is not StreamState.EXACT or state.view.unlisted == "part_runs":
            self.end()
        elif (mark := machine.mark) is not None:
            changes, facts = state.journal.take(), state.view.facts()
            if changes or facts != self._facts:
                self._tell(self._epoch, Entry(*mark, facts if facts != self._facts else None, changes))
                self._facts = facts

    def end(self) -> None:
        """End the epoch, if there is one."""
        if self._epoch is not None:
            self._relay.ended(self._holder, self._epoch)
            self._epoch = None
            self._sink.state_of(self._holder).journal.end()

    def _tell(self, epoch: str, entry: Entry) -> None:
        data = encode_entry(entry)
        self._last = Position(self._last.number + 1, xxh3_128_digest(data))
        self._relay.tell(self._holder, epoch, self._last.number, data)
