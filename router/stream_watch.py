"""What watchers are told of the streams of a gRPC method."""

from __future__ import annotations

from typing import Protocol

OK, CANCELED, UNKNOWN = "OK", "Canceled", "Unknown"


class Cancellable(Protocol):
    """Whatever can be ended from outside."""

    def cancel(self) -> object:
        """Ends it, as if the client had."""


class OpenStream(Protocol):
    """What a watcher keeps of one stream; told by one thread at a time.

    Once there is an answer it may be told of nothing but the end.
    """

    def waits(self) -> None:
        """The stream waits for its client's next message."""

    def serves(self) -> None:
        """It does so no more."""

    def answered(self) -> None:
        """An answer is there."""

    def closed(self, code: str) -> None:
        """The stream has ended: OK, CANCELED or UNKNOWN."""


class StreamWatcher(Protocol):
    """Told of every stream of a method."""

    def opened(self, stream: Cancellable) -> OpenStream:
        """A stream begins."""
