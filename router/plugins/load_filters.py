"""Filters that weigh cache against load: the holders of the prefix while that pays, and caps on load."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.config_fields import Fields
from router.plugins.api import Endpoint, PluginRequest
from router.plugins.cache_scorers import APPROXIMATE

_METRICS: dict[str, Callable[[Endpoint], float]] = {
    "active-requests": lambda endpoint: endpoint.inflight_requests,
    "running-requests": lambda endpoint: endpoint.running_requests,
    "waiting-queue": lambda endpoint: endpoint.waiting_requests,
    "kv-cache-utilization": lambda endpoint: endpoint.kv_usage,
}


class PrefixAffinityFilter:
    """Keeps the endpoints that hold the prompt, unless all of them would answer much later than others.

    Args:
        producer: Whose account of the caches counts.
        threshold: From this share of the prompt on an endpoint holds it.
        exploration: Share of requests that are let pass unfiltered.
        penalty_max_s: How much later the best holder may answer than the best other; 0: any time.
        tokens_per_s: Prefill speed by which tokens in flight become seconds.
    """

    def __init__(
        self,
        producer: str = APPROXIMATE,
        threshold: float = 0.8,
        exploration: float = 0.0,
        penalty_max_s: float = 18.0,
        tokens_per_s: float = 15_928.0,
    ) -> None:
        self.producer = producer
        self._threshold = threshold
        self._exploration = exploration
        self._penalty_max_s = penalty_max_s
        self._tokens_per_s = tokens_per_s

    @classmethod
    def read(cls, parameters: Fields) -> PrefixAffinityFilter:
        """From a configuration."""
        known = parameters.only(
            "affinityThreshold",
            "explorationProbability",
            "maxTTFTPenaltyMs",
            "ttftSource",
            "peakPrefillThroughput",
            "prefixMatchInfoProducerName",
            "inFlightLoadProducerName",
        )
        known.choice("ttftSource", ("prefillThroughput",), "prefillThroughput")
        return cls(
            known.text("prefixMatchInfoProducerName", APPROXIMATE),
            known.number("affinityThreshold", 0.8, most=1.0),
            known.number("explorationProbability", 0.0, most=1.0),
            known.number("maxTTFTPenaltyMs", 18_000.0) / 1000,
            known.number("peakPrefillThroughput", 15_928.0, least=1e-3),
        )

    def filter(self, request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        """The holders, or everybody."""
        if len(endpoints) < 2 or self._threshold <= 0.0:
            return endpoints
        if self._exploration and request.random.random() < self._exploration:
            return endpoints
        holders: list[Endpoint] = []
        others: list[Endpoint] = []
        for endpoint in endpoints:
            is_holder = request.prefix(self.producer, endpoint).ratio >= self._threshold
            (holders if is_holder else others).append(endpoint)
        if not holders:
            return endpoints
        penalty_s = self._first_token_s(holders) - self._first_token_s(others) if others else 0.0
        return endpoints if 0.0 < self._penalty_max_s < penalty_s else holders

    def _first_token_s(self, endpoints: Sequence[Endpoint]) -> float:
        return min(endpoint.inflight_tokens for endpoint in endpoints) / self._tokens_per_s


class UtilizationFilter:
    """Drops endpoints above any of some caps.

    Args:
        caps: (metric, most) pairs; see `_METRICS`.
        falls_back: Whether everybody stays when nobody would.
    """

    def __init__(self, caps: Sequence[tuple[str, float]], *, falls_back: bool = False) -> None:
        self._caps = [(_METRICS[metric], most) for metric, most in caps]
        self._falls_back = falls_back

    @classmethod
    def read(cls, parameters: Fields) -> UtilizationFilter:
        """From a configuration."""
        known = parameters.only("conditions", "fallbackOnEmpty")
        caps = []
        for condition in known.each("conditions", ("metric", "maxValue")):
            metric = condition.choice("metric", tuple(_METRICS))
            if "maxValue" not in condition:
                condition.fail("maxValue", "is missing")
            caps.append((metric, condition.number("maxValue", 0.0)))
        if not caps:
            known.fail("conditions", "must have at least one condition")
        return cls(caps, falls_back=known.flag("fallbackOnEmpty", False))

    def filter(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        """Those within every cap."""
        kept = [
            endpoint for endpoint in endpoints if all(value(endpoint) <= most for value, most in self._caps)
        ]
        return endpoints if self._falls_back and not kept else kept
