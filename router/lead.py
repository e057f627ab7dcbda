"""Threads of which one at a time leads: it does whatever comes, and has another lead before it waits.

So a request is served by the thread that received it, without a hand-over, and yet holds up nobody (the
pattern "Leader/Followers", Schmidt et al., PLoP 2000). Knows nothing of what is done.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from threading import get_ident

_log = logging.getLogger(__name__)

# Threads beyond these end when they have nothing more to do.
_FOLLOWERS_MAX = 8
_RETRY_S = 1.0


class Lead:
    """A lead, and the threads that have it in turn: one, a few in reserve, and one for each that waits.

    Args:
        name: Of the threads.
        turn: What the leading thread does again and again, as long as it leads; False: all is over.
        leave: Called by the leading thread before another one leads.
    """

    def __init__(self, name: str, turn: Callable[[], bool], leave: Callable[[], None]) -> None:
        self._name = name
        self._turn = turn
        self._leave = leave
        self._leader = 0
        self._followers = 0
        self._lock = threading.Lock()
        # Held by the thread that leads.
        self._held = threading.Lock()
        self._has_begun = False
        self._over = threading.Event()

    @property
    def is_mine(self) -> bool:
        """Whether the thread that asks leads."""
        return self._leader == get_ident()

    def start(self) -> None:
        """Begins.

        Raises:
            RuntimeError: The system has no more threads.
        """
        threading.Thread(target=self._run, name=self._name, daemon=True).start()
        self._has_begun = True

    def hand_over(self) -> None:
        """Has another thread lead from now on; does nothing on one that does not lead."""
        if not self.is_mine:
            return
        with self._lock:
            is_followed = self._followers > 0
            self._followers -= is_followed
        if not is_followed:
            try:
                self.start()
            except RuntimeError:
                _log.exception("no thread can take the lead: what comes has to wait, too")
                return
        self._leave()
        self._leader = 0
        self._held.release()

    def join(self, timeout_s: float) -> bool:
        """Waits for the end; whether nothing goes on any more."""
        return not self._has_begun or self._over.wait(timeout_s)

    def _run(self) -> None:
        while self._follow():
            self._leader = get_ident()
            while self.is_mine:
                try:
                    goes_on = self._turn()
                except Exception:
                    # Without a lead nobody would be served any more.
                    _log.exception("a turn failed; the next one follows")
                    time.sleep(_RETRY_S)
                    continue
                if not goes_on:
                    self._over.set()
                    self._leader = 0
                    self._held.release()
            with self._lock:
                if self._followers >= _FOLLOWERS_MAX:
                    return
                self._followers += 1

    def _follow(self) -> bool:
        """Waits for the lead; whether there is still one to be had."""
        self._held.acquire()
        if self._over.is_set():
            self._held.release()
            return False
        return True
