"""What the process does with its time, for people who ask: /debug/pprof/ as text.

Sampled from outside the threads, so it costs nothing until asked; one profile at a time, bounded in time and
size. A profile's lines are collapsed stacks ("outer;inner count"), which flame graph tools read.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from types import FrameType

from router.debug_http import Page, Query

_EVERY_S = 0.01
_DEFAULT_S, _MOST_S = 30.0, 120.0
_DEPTH_MAX = 100
_STACKS_MAX = 20_000


class Profiling:
    """The pages."""

    def __init__(self) -> None:
        self._running = threading.Lock()

    def pages(self) -> Mapping[str, Page]:
        return {
            "/debug/pprof/": self._index,
            "/debug/pprof/profile": self._profile,
            "/debug/pprof/goroutine": self._threads,
        }

    def _index(self, _query: Query) -> tuple[int, str]:
        return 200, (
            "profile?seconds=N  collapsed stacks of all threads, 100 samples a second (default 30)\n"
            "goroutine          where every thread stands now\n"
        )

    def _profile(self, query: Query) -> tuple[int, str]:
        try:
            seconds = float(query.get("seconds", _DEFAULT_S))
        except ValueError:
            seconds = 0.0
        if not 0.0 < seconds <= _MOST_S:
            return 400, f"seconds must be a number above 0, at most {_MOST_S:g}\n"
        if not self._running.acquire(blocking=False):
            return 503, "another profile is being taken\n"
        try:
            return 200, _collapsed(_sampled(seconds))
        finally:
            self._running.release()

    def _threads(self, _query: Query) -> tuple[int, str]:
        names = _thread_names()
        stacks = [
            f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame, _DEPTH_MAX))}"
            for number, frame in _frames().items()
        ]
        return 200, "\n".join(stacks)


def _sampled(seconds: float) -> Counter[str]:
    stacks: Counter[str] = Counter()
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        names = _thread_names()
        for number, frame in _frames().items():
            stack = f"{names.get(number, number)};{_stack(frame)}"
            if stack in stacks or len(stacks) < _STACKS_MAX:
                stacks[stack] += 1
        time.sleep(_EVERY_S)
    return stacks


def _frames() -> dict[int, FrameType]:
    """Of all threads but this one."""
    own = threading.get_ident()
    # The only way to see other threads' stacks; documented for exactly this, whatever its underscore says.
    return {number: frame for number, frame in sys._current_frames().items() if number != own}


def _thread_names() -> dict[int | None, str]:
    return {thread.ident: thread.name for thread in threading.enumerate()}


def _stack(frame: FrameType | None) -> str:
    places: list[str] = []
    while frame is not None and len(places) < _DEPTH_MAX:
        code = frame.f_code
        places.append(f"{frame.f_globals.get('__name__', '?')}.{code.co_qualname}:{frame.f_lineno}")
        frame = frame.f_back
    return ";".join(reversed(places))


def _collapsed(stacks: Counter[str]) -> str:
    return "".join(f"{stack} {count}\n" for stack, count in stacks.most_common())
