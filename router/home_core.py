"""The core on which this process' Python threads run: what the kernel tells of its cores in, affinities out.

Python's threads run one at a time. Where the kernel spreads them over cores, each hand-over of the GIL wakes
another core, whose caches hold nothing of what comes next. So they stay on one core, as long as others leave
that one free; where others keep it busy and another core is idler, all of them move. Threads that run without
the GIL (ZeroMQ's, gRPC's, those that encode long texts) run where the kernel likes. Knows no requests.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
# A core is left for one on which others need so much less of it, seen so often in a row.
_WORTH_MOVING = 0.3
_LOOKS_BEFORE_MOVING = 3
# Which of two cores is idler is not told by less than this.
_ALIKE = 0.1
# Python threads that give up the GIL for long: to encode texts.
_ROAMING = ("tokenize", "encode")
_STAT, _THREADS = Path("/proc/stat"), Path("/proc/self/task")


def keep_home_core() -> HomeCore | None:
    """Keeps this process' Python threads on one core from now on; None: there is no choice."""
    if not hasattr(os, "sched_setaffinity") or not _STAT.exists():
        return None
    if len(os.sched_getaffinity(0)) < 2:
        return None
    try:
        home = HomeCore()
    except OSError as error:
        _log.info("may not choose a core, so threads run on any: %s", error)
        return None
    _log.info("threads that need Python's lock keep to core %d", home.core)
    threading.Thread(target=_keep, args=(home,), name="home-core", daemon=True).start()
    return home


class HomeCore:
    """The core of the moment. Not thread-safe, but for looks at its attributes.

    Attributes:
        core: Its number.
        is_kept: Whether threads keep to it; not any more after `leave`.
    """

    def __init__(self) -> None:
        self._cores = os.sched_getaffinity(0)
        self._choice = HomeChoice()
        self._usage = core_usage(_STAT.read_text())
        self._own_s, self._then_s = time.process_time(), time.monotonic()
        self.core = random.choice(tuple(self._cores))
        self.is_kept = True
        self._pin()

    def look(self) -> None:
        """Moves the threads where that is worth it, and takes in those that are new."""
        usage, own_s, now_s = core_usage(_STAT.read_text()), time.process_time(), time.monotonic()
        own = (own_s - self._own_s) / max(1e-9, now_s - self._then_s)
        others = {
            core: busy_share(self._usage[core], usage[core]) - own * (core == self.core)
            for core in self._cores
            if core in usage and core in self._usage
        }
        self._usage, self._own_s, self._then_s = usage, own_s, now_s
        core = self._choice.core(self.core, others)
        if core != self.core:
            _log.info("core %d is busy with others: moved to core %d", self.core, core)
            self.core = core
        self._pin()

    def leave(self) -> None:
        """Lets all threads run on any core.

        Raises:
            OSError: The system does not allow it.
        """
        self.is_kept = False
        self._place(self._cores, self._cores)

    def _pin(self) -> None:
        try:
            self._place(self._cores, {self.core})
        except PermissionError:
            raise
        except OSError:
            # Cores were taken from the process: what is left tells the kernel.
            everywhere = set(range(os.cpu_count() or 1))
            self._place(everywhere, everywhere)
            self._cores = os.sched_getaffinity(0)
            self.core = random.choice(tuple(self._cores))

    def _place(self, cores: Collection[int], home: Collection[int]) -> None:
        """Lets threads run on `cores`, and those that need the GIL at `home`."""
        named = {thread.native_id: thread.name for thread in threading.enumerate()}
        for entry in _THREADS.iterdir():
            number = int(entry.name)
            wanted = home if not named.get(number, _ROAMING[0]).startswith(_ROAMING) else cores
            try:
                if os.sched_getaffinity(number) != wanted:
                    os.sched_setaffinity(number, wanted)
            except ProcessLookupError:
                # It has ended since.
                continue


class HomeChoice:
    """Whether to stay: a history of looks."""

    def __init__(self) -> None:
        self._looks = 0

    def core(self, home: int, others: Mapping[int, float]) -> int:
        """Where to be from now on.

        Args:
            home: Where we are.
            others: The share of each core's time that others took since the last look.
        """
        least = min(others.values(), default=0.0)
        crowded = others.get(home, 1.0) - least > _WORTH_MOVING
        self._looks = self._looks + 1 if crowded else 0
        if self._looks < _LOOKS_BEFORE_MOVING or not others:
            return home
        self._looks = 0
        # Any of the idlest: other processes of this kind look too.
        return random.choice([core for core, share in others.items() if share - least < _ALIKE])


def core_usage(stat: str) -> dict[int, tuple[int, int]]:
    """Each core's ticks since boot, all and those in which it idled (/proc/stat, proc_stat(5))."""
    usage = {}
    for line in stat.splitlines():
        name, *ticks = line.split()
        if not name.startswith("cpu"):
            break
        if name != "cpu":
            counted = [int(tick) for tick in ticks[:8]]
            usage[int(name[3:])] = (sum(counted), counted[3] + counted[4])
    return usage


def busy_share(before: tuple[int, int], after: tuple[int, int]) -> float:
    """The share of the time between two looks in which a core was not idle."""
    ticks, idle = after[0] - before[0], after[1] - before[1]
    return 1.0 - idle / ticks if ticks > 0 else 0.0


def _keep(home: HomeCore) -> None:
    while True:
        time.sleep(_LOOK_EVERY_S)
        try:
            home.look()
        except Exception:
            # Where it runs is of less weight than that it runs.
            _log.exception("cannot keep to one core; threads run on any from now on")
            with suppress(OSError):
                home.leave()
            return
