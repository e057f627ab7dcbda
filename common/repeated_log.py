"""Rate-limited log lines for events that clients can repeat at will, counted by a metric."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from prometheus_client import Counter

EVERY_S = 60.0
SOURCES_MAX = 64
_OTHERS = "other sources"
_SWEEP_EVERY_S = 1.0

# Events of all `RepeatedLog`s of the process, logged or not.
REPEATED_EVENTS = Counter(
    "kvroute_repeated_events",
    "Events that clients can repeat at will, whether logged or suppressed.",
    ["event"],
    registry=None,
)


@dataclass(slots=True)
class _Source:
    began_s: float
    lines: int = 0
    unlogged: int = 0


@dataclass(eq=False)
class RepeatedLog:
    """Logger of the first events of each source per minute; the number of further ones is logged later.

    The numbers are logged with the next event of any source. Thread-safe; the number of sources is bounded.
    """

    log: logging.Logger
    _: KW_ONLY
    lines: int = 1  # per minute and source
    sources_max: int = SOURCES_MAX  # further sources share one limit
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._sources: dict[str, _Source] = {}
        self._swept_s = self.clock()

    def event(
        self,
        kind: str,
        source: str,
        message: str,
        *values: object,
        level: int = logging.WARNING,
        error: BaseException | None = None,
    ) -> None:
        """Count an event, and log it unless its source has used up its lines of the last minute.

        Args:
            kind: Label of `kvroute_repeated_events_total`; one of a fixed set.
            source: Source name without parts that change with each connection, such as a client's port.
            error: Exception to log with its traceback.
        """
        REPEATED_EVENTS.labels(kind).inc()
        now_s = self.clock()
        with self._lock:
            late = self._sweep(now_s)
            if source not in self._sources and len(self._sources) >= self.sources_max:
                source = _OTHERS
            known = self._sources.setdefault(source, _Source(now_s))
            is_logged = known.lines < self.lines
            known.lines += is_logged
            known.unlogged += not is_logged
        for name, number in late:
            self.log.warning("log lines suppressed: source=%s count=%d", name, number)
        if is_logged:
            self.log.log(level, message, *values, exc_info=error)

    def _sweep(self, now_s: float) -> list[tuple[str, int]]:
        if now_s - self._swept_s < _SWEEP_EVERY_S:
            return []
        self._swept_s = now_s
        over = [name for name, source in self._sources.items() if now_s - source.began_s >= EVERY_S]
        late = [(name, number) for name in over if (number := self._sources.pop(name).unlogged)]
        for name, _ in late:
            # The line with the number counts as a line of the new minute.
            self._sources[name] = _Source(now_s, lines=1)
        return late
