"""The reference's metrics under their older names: what the registry shows under the new ones, shown twice.

Made when the metrics are read; nothing is counted twice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

_OBJECTIVE = "inference_objective_"
# By name: the older one.
_TWINS = {
    "llm_d_epp_request": f"{_OBJECTIVE}request",
    "llm_d_epp_request_error": f"{_OBJECTIVE}request_error",
    "llm_d_epp_request_input_tokens": f"{_OBJECTIVE}input_tokens",
    "llm_d_epp_request_running": f"{_OBJECTIVE}running_requests",
    "llm_d_epp_ready_endpoints": "inference_pool_ready_pods",
    "llm_d_epp_scheduler_e2e_duration_seconds": "inference_extension_scheduler_e2e_duration_seconds",
}


class MetricTwins(Collector):
    """Registered beside the collectors of a registry.

    Args:
        registry: Whose metrics are shown again.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._here = threading.local()

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are those of others."""
        return ()

    def collect(self) -> Iterable[Metric]:
        # The registry asks us, too, while we ask it.
        if getattr(self._here, "collecting", False):
            return
        self._here.collecting = True
        try:
            families = [family for family in self._registry.collect() if family.name in _TWINS]
        finally:
            self._here.collecting = False
        for family in families:
            yield _twin(family, _TWINS[family.name])


def _twin(family: Metric, name: str) -> Metric:
    twin = Metric(name, family.documentation, family.type, family.unit)
    twin.samples = [
        sample._replace(name=name + sample.name.removeprefix(family.name)) for sample in family.samples
    ]
    return twin
