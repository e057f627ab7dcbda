"""How the watches go, for Prometheus: their states in, samples out when scraped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.kube.watch import Reflector

_OURS = "kvroute_discovery_"


class WatchCollector(Collector):
    """Reads the watches' states.

    Args:
        watches: By what is watched.
        now_s: The watches' clock.
    """

    def __init__(
        self, watches: Mapping[str, Reflector[Any]], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._watches = watches
        self._now_s = now_s

    def collect(self) -> Iterable[Metric]:
        lists = CounterMetricFamily(
            _OURS + "lists", "Full lists, by what was listed and why.", labels=["kind", "reason"]
        )
        objects = GaugeMetricFamily(_OURS + "objects", "Objects that are known.", labels=["kind"])
        failing = GaugeMetricFamily(_OURS + "watch_failing", "1 while a watch fails.", labels=["kind"])
        age = GaugeMetricFamily(
            _OURS + "contact_age_seconds", "Since the API server told anything.", labels=["kind"]
        )
        for kind, watch in self._watches.items():
            state = watch.state
            for reason, count in state.lists:
                lists.add_metric([kind, reason], count)
            objects.add_metric([kind], len(watch.mirror.objects))
            failing.add_metric([kind], state.error is not None)
            if state.listed:
                age.add_metric([kind], self._now_s() - state.contact_s)
        yield from (lists, objects, failing, age)
