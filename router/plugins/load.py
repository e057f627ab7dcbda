"""Scorers and filters that go by load: what engines tell of their queues and caches, and what was sent them.

Formulas are the reference picker's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from router.config.fields import Count, Number, Settings, Share, Text, Whole
from router.plugins.api import Endpoint, PluginRequest
from router.plugins.cache_scorers import APPROXIMATE, PRODUCER_KEY


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


_METRICS: dict[str, Callable[[Endpoint], float]] = {
    "active-requests": lambda endpoint: endpoint.inflight_requests,
    "running-requests": lambda endpoint: endpoint.running_requests,
    "waiting-queue": lambda endpoint: endpoint.waiting_requests,
    "kv-cache-utilization": lambda endpoint: endpoint.kv_usage,
}


class PrefixAffinityFilter(Settings):
    """Keeps the endpoints that hold the prompt, unless all of them would answer much later than others."""

    producer: Text = field(default=APPROXIMATE, name=PRODUCER_KEY)  # whose account of the caches counts
    affinity_threshold: Share = 0.8  # from this share of the prompt on an endpoint holds it
    exploration_probability: Share = 0.0  # share of requests that are let pass unfiltered
    penalty_max_ms: Number = field(default=18_000.0, name="maxTTFTPenaltyMs")  # of holders' answers; 0: any
    ttft_source: Literal["prefillThroughput"] = "prefillThroughput"
    peak_prefill_throughput: Annotated[float, Meta(ge=1e-3, le=1e12)] = 15_928.0  # tokens/s
    in_flight_load_producer_name: Any = None

    def filter(self, request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        if len(endpoints) < 2 or self.affinity_threshold <= 0.0:
            return endpoints
        if self.exploration_probability and request.random.random() < self.exploration_probability:
            return endpoints
        holders: list[Endpoint] = []
        others: list[Endpoint] = []
        for endpoint in endpoints:
            is_holder = request.prefix(self.producer, endpoint).ratio >= self.affinity_threshold
            (holders if is_holder else others).append(endpoint)
        if not holders:
            return endpoints
        penalty_s = self._first_token_s(holders) - self._first_token_s(others) if others else 0.0
        return endpoints if 0.0 < self.penalty_max_ms < 1000 * penalty_s else holders

    def _first_token_s(self, endpoints: Sequence[Endpoint]) -> float:
        return min(endpoint.inflight_tokens for endpoint in endpoints) / self.peak_prefill_throughput


class MetricLimit(Settings):
    """Most that a metric may be, see `_METRICS`."""

    metric: Literal["active-requests", "running-requests", "waiting-queue", "kv-cache-utilization"]
    max_value: Number


class UtilizationFilter(Settings):
    """Drops endpoints above any of some caps."""

    conditions: Annotated[tuple[MetricLimit, ...], Meta(min_length=1)]
    fallback_on_empty: bool = False  # whether everybody stays when nobody would

    def filter(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        caps = [(_METRICS[cap.metric], cap.max_value) for cap in self.conditions]
        kept = [endpoint for endpoint in endpoints if all(value(endpoint) <= most for value, most in caps)]
        return endpoints if self.fallback_on_empty and not kept else kept
