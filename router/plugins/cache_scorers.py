"""Scorers by cache content: matched prefixes, LoRA adapters, cold requests, context length."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import field

from router.config.fields import Count, Settings, Share, Text
from router.plugins.api import Endpoint, PluginRequest

APPROXIMATE = "approx-prefix-cache-producer"
PRECISE = "precise-prefix-cache-producer"

PRODUCER_KEY = "prefixMatchInfoProducerName"


class PrefixScorer(Settings):
    """Scores by the cached share of the prompt, optionally mixed with the absolute length of the match.

    score = w * min(1, matched / scale) ** 2 + (1 - w) * matched / total
    """

    producer: Text = field(default=APPROXIMATE, name=PRODUCER_KEY)  # source of the prefix matches
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

    producer: Text = field(default=APPROXIMATE, name=PRODUCER_KEY)  # source of the prefix matches
    lru_size: Count = 1024  # maximum number of endpoints in the LRU list
    prefix_plugin_type: Any = None  # both are accepted without effect, as in llm-d
    prefix_plugin_name: Any = None

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
