"""Connections that hold answers back in; sent is what they still hold when it has waited for too long.

A connection's own thread sends what it holds between two calls. Only a call that takes its time, tokenizing
or waiting to be admitted, keeps it from that: then another thread does. Knows nothing of sockets.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Condition, Thread
from typing import Protocol

_LATE_S = 0.004
# Each look takes the interpreter from the connections for a moment.
_LOOK_S = 0.005


class Holder(Protocol):
    """A connection.

    Attributes:
        held_since_s: When it began to hold back what it holds (monotonic); None: it holds nothing.
    """

    held_since_s: float | None

    def flush(self) -> None:
        """Sends what it holds; may wait for its client."""


class LateAnswers:
    """Looks after holders, on a thread that sleeps while there are none.

    Args:
        run: Has a task done on another thread.
    """

    def __init__(self, run: Callable[[Callable[[], object]], object]) -> None:
        self._run = run
        self._holders: set[Holder] = set()
        self._changed = Condition()
        self._is_closed = False
        self._thread = Thread(target=self._look, name="grpc-late", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def close(self) -> None:
        """Ends looking. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def watch(self, holder: Holder) -> None:
        """Looks after one until it holds nothing any more."""
        # Without the lock: whoever takes it out of the set looks at it then, and sees what it holds now.
        if holder not in self._holders:
            with self._changed:
                self._holders.add(holder)
                self._changed.notify()

    def _look(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._holders or self._is_closed)
                if self._is_closed:
                    return
            time.sleep(_LOOK_S)
            with self._changed:
                holders, self._holders = self._holders, set()
            for holder in holders:
                since_s = holder.held_since_s
                if since_s is None:
                    continue
                if time.monotonic() - since_s > _LATE_S:
                    self._run(holder.flush)
                else:
                    self.watch(holder)
