"""Requests taken back while in flight: who goes first."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.picking.flow import EvictableRequests


@settings(deadline=None)
@given(st.lists(st.integers(-5, -1), max_size=20))
def test_the_least_important_and_latest_goes_first(priorities: list[int]) -> None:
    """Priority decides, then time; each goes once."""
    evictable, gone = EvictableRequests(), []
    for number, priority in enumerate(priorities):
        evictable.add(priority, lambda number=number: gone.append(number))
    while evictable.evict():
        pass
    order = sorted(range(len(priorities)), key=lambda number: (priorities[number], -number))
    assert gone == order
    assert len(evictable) == 0


def test_whoever_left_is_not_taken_back() -> None:
    """A request that is over is none of those in flight; leaving twice does no harm."""
    evictable, gone = EvictableRequests(), []
    over = evictable.add(-1, lambda: gone.append("over"))
    evictable.add(-1, lambda: gone.append("inside"))
    evictable.remove(over)
    evictable.remove(over)
    assert [evictable.evict(), evictable.evict()] == [True, False]
    assert gone == ["inside"]
