"""A Prometheus histogram for what happens with every token: cheaper to observe than the client library's.

In: values, all from one thread. Out: the same exposition as the library's own histogram when scraped.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class TokenHistogram(Collector):
    """One histogram with fixed labels.

    Args:
        name: Of the metric.
        text: Its help.
        labels: Names and values.
        buckets: Upper bounds, inclusive and rising; what is above the last goes to +Inf.
    """

    def __init__(self, name: str, text: str, labels: Mapping[str, str], buckets: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._labels = dict(labels)
        self._buckets = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._buckets, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the metric."""
        family = HistogramMetricFamily(self._name, self._text, labels=tuple(self._labels))
        bounds = [floatToGoString(bound) for bound in (*self._buckets, float("inf"))]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family.add_metric(tuple(self._labels.values()), buckets, self._sum)
        yield family
