"""Flow control's metrics under the reference's names: outcomes in, queue and saturation read live."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge, Histogram

_SECONDS = (0.0001, 0.001, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0)
_PREFIX = "llm_d_epp_flow_control_"


class FlowMetrics:
    """How requests fared."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._waits = Histogram(
            _PREFIX + "request_queue_duration_seconds",
            "Time in the queue, by how it ended.",
            ("priority", "outcome"),
            buckets=_SECONDS,
            registry=registry,
        )

    def watch(
        self, requests: Callable[[], float], size_bytes: Callable[[], float], saturation: Callable[[], float]
    ) -> None:
        """Reads these whenever the metrics are."""
        live = {
            "queue_size": ("Requests that wait.", requests),
            "queue_bytes": ("Bytes of their bodies.", size_bytes),
            "pool_saturation": ("How full the pods are; from 1 on requests wait.", saturation),
        }
        for name, (text, read) in live.items():
            Gauge(_PREFIX + name, text, registry=self._registry).set_function(read)

    def left(self, outcome: str, priority: int, waited_s: float) -> None:
        """A request was let go or refused."""
        self._waits.labels(str(priority), outcome).observe(waited_s)
