"""The lead: one thread has it, and whoever waits has passed it on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import pytest

from router import lead as lead_module
from router.lead import Lead
from tests.wire.router_wire_support import TIMEOUT_S, wait_until

_NAME = "test-lead"


class Crew:
    """A lead whose turns do what is put into a queue.

    Attributes:
        leaving: One entry for each time that the lead was handed over.
    """

    def __init__(self) -> None:
        self.leaving: deque[int] = deque()
        self._tasks: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.lead = Lead(_NAME, self._turn, lambda: self.leaving.append(threading.get_ident()))

    def do(self, task: Callable[[], object]) -> None:
        """Has the leading thread do something."""
        self._tasks.put(task)

    def end(self) -> None:
        """The last turn."""
        self._tasks.put(None)

    def _turn(self) -> bool:
        task = self._tasks.get()
        if task is not None:
            task()
        return task is not None


@contextmanager
def started() -> Iterator[Crew]:
    """A crew that works."""
    crew = Crew()
    crew.lead.start()
    try:
        yield crew
    finally:
        crew.end()
        assert crew.lead.join(TIMEOUT_S)
        wait_until(lambda: not threads(), "the end of all threads")


def threads() -> list[threading.Thread]:
    """Those of a crew that live."""
    return [thread for thread in threading.enumerate() if thread.name == _NAME]


def test_whoever_waits_holds_up_nobody() -> None:
    """While several wait the turns go on, on other threads, and each goes on where it was."""
    with started() as crew:
        may_go, done = threading.Event(), SimpleQueue[int]()

        def wait() -> None:
            before = threading.get_ident()
            crew.lead.hand_over()
            assert not crew.lead.is_mine
            assert may_go.wait(TIMEOUT_S)
            done.put(before == threading.get_ident())

        for _ in range(3):
            crew.do(wait)
        crew.do(lambda: done.put(7))
        assert done.get(timeout=TIMEOUT_S) == 7
        may_go.set()
        assert [done.get(timeout=TIMEOUT_S) for _ in range(3)] == [True] * 3
        assert len(crew.leaving) == len(set(crew.leaving)) == 3


def test_only_one_thread_leads() -> None:
    """However often the lead changes, a turn never runs beside another one's part before its wait."""
    with started() as crew:
        inside, most, done = [0], [0], threading.Event()

        def task() -> None:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            assert crew.lead.is_mine
            inside[0] -= 1
            crew.lead.hand_over()
            crew.lead.hand_over()

        for _ in range(500):
            crew.do(task)
        crew.do(done.set)
        assert done.wait(TIMEOUT_S)
        assert (most[0], len(crew.leaving)) == (1, 500)


def test_threads_that_waited_end_but_for_a_few() -> None:
    """What a burst of waits needed is given back, and what is kept leads again."""
    with started() as crew:
        may_go, all_wait = threading.Event(), threading.Barrier(31)

        def wait() -> None:
            crew.lead.hand_over()
            all_wait.wait(TIMEOUT_S)
            may_go.wait(TIMEOUT_S)

        for _ in range(30):
            crew.do(wait)
        all_wait.wait(TIMEOUT_S)
        assert len(threads()) == 31
        may_go.set()
        wait_until(lambda: len(threads()) == 1 + lead_module._FOLLOWERS_MAX, "the end of the others")
        led = threading.Event()
        crew.do(crew.lead.hand_over)
        crew.do(led.set)
        assert led.wait(TIMEOUT_S)
        assert len(threads()) <= 1 + lead_module._FOLLOWERS_MAX


def test_a_turn_that_fails_is_followed_by_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error costs what was at hand, and is told; the lead is not lost with it."""
    monkeypatch.setattr(lead_module, "_RETRY_S", 0.0)
    with started() as crew:
        done = threading.Event()
        crew.do(lambda: 1 / 0)
        crew.do(done.set)
        assert done.wait(TIMEOUT_S)
    assert "ZeroDivisionError" in caplog.text


def test_without_more_threads_the_others_wait_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the system has no thread to take the lead it stays where it is, and that is told."""
    with started() as crew:

        def no_thread(*_: object, **__: object) -> None:
            raise RuntimeError("can't start new thread")

        still = SimpleQueue[bool]()
        with monkeypatch.context() as patched:
            patched.setattr(threading, "Thread", no_thread)
            crew.do(crew.lead.hand_over)
            crew.do(lambda: still.put(crew.lead.is_mine))
            assert still.get(timeout=TIMEOUT_S)
        assert not crew.leaving
    assert "no thread can take the lead" in caplog.text


def test_what_never_began_is_over() -> None:
    """Nobody waits for the end of a lead that was not started."""
    assert Crew().lead.join(TIMEOUT_S)
