"""An iterator that another thread can interrupt while its reader waits for the next item.

gRPC's own iterator of a stream's messages cannot be woken, so a thread of its own reads it from here on.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from threading import Condition, Thread
from typing import Generic, TypeVar

_Item = TypeVar("_Item")

# The sender waits for the reader as it would without the thread between them.
_AHEAD = 2


class Interruptible(Generic[_Item]):
    """Items of another iterator, until it ends or `interrupt` is called.

    Attributes:
        is_interrupted: Whether that is why it ended.
    """

    def __init__(self, source: Iterator[_Item]) -> None:
        self._source = source
        self._items: deque[_Item] = deque()
        self._is_over = False
        self.is_interrupted = False
        self._changed = Condition()
        Thread(target=self._read, name="stream-reader", daemon=True).start()

    def __iter__(self) -> Iterator[_Item]:
        return self

    def __next__(self) -> _Item:
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._is_over)
            if self.is_interrupted or not self._items:
                raise StopIteration
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def interrupt(self) -> None:
        """Ends the iteration, also for a reader that waits."""
        with self._changed:
            self.is_interrupted = self._is_over = True
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing will be read any more."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _read(self) -> None:
        # A stream that breaks has ended to its reader, as it does when the client is gone.
        with contextlib.suppress(Exception):
            for item in self._source:
                with self._changed:
                    self._changed.wait_for(lambda: len(self._items) < _AHEAD or self._is_over)
                    if self._is_over:
                        break
                    self._items.append(item)
                    self._changed.notify_all()
        self.close()
