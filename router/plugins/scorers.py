"""Scorers and filters by cache content and by load: engine metrics and this router's requests in flight.

The formulas are those of llm-d's endpoint picker.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from router.config.fields import Count, InFlightProducer, Number, Settings, Share, Text, Whole
from router.plugins.api import Endpoint, PluginRequest

APPROXIMATE = "approx-prefix-cache-producer"
PRECISE = "precise-prefix-cache-producer"
IMPLIED = ""  # producer of a plugin that names none, see `ImpliedPrefix`
PRODUCER_KEY = "prefixMatchInfoProducerName"
PRODUCER_INSTEAD = f"name the producer by {PRODUCER_KEY}"


class PrefixScorer(Settings):
    """Scores by the cached share of the prompt, optionally mixed with the absolute length of the match.

    score = w * min(1, matched / scale) ** 2 + (1 - w) * matched / total
    """

    producer: Text = field(default=IMPLIED, name=PRODUCER_KEY)  # source of the prefix matches
    match_length_weight: Share = 0.0  # w in the formula
    match_length_scale_tokens: Count = 8192  # matched tokens at which the length term reaches 1

    def score(self, request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        scores = []
        for endpoint in endpoints:
            match, weight = request.prefix(self.producer, endpoint), self.match_length_weight
            length = min(1.0, match.blocks * match.block_tokens / self.match_length_scale_tokens)
            scores.append(weight * length**2 + (1.0 - weight) * match.ratio)
        return scores


class NoHitLruScorer(Settings):
    """Spreads requests without a cache hit: the endpoint that received one least recently scores 1."""

    producer: Text = field(default=IMPLIED, name=PRODUCER_KEY)  # source of the prefix matches
    lru_size: Count = 1024  # maximum number of endpoints in the LRU list
    prefix_plugin_type: Annotated[Any, Meta(description=PRODUCER_INSTEAD)] = None
    prefix_plugin_name: Annotated[Any, Meta(description=PRODUCER_INSTEAD)] = None

    def __post_init__(self) -> None:
        self._used: OrderedDict[str, None] = OrderedDict()

    def score(self, request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        """Return scores by last use, or 0.5 for all endpoints if any of them has a cache hit."""
        if self._has_hit(request, endpoints):
            return [0.5] * len(endpoints)
        age = {name: rank for rank, name in enumerate(self._used, 1)}
        # Endpoints without a previous cold request come first, in the given order.
        order = sorted(range(len(endpoints)), key=lambda at: age.get(endpoints[at].id, 0))
        scores, last = [1.0] * len(endpoints), max(1, len(endpoints) - 1)
        for rank, at in enumerate(order):
            scores[at] = 1.0 - rank / last
        return scores

    def picked(self, request: PluginRequest, targets: Mapping[str, Endpoint]) -> Mapping[str, str]:
        chosen = [targets[profile] for profile in ("", "prefill") if profile in targets]
        if not self._has_hit(request, chosen):
            for endpoint in chosen:
                self._used[endpoint.id] = None
                self._used.move_to_end(endpoint.id)
            while len(self._used) > self.lru_size:
                self._used.popitem(last=False)
        return {}

    def state(self) -> dict[str, int]:
        return {"endpoints": len(self._used)}

    def _has_hit(self, request: PluginRequest, endpoints: Sequence[Endpoint]) -> bool:
        matches = request.prefixes.get(self.producer, {})
        return any(match.cached_blocks for match in matches.values()) if endpoints else False


class LoraAffinityScorer(Settings):
    """Scores 1 if the LoRA adapter is running, 0.8 with a free slot, 0.6 if it is waiting for one, else 0."""

    def score(self, request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        return [self._score(request.model or "", endpoint) for endpoint in endpoints]

    def _score(self, model: str, endpoint: Endpoint) -> float:
        lora = endpoint.lora
        if lora is None:
            return 0.0
        if model in lora.running:
            return 1.0
        if len(lora.running) + len(lora.waiting) < lora.places:
            return 0.8
        return 0.6 if model in lora.waiting else 0.0


class ContextLengthAware(Settings):
    """Prefers endpoints whose declared context length range contains the prompt; optionally filters as well.

    Score in range: 0.3 + 0.7 * (0.7 / (1 + width / 10,000) + 0.3 * room / width). Out of range:
    0.3 / (1 + distance / 1,000). Without the label: 0.5. With an invalid range: 0.
    """

    label: Text = "llm-d.ai/context-length-range"
    enable_filtering: bool = False

    def filter(self, request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        """Keep endpoints whose range contains the prompt or that have no label, if filtering is on."""
        if not self.enable_filtering:
            return endpoints
        return [endpoint for endpoint in endpoints if self._passes(request.prompt_tokens, endpoint)]

    def score(self, request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        return [self._score(request.prompt_tokens, endpoint) for endpoint in endpoints]

    def _passes(self, tokens: int, endpoint: Endpoint) -> bool:
        if self.label not in endpoint.labels:
            return True
        bounds = _range(endpoint.labels[self.label])
        return bounds is not None and bounds[0] <= tokens <= bounds[1]

    def _score(self, tokens: int, endpoint: Endpoint) -> float:
        if self.label not in endpoint.labels:
            return 0.5
        if (bounds := _range(endpoint.labels[self.label])) is None:
            return 0.0
        least, most = bounds
        if not least <= tokens <= most:
            return 0.3 / (1.0 + max(least - tokens, tokens - most) / 1000.0)
        if least == most:
            return 1.0
        width = most - least
        return 0.3 + 0.7 * (0.7 / (1.0 + width / 10_000.0) + 0.3 * (most - tokens) / width)


def _range(text: str) -> tuple[int, int] | None:
    least, _, most = (part.strip() for part in text.partition("-"))
    if not all(part.isascii() and part.isdigit() and len(part) < 17 for part in (least, most)):
        return None
    return (int(least), int(most)) if int(least) <= int(most) else None


class QueueScorer(Settings):
    """Scores by the engine's queue depth: (max - own) / (max - min), or 1 if all are equal."""

    def score(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        return _lower_is_better([endpoint.waiting_requests for endpoint in endpoints])


class RunningRequestsScorer(Settings):
    """Scores by the engine's running requests: (max - own) / (max - min), or 1 if all are equal."""

    def score(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        return _lower_is_better([endpoint.running_requests for endpoint in endpoints])


class KvUsageScorer(Settings):
    """Scores by the free share of the KV cache: 1 - usage."""

    def score(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        return [1.0 - endpoint.kv_usage for endpoint in endpoints]


class LoadAwareScorer(Settings):
    """Scores from 0.5 with an empty queue down to 0 at a queue of `threshold` requests."""

    threshold: Count = 128

    def score(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        most = self.threshold
        return [0.5 * (1.0 - min(endpoint.waiting_requests, most) / most) for endpoint in endpoints]


class ActiveRequestScorer(Settings):
    """Scores by this router's requests in flight; fewer is better."""

    idle_threshold: Whole = 0  # requests up to which an endpoint counts as idle and scores 1
    max_busy_score: Share = 1.0  # maximum score of a busy endpoint
    request_timeout: Annotated[Any, Meta(description="requests in flight end with their streams")] = None
    in_flight_load_producer_name: InFlightProducer = None

    def score(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        counts = [endpoint.inflight_requests for endpoint in endpoints]
        most = max(counts, default=0)
        return [
            1.0 if count <= self.idle_threshold else (most - count) / most * self.max_busy_score
            for count in counts
        ]


class TokenLoadScorer(Settings):
    """Scores by uncached prompt tokens in flight, including this request's; 0 from the threshold on."""

    queue_threshold_tokens: Count = 4_194_304
    in_flight_load_producer_name: InFlightProducer = None

    def score(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        most = self.queue_threshold_tokens
        return [
            1.0 - min(endpoint.inflight_tokens + endpoint.uncached_tokens, most) / most
            for endpoint in endpoints
        ]


class TtftCostScorer(Settings):
    """Scores by the default policy's cost in seconds: lowest cost / own cost."""

    def score(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        # Extra seconds can make a cost negative: shift all costs so that the ratio is defined.
        least = min((endpoint.cost_s for endpoint in endpoints), default=0.0)
        offset_s = max(0.0, -least) + _COST_RESOLUTION_S
        return [(least + offset_s) / (endpoint.cost_s + offset_s) for endpoint in endpoints]


_COST_RESOLUTION_S = 1e-3


def _lower_is_better(counts: Sequence[int]) -> Sequence[float]:
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
    """Filter that keeps endpoints with the prompt cached, unless others would respond much earlier."""

    producer: Text = field(default=IMPLIED, name=PRODUCER_KEY)  # source of the prefix matches
    affinity_threshold: Share = 0.8  # cached share of the prompt from which on an endpoint is kept
    exploration_probability: Share = 0.0  # share of requests that are not filtered
    penalty_max_ms: Number = field(default=18_000.0, name="maxTTFTPenaltyMs")  # accepted extra delay; 0: any
    ttft_source: Literal["prefillThroughput"] = "prefillThroughput"
    peak_prefill_throughput: Annotated[float, Meta(ge=1e-3, le=1e12)] = 15_928.0  # tokens/s
    in_flight_load_producer_name: InFlightProducer = None

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
    """Upper limit of one metric of an endpoint."""

    metric: Literal["active-requests", "running-requests", "waiting-queue", "kv-cache-utilization"]
    max_value: Number


class UtilizationFilter(Settings):
    """Removes endpoints that exceed any of the limits."""

    conditions: Annotated[tuple[MetricLimit, ...], Meta(min_length=1)]
    fallback_on_empty: bool = False  # whether to keep all endpoints if none is within the limits
    in_flight_load_producer_name: InFlightProducer = None

    def filter(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        limits = [(_METRICS[limit.metric], limit.max_value) for limit in self.conditions]
        kept = [endpoint for endpoint in endpoints if all(value(endpoint) <= most for value, most in limits)]
        return endpoints if self.fallback_on_empty and not kept else kept
