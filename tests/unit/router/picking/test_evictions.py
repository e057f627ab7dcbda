"""Eviction of requests in flight: order and removal."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.picking.flow import EvictableRequests


@settings(deadline=None)
@given(st.lists(st.integers(-5, -1), max_size=20))
def test_the_newest_request_of_the_lowest_priority_is_evicted_first(priorities: list[int]) -> None:
    """Requests are evicted by ascending priority, then newest first, each once."""
    evictable, evicted = EvictableRequests(), []
    for index, priority in enumerate(priorities):
        evictable.add(priority, lambda index=index: evicted.append(index))
    while evictable.evict():
        pass
    order = sorted(range(len(priorities)), key=lambda index: (priorities[index], -index))
    assert evicted == order
    assert len(evictable) == 0


def test_a_removed_request_is_not_evicted() -> None:
    """A removed request is never evicted, and removing it twice has no effect."""
    evictable, evicted = EvictableRequests(), []
    ended = evictable.add(-1, lambda: evicted.append("ended"))
    evictable.add(-1, lambda: evicted.append("inside"))
    evictable.remove(ended)
    evictable.remove(ended)
    assert [evictable.evict(), evictable.evict()] == [True, False]
    assert evicted == ["inside"]
