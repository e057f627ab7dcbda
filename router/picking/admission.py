"""Admission control: rejects requests of negative priority while the pods are saturated.

A request names its objective in a header, and each objective has a priority. Rules and thresholds are those
of llm-d's endpoint picker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, field
from numpy.typing import NDArray

from router.config.fields import Count, Duration, Number, Positive, Settings
from router.errors import SaturatedError
from router.pods.load_table import PodLoadTable

# In the order of precedence.
OBJECTIVE_HEADERS = ("x-llm-d-inference-objective", "x-gateway-inference-objective")

_Mode = Literal["requests", "tokens", "hybrid"]


class UtilizationDetector(Settings):
    """Saturation as the mean over the pods of the greater of queue and KV cache usage."""

    queue_requests: Positive = field(default=5.0, name="queueDepthThreshold")  # queue depth of a full pod
    # Share of the KV cache in use at a full pod.
    kv_usage: Annotated[float, Meta(ge=1e-6, le=1.0)] = field(default=0.8, name="kvCacheUtilThreshold")
    # Maximum age of a pod's metrics in seconds; a pod without recent metrics counts as full.
    load_age_max_s: Duration = field(default=Duration(0.2), name="metricsStalenessThreshold")
    headroom: Number = 0.0  # accepted, without effect

    def saturation(self, pods: NDArray[Any], _pending: int, now_s: float) -> float:
        full = np.maximum(pods["waiting"] / self.queue_requests, pods["kv_usage"] / self.kv_usage)
        full[now_s - pods["scraped_s"] > self.load_age_max_s] = 1.0
        return float(full.mean())


class ConcurrencyDetector(Settings):
    """Saturation as the share of the pods' capacity that this router's requests in flight use."""

    requests: Count = field(default=100, name="maxConcurrency")  # capacity of a pod in requests
    tokens: Count = field(default=1_000_000, name="maxTokenConcurrency")  # capacity in uncached prompt tokens
    mode: _Mode = "requests"  # "hybrid": the greater of both
    concurrency_mode: _Mode | None = None  # alias of `mode`, which takes precedence
    headroom: Number = 0.0  # accepted, without effect

    def __post_init__(self) -> None:
        self.mode = self.concurrency_mode or self.mode

    def saturation(self, pods: NDArray[Any], pending: int, _now_s: float) -> float:
        inflight = float(pods["awaiting"].sum() + pods["decoding"].sum()) + pending
        by_requests = inflight / (self.requests * len(pods))
        by_tokens = float(pods["held_tokens"].sum()) / (self.tokens * len(pods))
        if self.mode == "requests":
            return by_requests
        return by_tokens if self.mode == "tokens" else max(by_requests, by_tokens)


# `saturation` takes load_table.POD [pods], at least one pod, and the number of dispatched requests that are
# not in the load table yet. It returns 0 for idle pods and 1 or more for full ones.
SaturationDetector = UtilizationDetector | ConcurrencyDetector


@dataclass(slots=True)
class Admission:
    """Rejects requests of negative priority while their candidates are saturated."""

    priorities: Mapping[str, int]  # by objective; the mapping is replaced on changes
    detector: SaturationDetector | None  # None: no request is rejected
    load_table: PodLoadTable

    def admit(self, headers: Mapping[str, str], rows: NDArray[np.int64], now_s: float) -> int:
        """Return the request's priority.

        Args:
            rows: int64 [candidates], their rows in the load table.

        Raises:
            SaturatedError: 429: the priority is below 0 and the candidates are saturated.
        """
        priority = self.priority_of(headers)
        if priority < 0 and self.detector is not None:
            saturation = self.detector.saturation(self.load_table.known(rows), 0, now_s)
            if saturation >= 1.0:
                raise SaturatedError(
                    f"the model servers are saturated ({saturation:.2f}) "
                    f"and the request's priority is {priority}"
                )
        return priority

    def priority_of(self, headers: Mapping[str, str]) -> int:
        """Return the priority of the request's objective; 0 without a known objective."""
        priorities = self.priorities
        if not priorities:
            return 0
        objective = next((headers[name] for name in OBJECTIVE_HEADERS if name in headers), "")
        return priorities.get(objective, 0)
