"""What tokenizers tell of themselves: their counters in, metrics out. Made when the metrics are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


class TokenizerCollector(Collector):
    """Registered beside the other collectors.

    Args:
        resumed: By base model, how often its chats were rendered from the new messages on, and how often
            wrongly; of the tokenizers in this process.
    """

    def __init__(self, resumed: Callable[[], Mapping[str, tuple[int, int]]]) -> None:
        self._resumed = resumed

    def describe(self) -> Iterable[Metric]:
        """The names alone."""
        return _families({})

    def collect(self) -> Iterable[Metric]:
        """The counters."""
        return _families(self._resumed())


def _families(resumed: Mapping[str, tuple[int, int]]) -> Iterable[Metric]:
    uses = CounterMetricFamily(
        "kvroute_router_resumed_renderings",
        "Long chats that were rendered from their new messages on.",
        labels=["model"],
    )
    wrong = CounterMetricFamily(
        "kvroute_router_resumed_renderings_wrong",
        "Of those that were checked, the ones unlike the whole rendering; after one all are rendered whole.",
        labels=["model"],
    )
    for model, (used, faults) in resumed.items():
        uses.add_metric([model], used)
        wrong.add_metric([model], faults)
    return uses, wrong
