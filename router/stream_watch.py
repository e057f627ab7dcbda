"""What stands around every stream of a gRPC method: its messages, answers and end in, watchers told.

Knows nothing of what is watched, nor of what the method does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import grpc

OK, CANCELED, UNKNOWN = "OK", "Canceled", "Unknown"

# serve(messages, context): the answers.
Serve = Callable[[Iterator[Any], grpc.ServicerContext], Iterator[Any]]


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


def watched(serve: Serve, watchers: Sequence[StreamWatcher]) -> Serve:
    """The same method, watched."""

    def process(messages: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        streams = [watcher.opened(context) for watcher in watchers]
        code = OK
        try:
            for answer in serve(_told(messages, streams), context):
                for stream in streams:
                    stream.answered()
                yield answer
        except BaseException:
            # A client that goes away ends the iteration of its own messages with an error.
            code = UNKNOWN if context.is_active() else CANCELED
            raise
        finally:
            for stream in streams:
                stream.closed(code)

    return process if watchers else serve


def _told(messages: Iterator[Any], streams: Sequence[OpenStream]) -> Iterator[Any]:
    while True:
        for stream in streams:
            stream.waits()
        try:
            message = next(messages, None)
        finally:
            for stream in streams:
                stream.serves()
        if message is None:
            return
        yield message
