"""Scorers that go by load: what engines tell of their queues and caches, and what this router sent them.

Formulas are the reference picker's.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.config_fields import Fields
from router.plugins.api import Endpoint, PluginRequest


class QueueScorer:
    """Shortest engine queue: (most - own) / (most - least); 1 where all are alike."""

    def score(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        """One score for each endpoint."""
        return _least_first([endpoint.waiting_requests for endpoint in endpoints])


class RunningRequestsScorer:
    """The same of the requests that are being computed."""

    def score(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        """One score for each endpoint."""
        return _least_first([endpoint.running_requests for endpoint in endpoints])


class KvUsageScorer:
    """Free share of the KV cache."""

    def score(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        """One score for each endpoint."""
        return [1.0 - endpoint.kv_usage for endpoint in endpoints]


class LoadAwareScorer:
    """From 0.5 with no queue down to 0 at a queue of `threshold` requests."""

    def __init__(self, threshold: int = 128) -> None:
        self._threshold = threshold

    @classmethod
    def read(cls, parameters: Fields) -> LoadAwareScorer:
        """From a configuration."""
        return cls(parameters.only("threshold").whole("threshold", 128, least=1))

    def score(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        """One score for each endpoint."""
        most = self._threshold
        return [0.5 * (1.0 - min(endpoint.waiting_requests, most) / most) for endpoint in endpoints]


class ActiveRequestScorer:
    """Fewest requests in flight from here.

    Args:
        idle_requests: Up to so many an endpoint is idle and gets 1.
        busy_score_max: What the best busy endpoint can get.
    """

    def __init__(self, idle_requests: int = 0, busy_score_max: float = 1.0) -> None:
        self._idle_requests = idle_requests
        self._busy_score_max = busy_score_max

    @classmethod
    def read(cls, parameters: Fields) -> ActiveRequestScorer:
        """From a configuration; the reference ignores requestTimeout, too."""
        known = parameters.only("idleThreshold", "maxBusyScore", "requestTimeout")
        return cls(known.whole("idleThreshold", 0), known.number("maxBusyScore", 1.0, most=1.0))

    def score(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        """One score for each endpoint."""
        counts = [endpoint.inflight_requests for endpoint in endpoints]
        most = max(counts, default=0)
        return [
            1.0 if count <= self._idle_requests else (most - count) / most * self._busy_score_max
            for count in counts
        ]


class TokenLoadScorer:
    """Fewest prompt tokens to compute, this request's uncached ones among them: 0 from `threshold` on."""

    def __init__(self, threshold_tokens: int = 4_194_304) -> None:
        self._threshold_tokens = threshold_tokens

    @classmethod
    def read(cls, parameters: Fields) -> TokenLoadScorer:
        """From a configuration."""
        known = parameters.only("queueThresholdTokens")
        return cls(known.whole("queueThresholdTokens", 4_194_304, least=1))

    def score(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        """One score for each endpoint."""
        most = self._threshold_tokens
        return [
            1.0 - min(endpoint.inflight_tokens + endpoint.uncached_tokens, most) / most
            for endpoint in endpoints
        ]


class TtftCostScorer:
    """The default policy as a scorer: 1 for the least cost in seconds, the others in proportion to it."""

    def score(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        """One score for each endpoint."""
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
