"""How full the pods are, as flow control sees it: the board's rows in, one number out; 1 and more is full.

Two detectors: by what engines tell of their queues and caches, and by what this router sent them. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from numpy import maximum
from numpy.typing import NDArray


class Detector(Protocol):
    """Tells how full some pods are."""

    def saturation(self, pods: NDArray[Any], pending: int, now_s: float, /) -> float:
        """From 0; 1 and above: full.

        Args:
            pods: board.POD [ready pods], at least one.
            pending: Requests that were let go and are not on the board yet.
        """


@dataclass(frozen=True, slots=True)
class UtilizationDetector:
    """Mean over the pods of the fuller of queue and KV cache.

    Attributes:
        queue_requests: A queue of so many is full.
        kv_usage: A KV cache used to this share is full.
        load_age_max_s: A pod that told its load longer ago, or never, is taken for full.
    """

    queue_requests: float = 5.0
    kv_usage: float = 0.8
    load_age_max_s: float = 0.2

    def saturation(self, pods: NDArray[Any], _pending: int, now_s: float) -> float:
        """From 0; 1 and above: full."""
        full = maximum(pods["waiting"] / self.queue_requests, pods["kv_usage"] / self.kv_usage)
        full[now_s - pods["scraped_s"] > self.load_age_max_s] = 1.0
        return float(full.mean())


@dataclass(frozen=True, slots=True)
class ConcurrencyDetector:
    """Share of the pods' places that requests in flight take.

    Attributes:
        requests: Places of a pod.
        tokens: Uncached prompt tokens that a pod has room for.
        mode: "requests", "tokens", or "hybrid": the fuller of both.
    """

    requests: float = 100.0
    tokens: float = 1_000_000.0
    mode: str = "requests"

    def saturation(self, pods: NDArray[Any], pending: int, _now_s: float) -> float:
        """From 0; 1 and above: full."""
        inflight = float(pods["awaiting"].sum() + pods["decoding"].sum()) + pending
        by_requests = inflight / (self.requests * len(pods))
        by_tokens = float(pods["held_tokens"].sum()) / (self.tokens * len(pods))
        if self.mode == "requests":
            return by_requests
        return by_tokens if self.mode == "tokens" else max(by_requests, by_tokens)
