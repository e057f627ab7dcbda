"""How full the pods are, and which requests are refused because of it.

A request names its objective in a header, an objective has a priority, and below priority 0 it is sheddable:
it is refused while the pods are saturated. Rules and thresholds are the reference picker's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from router.board import PodBoard
from router.errors import SaturatedError

# The first that a request carries counts.
OBJECTIVE_HEADERS = ("x-llm-d-inference-objective", "x-gateway-inference-objective")


@dataclass(frozen=True, slots=True)
class UtilizationDetector:
    """Mean over the pods of the fuller of queue and KV cache."""

    queue_requests: float = 5.0  # a queue of so many is full
    kv_usage: float = 0.8  # a KV cache used to this share is full
    load_age_max_s: float = 0.2  # a pod that told its load longer ago, or never, is taken for full

    def saturation(self, pods: NDArray[Any], _pending: int, now_s: float) -> float:
        full = np.maximum(pods["waiting"] / self.queue_requests, pods["kv_usage"] / self.kv_usage)
        full[now_s - pods["scraped_s"] > self.load_age_max_s] = 1.0
        return float(full.mean())


@dataclass(frozen=True, slots=True)
class ConcurrencyDetector:
    """Share of the pods' places that requests in flight take."""

    requests: float = 100.0  # places of a pod
    tokens: float = 1_000_000.0  # uncached prompt tokens that a pod has room for
    mode: str = "requests"  # "requests", "tokens", or "hybrid": the fuller of both

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


class Admission:
    """Lets requests pass or raises.

    Args:
        detector: Tells how full the candidates are; None: nobody is refused.
    """

    def __init__(self, priorities: Mapping[str, int], detector: Detector | None, board: PodBoard) -> None:
        self._priorities = priorities
        self._detector = detector
        self._board = board

    def replace(self, priorities: Mapping[str, int]) -> None:
        """Other priorities from now on."""
        self._priorities = priorities

    def admit(self, headers: Mapping[str, str], rows: NDArray[np.int64], now_s: float) -> int:
        """Answers the request's priority.

        Args:
            rows: int64 [candidates], their rows on the board.

        Raises:
            SaturatedError: 429, when the request is sheddable and the candidates are saturated.
        """
        priority = self.priority_of(headers)
        if priority < 0 and self._detector is not None:
            saturation = self._detector.saturation(self._board.known(rows), 0, now_s)
            if saturation >= 1.0:
                raise SaturatedError(
                    f"the model servers are saturated ({saturation:.2f}) "
                    f"and the request's priority is {priority}"
                )
        return priority

    def priority_of(self, headers: Mapping[str, str]) -> int:
        """The priority of the request's objective; 0 without a known one."""
        priorities = self._priorities
        if not priorities:
            return 0
        objective = next((headers[name] for name in OBJECTIVE_HEADERS if name in headers), "")
        return priorities.get(objective, 0)
