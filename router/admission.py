"""Whether a request may be routed now: its priority and the pods' saturation in, a refusal out.

A request names its objective in a header, an objective has a priority, and below priority 0 it is sheddable:
it is refused while the pods are saturated. Rules and thresholds are the reference picker's. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from router.board import PodBoard
from router.errors import SaturatedError

# The first that a request carries counts.
OBJECTIVE_HEADERS = ("x-llm-d-inference-objective", "x-gateway-inference-objective")


@dataclass(frozen=True, slots=True)
class AdmissionParameters:
    """Who is shed, and when.

    Attributes:
        priorities: Priority by objective, at first; a request without a known objective has priority 0.
        queue_requests: A pod with so many requests in its queue is saturated.
        kv_usage: A pod with this share of its KV cache in use is saturated.
        load_age_max_s: A pod whose account is older, or that never told, is taken for saturated.
    """

    priorities: Mapping[str, int] = field(default_factory=dict)
    queue_requests: float = 5.0
    kv_usage: float = 0.8
    load_age_max_s: float = 5.0


class Admission:
    """Lets requests pass or raises."""

    def __init__(self, parameters: AdmissionParameters, board: PodBoard) -> None:
        self._parameters = parameters
        self._priorities = parameters.priorities
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
        priority = self.priority_of(headers) if self._priorities else 0
        if priority < 0 and (saturation := self.saturation(rows, now_s)) >= 1.0:
            raise SaturatedError(
                f"the model servers are saturated ({saturation:.2f}) and the request's priority is {priority}"
            )
        return priority

    def saturation(self, rows: NDArray[np.int64], now_s: float) -> float:
        """Mean saturation of these pods; from 1 on they are taken for saturated."""
        known = self._parameters
        with self._board.lock:
            pods = self._board.pods[rows]
        full = np.maximum(pods["waiting"] / known.queue_requests, pods["kv_usage"] / known.kv_usage)
        full[now_s - pods["scraped_s"] > known.load_age_max_s] = 1.0
        return float(full.mean())

    def priority_of(self, headers: Mapping[str, str]) -> int:
        """The priority of the request's objective; 0 without a known one."""
        priorities = self._priorities
        if not priorities:
            return 0
        objective = next((headers[name] for name in OBJECTIVE_HEADERS if name in headers), "")
        return priorities.get(objective, 0)
