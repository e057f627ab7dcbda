"""Counters and histograms for what every request is counted in: numbers in, samples when they are scraped.

Plain numbers under one lock: the library's own take one and check themselves at each step, and cost a pick
more than its choice does.
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

# Values of a series' labels, in the order of their names.
Labels = tuple[str, ...]


class Tallies:
    """Makes counters and histograms of one registry that share a lock."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.lock = Lock()  # held by whoever counts, once for all that is counted together
        self._registry = registry

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Tally:
        """A counter; one without labels begins with 0, others' series when they are first counted."""
        tally = Tally(self, name, text, labels)
        self._registry.register(tally)
        return tally

    def histogram(self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str] = ()) -> Spread:
        """A histogram; `bounds` are its buckets' upper ones, without the infinite last."""
        spread = Spread(self, name, text, bounds, labels)
        self._registry.register(spread)
        return spread


class Tally(Collector):
    """A counter's series. Who counts or drops holds the lock."""

    def __init__(self, tallies: Tallies, name: str, text: str, labels: Sequence[str]) -> None:
        self._tallies = tallies
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
        with self._tallies.lock:
            counts = list(self._counts.items())
        for labels, count in counts:
            family.add_metric(labels, count)
        return (family,)


class Spread(Collector):
    """A histogram's series. Who observes holds the lock."""

    def __init__(
        self, tallies: Tallies, name: str, text: str, bounds: Sequence[float], labels: Sequence[str]
    ) -> None:
        self._tallies = tallies
        self._head = name, text
        self._names = tuple(labels)
        self._bounds = tuple(map(float, bounds))
        spelled: Callable[[float], str] = floatToGoString
        self._bucket_names = [spelled(bound) for bound in (*self._bounds, math.inf)]
        # By labels: the values in each bucket alone, and behind them their sum.
        self._counts: dict[Labels, list[float]] = {} if labels else {(): self._nothing()}

    def observe(self, value: float, labels: Labels = ()) -> None:
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = self._nothing()
        counts[bisect_left(self._bounds, value)] += 1.0
        counts[-1] += value

    def describe(self) -> Iterable[Metric]:
        return (HistogramMetricFamily(*self._head, labels=self._names),)

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(*self._head, labels=self._names)
        with self._tallies.lock:
            counts = [(labels, list(values)) for labels, values in self._counts.items()]
        for labels, (*buckets, total) in counts:
            family.add_metric(labels, list(zip(self._bucket_names, accumulate(buckets), strict=True)), total)
        return (family,)

    def _nothing(self) -> list[float]:
        return [0.0] * (len(self._bounds) + 2)
