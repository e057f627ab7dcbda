"""Filters that weigh cache against load: the holders of the prefix while that pays, and caps on load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from router.config_fields import Number, Settings, Share, Text
from router.plugins.api import Endpoint, PluginRequest
from router.plugins.cache_scorers import APPROXIMATE, PRODUCER_KEY

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
    # How much later the best holder may answer than the best other; 0: any time.
    penalty_max_ms: Number = field(default=18_000.0, name="maxTTFTPenaltyMs")
    ttft_source: Literal["prefillThroughput"] = "prefillThroughput"
    # Tokens/s by which tokens in flight become seconds.
    peak_prefill_throughput: Annotated[float, Meta(ge=1e-3, le=1e12)] = 15_928.0
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


class Cap(Settings):
    """Most that a metric may be, see `_METRICS`."""

    metric: Literal["active-requests", "running-requests", "waiting-queue", "kv-cache-utilization"]
    max_value: Number


class UtilizationFilter(Settings):
    """Drops endpoints above any of some caps."""

    conditions: Annotated[tuple[Cap, ...], Meta(min_length=1)]
    fallback_on_empty: bool = False  # whether everybody stays when nobody would

    def filter(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        caps = [(_METRICS[cap.metric], cap.max_value) for cap in self.conditions]
        kept = [endpoint for endpoint in endpoints if all(value(endpoint) <= most for value, most in caps)]
        return endpoints if self.fallback_on_empty and not kept else kept
