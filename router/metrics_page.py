"""Where a pod tells its load: its labels and the configured path in, an address and a path out. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from indexer.pod_entry import METRICS_PATH_LABEL, METRICS_PORT_LABEL, PodEntry, pod_address

DEFAULT_PATH = "/metrics"

# The first that a pod has counts.
_ENGINE_LABELS = ("llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type")
# trtllm-serve's /metrics is JSON, and whoever reads it takes it away from others.
_ENGINE_PATHS = {"trtllm-serve": "/prometheus/metrics"}


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """A page of metrics in Prometheus' text form.

    Attributes:
        address: "ip:port".
    """

    address: str
    path: str = DEFAULT_PATH


def metrics_page(entry: PodEntry, path: str = DEFAULT_PATH) -> MetricsPage:
    """The pod's page: as its labels say, else where its engine has it, else at its serving port.

    Args:
        path: Of engines of which nothing else is known.
    """
    labels = entry.labels
    engine = next((labels[name] for name in _ENGINE_LABELS if name in labels), "")
    # The labels were checked by who read them.
    port = int(labels.get(METRICS_PORT_LABEL, entry.port))
    path = labels.get(METRICS_PATH_LABEL) or _ENGINE_PATHS.get(engine, path)
    return MetricsPage(pod_address(entry.address, port), path)
