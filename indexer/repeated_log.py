"""Warnings that a peer can repeat at will: one line a minute and source, with the number of events.

Knows nothing of the events. The number of sources is bounded; time comes from a clock that is passed in.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

EVERY_S = 60.0
SOURCES_MAX = 64
_OTHERS = "other sources"


@dataclass(slots=True)
class _Source:
    logged_s: float
    unlogged: int = 0


class RepeatedLog:
    """Log the first event of each source at once, and later ones as a number once a minute.

    Numbers that wait are logged with the next event of any source. Safe to share between threads.

    Args:
        log: Logger of the component that observes the events.
        level: Level of the lines.
        clock: Time in seconds.
    """

    def __init__(
        self, log: logging.Logger, level: int = logging.WARNING, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._level = level
        self._clock = clock
        self._lock = threading.Lock()
        self._sources: dict[str, _Source] = {}
        self._swept_s = clock()

    def event(self, source: str, message: str, *values: object) -> None:
        """Count an event, and log it unless its source has had a line within the last minute.

        Args:
            source: Listener, and the peer's address without its port; beyond `SOURCES_MAX` sources are
                counted together.
            message: Line with `%` placeholders for `values`, as for `logging`.
        """
        now_s = self._clock()
        with self._lock:
            late = self._sweep(now_s)
            if source not in self._sources and len(self._sources) >= SOURCES_MAX:
                source = _OTHERS
            known = self._sources.get(source)
            if known is not None:
                known.unlogged += 1
            else:
                self._sources[source] = _Source(now_s)
        for name, number in late:
            self._log.log(self._level, "%s: %d more like this", name, number)
        if known is None:
            self._log.log(self._level, message, *values)

    def _sweep(self, now_s: float) -> list[tuple[str, int]]:
        """Return numbers that are due, and forget sources that were quiet for a minute."""
        if now_s - self._swept_s < 1.0:
            return []
        self._swept_s = now_s
        due = {name: source for name, source in self._sources.items() if now_s - source.logged_s >= EVERY_S}
        for name, source in due.items():
            if source.unlogged == 0:
                del self._sources[name]
        late = [(name, source.unlogged) for name, source in due.items() if source.unlogged]
        for name, _ in late:
            self._sources[name] = _Source(now_s)
        return late
