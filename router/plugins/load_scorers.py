"""Scorers that go by load: what engines tell of their queues and caches, and what this router sent them.

Formulas are the reference picker's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.config_fields import Count, Settings, Share, Whole
from router.plugins.api import Endpoint, PluginRequest


class QueueScorer(Settings):
    """Shortest engine queue: (most - own) / (most - least); 1 where all are alike."""

    def score(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        return _least_first([endpoint.waiting_requests for endpoint in endpoints])


class RunningRequestsScorer(Settings):
    """The same of the requests that are being computed."""

    def score(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        return _least_first([endpoint.running_requests for endpoint in endpoints])


class KvUsageScorer(Settings):
    """Free share of the KV cache."""

    def score(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        return [1.0 - endpoint.kv_usage for endpoint in endpoints]


class LoadAwareScorer(Settings):
    """From 0.5 with no queue down to 0 at a queue of `threshold` requests."""

    threshold: Count = 128

    def score(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        most = self.threshold
        return [0.5 * (1.0 - min(endpoint.waiting_requests, most) / most) for endpoint in endpoints]


class ActiveRequestScorer(Settings):
    """Fewest requests in flight from here."""

    idle_threshold: Whole = 0  # up to so many requests an endpoint is idle and gets 1
    max_busy_score: Share = 1.0  # what the best busy endpoint can get
    request_timeout: Any = None  # ignored, as the reference does

    def score(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        counts = [endpoint.inflight_requests for endpoint in endpoints]
        most = max(counts, default=0)
        return [
            1.0 if count <= self.idle_threshold else (most - count) / most * self.max_busy_score
            for count in counts
        ]


class TokenLoadScorer(Settings):
    """Fewest prompt tokens to compute, this request's uncached ones among them: 0 from the threshold on."""

    queue_threshold_tokens: Count = 4_194_304

    def score(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        most = self.queue_threshold_tokens
        return [
            1.0 - min(endpoint.inflight_tokens + endpoint.uncached_tokens, most) / most
            for endpoint in endpoints
        ]


class TtftCostScorer(Settings):
    """The default policy as a scorer: 1 for the least cost in seconds, the others in proportion to it."""

    def score(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        # A session's stay can make a cost negative; only differences matter then.
        least = min((endpoint.cost_s for endpoint in endpoints), default=0.0)
        offset_s = max(0.0, -least) + _COST_RESOLUTION_S
        return [(least + offset_s) / (endpoint.cost_s + offset_s) for endpoint in endpoints]


_COST_RESOLUTION_S = 1e-3


def _least_first(counts: Sequence[int]) -> Sequence[float]:
    least, most = min(counts, default=0), max(counts, default=0)
    if least == most:
        return [1.0] * len(counts)
    return [(most - count) / (most - least) for count in counts]
