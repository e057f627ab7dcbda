"""Circuit breaker of rendering by a model's own pods, which the router chooses by itself."""

from __future__ import annotations

import threading
from typing import Any

FAILURES_MAX = 5  # consecutive failed or late answers after which requests are routed by load
PAUSE_S, PAUSE_MAX_S = 2.0, 300.0
_ATTEMPT_S = 10.0  # longer than an attempt takes


class RenderBreaker:
    """State of one model's rendering: one request tries it; once it works, all use it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works = self._is_tried = False
        self._failures = 0  # consecutive
        self._pause_s, self._resumes_s = PAUSE_S, 0.0  # length and end of the next pause
        self._error = ""  # reason of the pause; empty if there is none

    def allows(self, now_s: float) -> bool:
        """Return whether a request may ask the pods; during an attempt no other may."""
        with self._lock:
            if not self._works and now_s >= self._resumes_s:
                self._is_tried, self._resumes_s = True, now_s + _ATTEMPT_S
                return True
            return self._works

    def report(self, error: str, now_s: float, *, is_final: bool = False) -> bool:
        """Record an answer; return whether rendering begins to work, or the first of several pauses begins.

        Args:
            error: Why the answer is of no use; empty if it is in time.
            is_final: Whether the next request would fail as well, because the pods have no such endpoint.
        """
        with self._lock:
            if not error:
                begins = not self._works
                self._works, self._failures, self._pause_s, self._error = True, 0, PAUSE_S, ""
                return begins
            self._failures += 1
            is_rare = self._works and self._failures < FAILURES_MAX and not is_final
            if is_rare or not (self._works or self._is_tried):  # or asked before the pause
                return False
            begins = not self._error
            self._works = self._is_tried = False
            self._error, self._resumes_s = error, now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)
            return begins

    def state(self, now_s: float) -> dict[str, Any]:
        """Return the state for /ready."""
        seconds = 0.0 if self._works else round(max(0.0, self._resumes_s - now_s), 1)
        name = "rendering" if self._works else "paused" if self._error else "not tried"
        return {"state": name, "seconds_left": seconds, "error": self._error}
