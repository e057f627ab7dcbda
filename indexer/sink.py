"""What the subscriber needs of whoever takes the streams: the border between sockets and the index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from indexer.config import PodStream
from indexer.snapshot import Fetched
from indexer.stream import StreamState
from indexer.view_parts import ViewContent, ViewFacts, ViewPart


@dataclass(frozen=True, slots=True)
class Verdict:
    """What applying batches told about the view.

    Attributes:
        emptied: The engine said that its cache is empty.
        damage: What could not be applied, after that; None for nothing.
        ends_empty: Whether the engine said that its cache is empty, and has stored nothing since.
    """

    emptied: bool = False
    damage: str | None = None
    ends_empty: bool = False


class StreamSink(Protocol):
    """Where the streams of all pods end; called on the subscriber's thread.

    A `pod` below is one engine, by its name in the index: `PodStream.holder`.
    """

    def opened(self, stream: PodStream) -> None:
        """A pod is followed from now on."""
        ...

    def closed(self, pod: str) -> None:
        """A pod is not followed any more."""
        ...

    def apply(self, pod: str, payloads: Sequence[bytes]) -> Verdict:
        """Applies batches, in order."""
        ...

    def clear(self, pod: str, reason: str) -> None:
        """Drops the view of the pod."""
        ...

    def link(self, pod: str, up: bool) -> None:
        """The connection to the pod's publisher was made or lost."""
        ...

    def state(self, pod: str, state: StreamState, reason: str) -> None:
        """The state of the pod's stream changed."""
        ...

    def received(self, pod: str, batches: int, gaps: int) -> None:
        """Live batches came in, and gaps were found between them."""
        ...

    def replay(self, pod: str, outcome: str) -> None:
        """A replay ended."""
        ...

    def snapshot(self, pod: str, outcome: str) -> None:
        """A snapshot of the engine itself was applied, or could not be had."""
        ...

    def list_view(self, pod: str) -> ViewContent:
        """Begins to list the view for a peer; until its last part the pod is told nothing.

        Raises:
            PeerError: The list would not be all of it.
        """
        ...

    def restore_facts(self, pod: str, facts: ViewFacts) -> None:
        """Begins a new view from a peer's: what its events told."""
        ...

    def restore(self, pod: str, part: ViewPart) -> None:
        """Adds a part of a peer's view."""
        ...

    def restored(self, pod: str, fetched: Fetched, took_s: float) -> None:
        """A snapshot was applied, so long after it was asked for."""
        ...

    def built(self, pod: str, source: str) -> None:
        """A view settled.

        Args:
            pod: Whose.
            source: Where it comes from: "engine", "peer" or "replay"; "none" where it lacks something.
        """
        ...

    def rejected(self, pod: str, reason: str) -> None:
        """A message could not be read."""
        ...

    def socket_error(self, pod: str, operation: str) -> None:
        """A socket could not be used."""
        ...
