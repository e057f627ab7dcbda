"""The core on which the router's Python threads run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.home_core import HomeChoice, busy_share, core_usage, keep_home_core

_NO_CHOICE = not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2

# Threads with and without a name that roams, one of a library, and one that comes after the first look.
_PROGRAM = """
import json, os, sys, threading, time
import zmq
import router.home_core as home_core

home_core._LOOK_EVERY_S = 0.05
wait = threading.Event().wait
def begin(name):
    thread = threading.Thread(target=wait, name=name, daemon=True)
    thread.start()
    return thread.native_id
socket = zmq.Context().socket(zmq.PUB)
before = [begin("check"), begin("tokenize_0"), begin("encode_1")]
allowed = os.sched_getaffinity(0)
home_core.keep_home_core()
later = begin("late")
if "widen" in sys.argv:
    os.sched_setaffinity(later, allowed)
time.sleep(0.5)
main, *rest = [len(os.sched_getaffinity(number)) for number in (os.getpid(), *before, later)]
library = [
    len(os.sched_getaffinity(int(number)))
    for number in os.listdir("/proc/self/task")
    if open(f"/proc/self/task/{number}/comm").read().startswith("ZMQ")
]
print(json.dumps([len(allowed), main, rest, library]))
"""


@pytest.mark.skipif(_NO_CHOICE, reason="needs Linux and two cores")
@pytest.mark.parametrize("how", ["inherited", "widen"])
def test_python_threads_share_a_core_and_others_roam(how: str) -> None:
    """Threads that need the GIL stay on one core, whenever they begin; encoders and libraries do not."""
    argv = [sys.executable, "-c", _PROGRAM, how]
    allowed, main, threads, library = json.loads(subprocess.check_output(argv))
    assert (main, threads) == (1, [1, allowed, allowed, 1])
    assert library
    assert set(library) == {allowed}


@pytest.mark.skipif(_NO_CHOICE, reason="needs Linux and two cores")
def test_a_core_that_was_taken_away_is_left() -> None:
    """Where the home is no core of this process any more, the next look finds one, for all threads."""
    program = (
        "import os; from router.home_core import HomeCore; allowed = os.sched_getaffinity(0);"
        "home = HomeCore(); home.core = 4000; home.look(); home.look();"
        "print(home.core in allowed, os.sched_getaffinity(0) == {home.core})"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "True True\n"


@pytest.mark.skipif(_NO_CHOICE, reason="needs Linux and two cores")
def test_a_home_that_cannot_be_looked_after_is_left() -> None:
    """When a look fails, the threads run on any core again, and the metric says so."""
    program = (
        "import os, time, router.home_core as home_core; from prometheus_client import CollectorRegistry;"
        "from router.metrics import RouterMetrics; registry = CollectorRegistry();"
        "metrics = RouterMetrics(registry); allowed = os.sched_getaffinity(0);"
        "shown = lambda: registry.get_sample_value('kvroute_router_home_core');"
        "home_core._LOOK_EVERY_S = 0.3; before = shown();"
        "home = home_core.keep_home_core(); metrics.keeps_to(home);"
        "kept = shown() == home.core and os.sched_getaffinity(0) == {home.core};"
        "home_core.core_usage = None; time.sleep(1.0);"
        "print(before, kept, shown(), os.sched_getaffinity(0) == allowed)"
    )
    argv = [sys.executable, "-c", program]
    assert subprocess.check_output(argv, text=True, stderr=subprocess.DEVNULL) == "-1.0 True -1.0 True\n"


@pytest.mark.skipif(_NO_CHOICE, reason="needs Linux and two cores")
def test_a_sandbox_that_forbids_it_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system lets nobody choose cores, the threads stay as they are and the process goes on."""

    def forbidden(_number: int, _cores: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", forbidden)
    before = threading.active_count()
    assert keep_home_core() is None
    assert threading.active_count() == before


def test_a_home_is_left_when_others_keep_it_busy() -> None:
    """The third look in a row at a home that others need much more of than of the idlest core leaves it."""
    choice = HomeChoice()
    crowded, free = {0: 0.8, 1: 0.1, 2: 0.9}, {0: 0.2, 1: 0.1, 2: 0.9}
    assert [choice.core(0, crowded) for _ in range(3)] == [0, 0, 1]
    assert [choice.core(0, look) for look in (crowded, crowded, free, crowded, crowded)] == [0] * 5


def test_a_saturated_machine_is_no_reason_to_move() -> None:
    """Where all cores are as busy with others as the home, nobody moves."""
    choice = HomeChoice()
    assert {choice.core(1, {0: 1.0, 1: 0.9}) for _ in range(10)} == {1}


@given(st.dictionaries(st.integers(0, 300), st.floats(-1.0, 2.0), max_size=8), st.integers(0, 300))
def test_a_choice_is_always_a_core_that_there_is(others: dict[int, float], home: int) -> None:
    """Whatever is seen, the choice is the home or one of the cores seen."""
    choice = HomeChoice()
    for _ in range(4):
        assert choice.core(home, others) in {home, *others}


def test_usage_is_read_off_the_kernels_page() -> None:
    """Idle and waiting ticks are idle, a guest's are not counted twice, and other lines are none of ours."""
    page = "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 10 1 5 70 4 1 2 7 10 1\ncpu12 1 0 0 9 0 0 0 0 0 0\nintr 5 0\n"
    assert core_usage(page) == {0: (100, 74), 12: (10, 9)}
    assert busy_share((100, 74), (200, 149)) == pytest.approx(0.25)
    assert busy_share((100, 74), (100, 74)) == 0.0
