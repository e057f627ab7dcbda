"""Requests in flight that may be taken back for more important ones: who they are, and who goes first.

Pure bookkeeping, safe to call from any thread; how a request is ended is its door's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from threading import Lock


@dataclass(frozen=True, slots=True)
class Evictable:
    """One request in flight.

    Attributes:
        number: In the order of their coming.
        evict: Ends it; must not block.
    """

    priority: int
    number: int
    evict: Callable[[], None]


class Evictions:
    """The requests in flight whose priority is below 0; as many as doors have streams."""

    def __init__(self) -> None:
        self._inside: dict[int, Evictable] = {}
        self._numbers = count()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._inside)

    def enter(self, priority: int, evict: Callable[[], None]) -> Evictable:
        entry = Evictable(priority, next(self._numbers), evict)
        with self._lock:
            self._inside[entry.number] = entry
        return entry

    def leave(self, entry: Evictable) -> None:
        """It is over; idempotent."""
        with self._lock:
            self._inside.pop(entry.number, None)

    def evict(self) -> bool:
        """Takes back the least important, of several the latest, which loses least; False: there is none."""
        with self._lock:
            if not self._inside:
                return False
            victim = min(self._inside.values(), key=lambda entry: (entry.priority, -entry.number))
            del self._inside[victim.number]
        victim.evict()
        return True
