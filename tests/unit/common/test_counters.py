"""common.counters: the same exposition as the metrics of prometheus_client."""

from __future__ import annotations

from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from common.counters import BatchedMetrics

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
def test_a_scrape_equals_that_of_prometheus_client(
    counted: list[tuple[tuple[str, str], float]], observed: list[tuple[tuple[str, str], float]]
) -> None:
    """Counts, buckets, sums and help texts equal those of prometheus_client, with labels and without."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    metrics = BatchedMetrics(ours)
    count = metrics.counter("count_total", "Counted.", ("one", "two"))
    plain = metrics.counter("plain_total", "Counted.")
    histogram = metrics.histogram("histogram", "Observed.", BOUNDS, ("one", "two"))
    alone = metrics.histogram("alone", "Observed.", BOUNDS)
    their_count = Counter("count_total", "Counted.", ("one", "two"), registry=theirs)
    their_plain = Counter("plain_total", "Counted.", registry=theirs)
    their_histogram = Histogram("histogram", "Observed.", ("one", "two"), buckets=BOUNDS, registry=theirs)
    their_alone = Histogram("alone", "Observed.", buckets=BOUNDS, registry=theirs)
    with metrics.lock:
        for named, number in counted:
            count.add(named, number)
            plain.add()
        for named, value in observed:
            histogram.observe(value, named)
            alone.observe(value)
    for named, number in counted:
        their_count.labels(*named).inc(number)
        their_plain.inc()
    for named, value in observed:
        their_histogram.labels(*named).observe(value)
        their_alone.observe(value)
    assert shown(ours) == shown(theirs)


def test_a_dropped_series_is_shown_no_more() -> None:
    """A dropped series disappears, and starts at 0 when it is incremented again."""
    registry = CollectorRegistry()
    metrics = BatchedMetrics(registry)
    count = metrics.counter("pods_total", "Counted.", ("pod",))
    count.add(("a",), 3)
    count.add(("b",))
    count.drop([("a",), ("never",)])
    assert count.series() == [("b",)]
    count.add(("a",))
    assert registry.get_sample_value("pods_total", {"pod": "a"}) == 1


def test_a_name_is_given_once() -> None:
    """A registry rejects a second metric of the same name."""
    metrics = BatchedMetrics(CollectorRegistry())
    metrics.counter("same_total", "Counted.")
    with pytest.raises(ValueError, match="same_total"):
        metrics.histogram("same_total", "Observed.", BOUNDS)


def test_no_increment_under_the_lock_is_lost() -> None:
    """Increments of concurrent threads add up while another thread scrapes."""
    registry = CollectorRegistry()
    metrics = BatchedMetrics(registry)
    count = metrics.counter("count_total", "Counted.", ("one",))
    histogram = metrics.histogram("histogram", "Observed.", BOUNDS)

    def work() -> None:
        for _ in range(2000):
            with metrics.lock:
                count.add(("a",))
                histogram.observe(1.0)

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen = registry.get_sample_value("histogram_count")
        assert seen == registry.get_sample_value("histogram_sum") or any(t.is_alive() for t in threads)
        threads[0].join(0.001)
    assert registry.get_sample_value("count_total", {"one": "a"}) == 8000
    assert registry.get_sample_value("histogram_count") == registry.get_sample_value("histogram_sum") == 8000
