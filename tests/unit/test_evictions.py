"""Requests taken back while in flight: who goes first, and a reader that is woken for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue

from hypothesis import given, settings
from hypothesis import strategies as st

from router.evictions import Evictions
from router.interruptible import Interruptible


@settings(deadline=None)
@given(st.lists(st.integers(-5, -1), max_size=20))
def test_the_least_important_and_latest_goes_first(priorities: list[int]) -> None:
    """Priority decides, then time; each goes once."""
    evictions, gone = Evictions(), []
    for number, priority in enumerate(priorities):
        evictions.enter(priority, lambda number=number: gone.append(number))
    while evictions.evict():
        pass
    order = sorted(range(len(priorities)), key=lambda number: (priorities[number], -number))
    assert gone == order
    assert len(evictions) == 0


def test_whoever_left_is_not_taken_back() -> None:
    """A request that is over is none of those in flight; leaving twice does no harm."""
    evictions, gone = Evictions(), []
    over = evictions.enter(-1, lambda: gone.append("over"))
    evictions.enter(-1, lambda: gone.append("inside"))
    evictions.leave(over)
    evictions.leave(over)
    assert [evictions.evict(), evictions.evict()] == [True, False]
    assert gone == ["inside"]


def test_a_waiting_reader_is_woken() -> None:
    """Interrupted while it waits for an item that never comes, it ends and says why."""
    never: SimpleQueue[int] = SimpleQueue()
    items = Interruptible(iter(never.get, None))
    never.put(1)
    assert next(items) == 1
    threading.Timer(0.05, items.interrupt).start()
    assert list(items) == []
    assert items.is_interrupted
    never.put(None)


def test_items_pass_in_order_to_their_end() -> None:
    """All of them, however many are ahead of the reader; an end is no interruption."""
    items = Interruptible(iter(range(1000)))
    assert list(items) == list(range(1000))
    assert not items.is_interrupted


def test_a_broken_stream_has_ended() -> None:
    """What was read before still comes."""

    def breaks() -> Iterator[int]:
        yield 1
        raise ConnectionError

    items = Interruptible(breaks())
    assert list(items) == [1]


def test_nothing_is_read_far_ahead_or_after_the_end() -> None:
    """A sender is held back while nobody reads, and let go when nobody will."""
    taken: list[int] = []

    def counted() -> Iterator[int]:
        for number in range(1000):
            taken.append(number)
            yield number

    items = Interruptible(counted())
    assert next(items) == 0
    items.close()
    for thread in threading.enumerate():
        if thread.name == "stream-reader":
            thread.join(300)
    assert len(taken) < 10
