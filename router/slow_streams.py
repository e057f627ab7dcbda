"""Streams whose request never comes: they are cut off, the oldest first, when places for streams get scarce.

A client that sends its request slowly, or not at all, would hold its place, and often a thread, as long as
it likes; here it does so only while nobody else needs it. Streams that have their answer, and those whose
request is complete and waits for its turn, are never cut.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from threading import Lock

from router.stream_watch import Cancellable

_log = logging.getLogger(__name__)

# From this share of the places on there is a crowd; it is thinned out down to the second one.
_CROWDED, _RELIEVED = 0.9, 0.75
_PATIENCE_S = 2.0


class SlowStreams:
    """Watches the streams of one method.

    Args:
        streams_max: Streams that are served at once.
        cut: Told of each one that is cut off.
        patience_s: None is that was opened later than this ago.
    """

    def __init__(
        self,
        streams_max: int,
        cut: Callable[[], object],
        *,
        patience_s: float = _PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._streams_max = streams_max
        self._cut = cut
        self._patience_s = patience_s
        self._clock = clock
        self._open = 0
        self._waiting: set[_Watched] = set()
        self._is_crowded = False
        self._lock = Lock()

    def opened(self, stream: Cancellable) -> _Watched:
        """See `StreamWatcher`."""
        with self._lock:
            self._open += 1
        return _Watched(self, stream, self._clock())

    def relieve(self) -> int:
        """Cuts off the oldest of those that wait, if there is a crowd; answers how many."""
        with self._lock:
            is_crowded = self._open >= _CROWDED * self._streams_max
            surplus = int(self._open - _RELIEVED * self._streams_max)
            is_news, self._is_crowded = is_crowded and not self._is_crowded, is_crowded
            waiting = list(self._waiting) if is_crowded else []
        latest_s = self._clock() - self._patience_s
        late = sorted((one for one in waiting if one.opened_s <= latest_s), key=lambda one: one.opened_s)
        victims = late[:surplus]
        for victim in victims:
            self._cut()
            victim.stream.cancel()
        if is_news:
            _log.warning(
                "%d of %d places for streams are taken; requests that come too slowly are cut off",
                self._open,
                self._streams_max,
            )
        return len(victims)

    def note_wait(self, stream: _Watched, waits: bool) -> None:
        """A stream begins to wait for its client, or ends it."""
        with self._lock:
            if waits:
                self._waiting.add(stream)
            else:
                self._waiting.discard(stream)

    def note_end(self, stream: _Watched) -> None:
        """A stream has ended."""
        with self._lock:
            self._waiting.discard(stream)
            self._open -= 1


class _Watched:
    """A stream.

    Attributes:
        opened_s: When it began; a client that sends byte by byte is no better than one that does not.
    """

    __slots__ = ("_is_answered", "_streams", "opened_s", "stream")

    def __init__(self, streams: SlowStreams, stream: Cancellable, opened_s: float) -> None:
        self._streams = streams
        self._is_answered = False
        self.stream = stream
        self.opened_s = opened_s

    def waits(self) -> None:
        """See `OpenStream`."""
        if not self._is_answered:
            self._streams.note_wait(self, True)

    def serves(self) -> None:
        """See `OpenStream`."""
        if not self._is_answered:
            self._streams.note_wait(self, False)

    def answered(self) -> None:
        """See `OpenStream`."""
        self._is_answered = True

    def closed(self, _code: str) -> None:
        """See `OpenStream`."""
        self._streams.note_end(self)
