"""Log lines that peers can cause at will: few a minute and source, with the number of the rest; a metric.

Knows nothing of the events. The number of sources is bounded; time comes from a clock that is passed in.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import Counter

EVERY_S = 60.0
SOURCES_MAX = 64
_OTHERS = "other sources"
_SWEEP_EVERY_S = 1.0

# Events of all `RepeatedLog`s of the process, logged or not.
REPEATED_EVENTS = Counter(
    "kvroute_repeated_events",
    "Events that peers can repeat at will; the log has few of them a minute and source.",
    ["event"],
    registry=None,
)


@dataclass(slots=True)
class _Source:
    began_s: float
    lines: int = 0
    unlogged: int = 0


class RepeatedLog:
    """Log the first events of each source at once, and further ones as a number once a minute.

    Numbers that wait are logged with the next event of any source. Safe to share between threads.
    """

    def __init__(
        self,
        log: logging.Logger,
        *,
        lines: int = 1,
        sources_max: int = SOURCES_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._lines = lines  # a minute and source
        self._sources_max = sources_max  # those beyond share one number of lines
        self._clock = clock
        self._lock = threading.Lock()
        self._sources: dict[str, _Source] = {}
        self._swept_s = clock()

    def event(
        self,
        kind: str,
        source: str,
        message: str,
        *values: object,
        level: int = logging.WARNING,
        error: BaseException | None = None,
    ) -> None:
        """Count an event, and log it unless its source has had its lines within the last minute.

        Args:
            kind: Label of `kvroute_repeated_events_total`, one of few.
            source: Name without anything that a peer chooses anew each time, such as a client's port.
            error: Logged with its traceback.
        """
        REPEATED_EVENTS.labels(kind).inc()
        now_s = self._clock()
        with self._lock:
            late = self._sweep(now_s)
            if source not in self._sources and len(self._sources) >= self._sources_max:
                source = _OTHERS
            known = self._sources.setdefault(source, _Source(now_s))
            is_logged = known.lines < self._lines
            known.lines += is_logged
            known.unlogged += not is_logged
        for name, number in late:
            self._log.warning("%s: %d more log lines like the last ones were left out", name, number)
        if is_logged:
            self._log.log(level, message, *values, exc_info=error)

    def _sweep(self, now_s: float) -> list[tuple[str, int]]:
        if now_s - self._swept_s < _SWEEP_EVERY_S:
            return []
        self._swept_s = now_s
        over = [name for name, source in self._sources.items() if now_s - source.began_s >= EVERY_S]
        late = [(name, number) for name in over if (number := self._sources.pop(name).unlogged)]
        for name, _ in late:
            # Its number was this minute's line.
            self._sources[name] = _Source(now_s, lines=1)
        return late
