"""Prometheus counters and histograms for the request path: plain numbers that become samples when scraped.

All metrics of a `BatchedMetrics` share one lock. The metrics of prometheus_client lock and validate at every
increment, which costs a pick more CPU than choosing the pod.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from threading import Lock

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

# Label values of a series, in the order of the label names.
Labels = tuple[str, ...]


class BatchedMetrics:
    """Factory of counters and histograms of one registry that share a lock."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.lock = Lock()  # callers hold it while they update metrics
        self._registry = registry

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> BatchedCounter:
        """Register a counter. Without labels it starts at 0; labelled series start when first incremented."""
        counter = BatchedCounter(self, name, text, labels)
        self._registry.register(counter)
        return counter

    def histogram(
        self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str] = ()
    ) -> BatchedHistogram:
        """Register a histogram. `bounds` are the upper bounds of all buckets but the infinite last one."""
        histogram = BatchedHistogram(self, name, text, bounds, labels)
        self._registry.register(histogram)
        return histogram


class BatchedCounter(Collector):
    """Counter with its series. Callers of `add` and `drop` hold the lock."""

    def __init__(self, metrics: BatchedMetrics, name: str, text: str, labels: Sequence[str]) -> None:
        self._metrics = metrics
        self._head = name, text
        self._names = tuple(labels)
        self._counts: dict[Labels, float] = {} if labels else {(): 0.0}

    def add(self, labels: Labels = (), number: float = 1.0) -> None:
        self._counts[labels] = self._counts.get(labels, 0.0) + number

    def drop(self, unwanted: Iterable[Labels]) -> None:
        for labels in unwanted:
            self._counts.pop(labels, None)

    def series(self) -> list[Labels]:
        return list(self._counts)

    def describe(self) -> Iterable[Metric]:
        return (CounterMetricFamily(*self._head, labels=self._names),)

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(*self._head, labels=self._names)
        with self._metrics.lock:
            counts = list(self._counts.items())
        for labels, count in counts:
            family.add_metric(labels, count)
        return (family,)


class BatchedHistogram(Collector):
    """Histogram with its series. Callers of `observe` hold the lock."""

    def __init__(
        self, metrics: BatchedMetrics, name: str, text: str, bounds: Sequence[float], labels: Sequence[str]
    ) -> None:
        self._metrics = metrics
        self._head = name, text
        self._names = tuple(labels)
        self._bounds = tuple(map(float, bounds))
        to_text: Callable[[float], str] = floatToGoString
        self._bucket_names = [to_text(bound) for bound in (*self._bounds, math.inf)]
        # By labels: the count of each bucket (not cumulative), then the sum of all values.
        self._counts: dict[Labels, list[float]] = {} if labels else {(): self._zeros()}

    def observe(self, value: float, labels: Labels = ()) -> None:
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = self._zeros()
        counts[bisect_left(self._bounds, value)] += 1.0
        counts[-1] += value

    def describe(self) -> Iterable[Metric]:
        return (HistogramMetricFamily(*self._head, labels=self._names),)

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(*self._head, labels=self._names)
        with self._metrics.lock:
            counts = [(labels, list(values)) for labels, values in self._counts.items()]
        for labels, (*buckets, total) in counts:
            family.add_metric(labels, list(zip(self._bucket_names, accumulate(buckets), strict=True)), total)
        return (family,)

    def _zeros(self) -> list[float]:
        return [0.0] * (len(self._bounds) + 2)
