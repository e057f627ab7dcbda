"""Pages of /debug/pprof/: a sampling profiler of all threads, and their current stacks."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import islice
from types import FrameType

_SAMPLE_EVERY_S = 0.01
_PROFILE_S, _PROFILE_MAX_S = 30.0, 120.0
_STACK_DEPTH_MAX = 100
_STACKS_MAX = 20_000

Query = Mapping[str, str]

_profiling = threading.Lock()


def profile_pages() -> dict[str, Callable[[Query], tuple[int, str]]]:
    """Return the pages by path.

    Profiles are taken one at a time, for at most 120 s and 20,000 different stacks. A profile's lines are
    collapsed stacks ("outer;inner count"), the input of flame graph tools.
    """
    index = (
        "profile?seconds=N  collapsed stacks of all threads, 100 samples a second (default 30)\n"
        "goroutine          current stacks of all threads\n"
    )
    return {
        "/debug/pprof/": lambda _query: (200, index),
        "/debug/pprof/profile": _profile,
        "/debug/pprof/goroutine": lambda _query: (200, _thread_stacks()),
    }


def _profile(query: Query) -> tuple[int, str]:
    try:
        seconds = float(query.get("seconds", _PROFILE_S))
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds <= _PROFILE_MAX_S:
        return 400, f"seconds: expected a number above 0 and up to {_PROFILE_MAX_S:g}\n"
    if not _profiling.acquire(blocking=False):
        return 503, "another profile is in progress; try again later\n"
    try:
        stacks = _sample_stacks(seconds)
    finally:
        _profiling.release()
    return 200, "".join(f"{stack} {count}\n" for stack, count in stacks.most_common())


def _thread_stacks() -> str:
    return "\n".join(
        f"thread {name}:\n{''.join(traceback.format_stack(frame, _STACK_DEPTH_MAX))}"
        for name, frame in _threads()
    )


def _sample_stacks(seconds: float) -> Counter[str]:
    stacks: Counter[str] = Counter()
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        for name, frame in _threads():
            stack = f"{name};{_stack(frame)}"
            if stack in stacks or len(stacks) < _STACKS_MAX:
                stacks[stack] += 1
        time.sleep(_SAMPLE_EVERY_S)
    return stacks


def _threads() -> list[tuple[str | int, FrameType]]:
    """Return name, or else id, and current stack frame of all threads except the calling one."""
    own, names = threading.get_ident(), {thread.ident: thread.name for thread in threading.enumerate()}
    # The documented way to read other threads' stacks, despite its underscore.
    frames = sys._current_frames().items()
    return [(names.get(number, number), frame) for number, frame in frames if number != own]


def _stack(frame: FrameType) -> str:
    calls = [
        f"{outer.f_globals.get('__name__', '?')}.{outer.f_code.co_qualname}:{line}"
        for outer, line in islice(traceback.walk_stack(frame), _STACK_DEPTH_MAX)
    ]
    return ";".join(reversed(calls))
