"""Batched counters and histograms: a scrape shows what the library's own would show."""

from __future__ import annotations

from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from common.counters import Tallies

BOUNDS = (0.1, 1, 2.5)
labels = st.tuples(st.sampled_from("ab"), st.sampled_from("xy"))


def shown(registry: CollectorRegistry) -> set[str]:
    """Return the lines of a scrape, without the creation times of series."""
    lines = generate_latest(registry).decode().splitlines()
    return {line for line in lines if "_created" not in line}


@given(
    st.lists(st.tuples(labels, st.floats(0, 1e6))),
    st.lists(st.tuples(labels, st.sampled_from([*BOUNDS, 0.0]) | st.floats(0, 10))),
)
def test_a_scrape_shows_what_the_librarys_own_would_show(
    counted: list[tuple[tuple[str, str], float]], observed: list[tuple[tuple[str, str], float]]
) -> None:
    """Counts, buckets, sums and help texts equal the library's, with and without labels."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tallies = Tallies(ours)
    count = tallies.counter("count_total", "Counted.", ("one", "two"))
    plain = tallies.counter("plain_total", "Counted.")
    spread = tallies.histogram("spread", "Observed.", BOUNDS, ("one", "two"))
    alone = tallies.histogram("alone", "Observed.", BOUNDS)
    their_count = Counter("count_total", "Counted.", ("one", "two"), registry=theirs)
    their_plain = Counter("plain_total", "Counted.", registry=theirs)
    their_spread = Histogram("spread", "Observed.", ("one", "two"), buckets=BOUNDS, registry=theirs)
    their_alone = Histogram("alone", "Observed.", buckets=BOUNDS, registry=theirs)
    with tallies.lock:
        for named, number in counted:
            count.add(named, number)
            plain.add()
        for named, value in observed:
            spread.observe(value, named)
            alone.observe(value)
    for named, number in counted:
        their_count.labels(*named).inc(number)
        their_plain.inc()
    for named, value in observed:
        their_spread.labels(*named).observe(value)
        their_alone.observe(value)
    assert shown(ours) == shown(theirs)


def test_a_dropped_series_is_not_shown() -> None:
    """A dropped series disappears, and starts from 0 when it is counted again."""
    registry = CollectorRegistry()
    tallies = Tallies(registry)
    count = tallies.counter("pods_total", "Counted.", ("pod",))
    count.add(("a",), 3)
    count.add(("b",))
    count.drop([("a",), ("never",)])
    assert count.series() == [("b",)]
    count.add(("a",))
    assert registry.get_sample_value("pods_total", {"pod": "a"}) == 1


def test_names_are_unique() -> None:
    """A registry rejects a second counter of the same name."""
    tallies = Tallies(CollectorRegistry())
    tallies.counter("same_total", "Counted.")
    with pytest.raises(ValueError, match="same_total"):
        tallies.histogram("same_total", "Observed.", BOUNDS)


def test_nothing_counted_under_the_lock_is_lost() -> None:
    """Concurrent counting under the lock loses no count while other threads read."""
    registry = CollectorRegistry()
    tallies = Tallies(registry)
    count = tallies.counter("count_total", "Counted.", ("one",))
    spread = tallies.histogram("spread", "Observed.", BOUNDS)

    def work() -> None:
        for _ in range(2000):
            with tallies.lock:
                count.add(("a",))
                spread.observe(1.0)

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen = registry.get_sample_value("spread_count")
        assert seen == registry.get_sample_value("spread_sum") or any(t.is_alive() for t in threads)
        threads[0].join(0.001)
    assert registry.get_sample_value("count_total", {"one": "a"}) == 8000
    assert registry.get_sample_value("spread_count") == registry.get_sample_value("spread_sum") == 8000
