"""How full the pods are, and which requests are refused because of it.

A request names its objective in a header, an objective has a priority, and below priority 0 it is sheddable:
it is refused while the pods are saturated. Rules and thresholds are the reference picker's.
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
from router.pods.load_table import PodBoard

# The first that a request carries counts.
OBJECTIVE_HEADERS = ("x-llm-d-inference-objective", "x-gateway-inference-objective")

_Mode = Literal["requests", "tokens", "hybrid"]


class UtilizationDetector(Settings):
    """Mean over the pods of the fuller of queue and KV cache."""

    queue_requests: Positive = field(default=5.0, name="queueDepthThreshold")  # a queue of so many is full
    # A KV cache used to this share is full.
    kv_usage: Annotated[float, Meta(ge=1e-6, le=1.0)] = field(default=0.8, name="kvCacheUtilThreshold")
    # A pod that told its load longer ago in seconds, or never, is taken for full.
    load_age_max_s: Duration = field(default=Duration(0.2), name="metricsStalenessThreshold")
    headroom: Number = 0.0  # not used

    def saturation(self, pods: NDArray[Any], _pending: int, now_s: float) -> float:
        full = np.maximum(pods["waiting"] / self.queue_requests, pods["kv_usage"] / self.kv_usage)
        full[now_s - pods["scraped_s"] > self.load_age_max_s] = 1.0
        return float(full.mean())


class ConcurrencyDetector(Settings):
    """Share of the pods' places that requests in flight take."""

    requests: Count = field(default=100, name="maxConcurrency")  # places of a pod
    tokens: Count = field(default=1_000_000, name="maxTokenConcurrency")  # uncached prompt tokens of its room
    mode: _Mode = "requests"  # "hybrid": the fuller of both
    concurrency_mode: _Mode | None = None  # the mode's other name, which goes before
    headroom: Number = 0.0  # not used

    def __post_init__(self) -> None:
        self.mode = self.concurrency_mode or self.mode

    def saturation(self, pods: NDArray[Any], pending: int, _now_s: float) -> float:
        inflight = float(pods["awaiting"].sum() + pods["decoding"].sum()) + pending
        by_requests = inflight / (self.requests * len(pods))
        by_tokens = float(pods["held_tokens"].sum()) / (self.tokens * len(pods))
        if self.mode == "requests":
            return by_requests
        return by_tokens if self.mode == "tokens" else max(by_requests, by_tokens)


# Its `saturation` tells how full some pods are: from 0; 1 and above is full. It is given board.POD [pods], at
# least one, and how many requests were let go and are not on the board yet.
Detector = UtilizationDetector | ConcurrencyDetector


@dataclass(slots=True)
class Admission:
    """Lets requests pass or raises."""

    priorities: Mapping[str, int]  # by objective; replaced when they change
    detector: Detector | None  # None: nobody is refused
    board: PodBoard

    def admit(self, headers: Mapping[str, str], rows: NDArray[np.int64], now_s: float) -> int:
        """Answers the request's priority.

        Args:
            rows: int64 [candidates], their rows on the board.

        Raises:
            SaturatedError: 429, when the request is sheddable and the candidates are saturated.
        """
        priority = self.priority_of(headers)
        if priority < 0 and self.detector is not None:
            saturation = self.detector.saturation(self.board.known(rows), 0, now_s)
            if saturation >= 1.0:
                raise SaturatedError(
                    f"the model servers are saturated ({saturation:.2f}) "
                    f"and the request's priority is {priority}"
                )
        return priority

    def priority_of(self, headers: Mapping[str, str]) -> int:
        """The priority of the request's objective; 0 without a known one."""
        priorities = self.priorities
        if not priorities:
            return 0
        objective = next((headers[name] for name in OBJECTIVE_HEADERS if name in headers), "")
        return priorities.get(objective, 0)
