"""Streams whose request never comes: they are cut off, the oldest first, when places for streams get scarce.

Each open ext_proc stream holds a thread. A client that sends its request slowly, or not at all, would hold
one as long as it likes; here it does so only while nobody else needs it. Streams that have their answer, and
those whose request is complete and waits for its turn, are never cut.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from threading import Lock
from typing import Any

import grpc

from router.stream_interceptor import Serve, StreamInterceptor

_log = logging.getLogger(__name__)

# From this share of the places on there is a crowd; it is thinned out down to the second one.
_CROWDED, _RELIEVED = 0.9, 0.75
_PATIENCE_S = 2.0


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A stream that waits for its client's next message, within its request.

    Attributes:
        opened_s: When the stream began; a client that sends byte by byte is no better than one that does not.
    """

    context: grpc.ServicerContext
    opened_s: float


class SlowStreams(StreamInterceptor):
    """Watches the streams of one method.

    Args:
        method: "/package.Service/Method".
        streams_max: Streams that are served at once.
        cut: Told of each one that is cut off.
        patience_s: None is that was opened later than this ago.
    """

    def __init__(
        self,
        method: str,
        streams_max: int,
        cut: Callable[[], object],
        *,
        patience_s: float = _PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(method)
        self._streams_max = streams_max
        self._cut = cut
        self._patience_s = patience_s
        self._clock = clock
        self._numbers = count()
        self._open = 0
        self._waiting: dict[int, _Waiting] = {}
        self._is_crowded = False
        self._lock = Lock()

    def watch(self, serve: Serve, messages: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """See `StreamInterceptor`."""
        watched = _Messages(self, messages, _Waiting(context, self._clock()))
        self._count(1)
        try:
            for answer in serve(watched, context):
                watched.is_answered = True
                yield answer
        finally:
            self._count(-1)

    def relieve(self) -> int:
        """Cuts off the oldest of those that wait, if there is a crowd; answers how many."""
        with self._lock:
            is_crowded = self._open >= _CROWDED * self._streams_max
            surplus = int(self._open - _RELIEVED * self._streams_max)
            is_news, self._is_crowded = is_crowded and not self._is_crowded, is_crowded
            waiting = list(self._waiting.values()) if is_crowded else []
        latest_s = self._clock() - self._patience_s
        late = sorted((one for one in waiting if one.opened_s <= latest_s), key=lambda one: one.opened_s)
        victims = late[:surplus]
        for victim in victims:
            self._cut()
            victim.context.cancel()
        if is_news:
            _log.warning(
                "%d of %d places for streams are taken; requests that come too slowly are cut off",
                self._open,
                self._streams_max,
            )
        return len(victims)

    def begin_wait(self, stream: _Waiting) -> int:
        """A stream begins to wait for its client; answers a number for `end_wait`."""
        number = next(self._numbers)
        with self._lock:
            self._waiting[number] = stream
        return number

    def end_wait(self, number: int) -> None:
        """It has a message, or has ended."""
        with self._lock:
            del self._waiting[number]

    def _count(self, change: int) -> None:
        with self._lock:
            self._open += change


class _Messages:
    """A stream's messages; waiting for one is noted until the stream has had its first answer."""

    __slots__ = ("_requests", "_stream", "_streams", "is_answered")

    def __init__(self, streams: SlowStreams, requests: Iterator[Any], stream: _Waiting) -> None:
        self._streams = streams
        self._requests = requests
        self._stream = stream
        self.is_answered = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.is_answered:
            return next(self._requests)
        number = self._streams.begin_wait(self._stream)
        try:
            return next(self._requests)
        finally:
            self._streams.end_wait(number)
