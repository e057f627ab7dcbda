"""Plugin interface: the request, its candidate endpoints, and the protocols that a plugin implements.

Plugins run inside the pick, one request at a time. They must not block, and need no locks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from router.pods.engine_load import LoraLoad


class PrefixMatch(NamedTuple):
    """Prefix of a request's prompt that an endpoint has cached, according to one producer."""

    blocks: float  # matched blocks, each weighted by its tier
    total_blocks: int  # full blocks of the prompt; 0 if it is shorter than one block
    cached_blocks: int  # matched blocks, unweighted
    block_tokens: int  # tokens per block

    @property
    def ratio(self) -> float:
        return self.blocks / self.total_blocks if self.total_blocks else 0.0


NO_MATCH = PrefixMatch(0.0, 0, 0, 1)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Candidate for a request, with its labels, its engine's last metrics and this router's load on it."""

    address: str  # "ip:port", unique
    id: str  # "namespace/name"
    labels: Mapping[str, str] = field(default_factory=dict)  # Kubernetes labels
    waiting_requests: int = 0  # queued in the engine
    running_requests: int = 0  # running in the engine
    kv_usage: float = 0.0  # share of the KV cache in use, 0..1
    load_age_s: float | None = None  # age of the three values above; None, and 0 in each, if never scraped
    lora: LoraLoad | None = None  # LoRA adapters in the engine; None if it does not report them
    inflight_requests: int = 0  # sent by this router and not finished
    inflight_tokens: int = 0  # their uncached prompt tokens
    uncached_tokens: int = 0  # prompt tokens of this request that the endpoint would have to compute
    cost_s: float = 0.0  # cost under the default policy, in seconds


@dataclass(frozen=True, slots=True)
class PluginRequest:
    """Request that is being scheduled."""

    id: str
    model: str | None  # model name sent to the pod, after rewrites; None if the API is unknown
    headers: Mapping[str, str]  # by lower-case name
    prompt_tokens: int  # of all prompts; estimated from the body's size without a tokenizer
    priority: int  # of its objective
    now_s: float  # on the router's monotonic clock
    random: np.random.Generator  # for breaking ties
    attributes: Mapping[str, str] = field(default_factory=dict)  # by producer, such as a session id
    prefixes: Mapping[str, Mapping[str, PrefixMatch]] = field(default_factory=dict)  # by producer and address
    multimodal: bool = False  # whether the prompt contains images, audio or video

    def prefix(self, producer: str, endpoint: Endpoint) -> PrefixMatch:
        """Return the prompt's cached prefix on an endpoint according to a producer."""
        return self.prefixes.get(producer, {}).get(endpoint.address, NO_MATCH)


@dataclass(frozen=True, slots=True)
class Scored:
    """Endpoint with the weighted sum of its scores."""

    endpoint: Endpoint
    score: float


@runtime_checkable
class Filter(Protocol):
    """Plugin that removes candidates."""

    def filter(self, request: PluginRequest, endpoints: Sequence[Endpoint], /) -> Sequence[Endpoint]:
        """Return the endpoints to keep; if none are left, the client receives 429."""


@runtime_checkable
class Scorer(Protocol):
    """Plugin that rates the candidates."""

    def score(self, request: PluginRequest, endpoints: Sequence[Endpoint], /) -> Sequence[float]:
        """Return one score per endpoint, in their order; scores are clamped to 0..1 and NaN counts as 0."""


@runtime_checkable
class Picker(Protocol):
    """Plugin that chooses among the scored candidates."""

    def pick(self, request: PluginRequest, scored: Sequence[Scored], /) -> Sequence[Endpoint]:
        """Return the chosen endpoints, best first, at least one."""


@runtime_checkable
class Stateful(Protocol):
    """Optional interface of a plugin that exposes its internal state on /debug/plugins/state."""

    def state(self) -> object:
        """Return a value that JSON can represent. Called on another thread than the picks."""


@runtime_checkable
class Observer(Protocol):
    """Optional interface of a plugin that observes picks and may add response headers."""

    def picked(self, request: PluginRequest, targets: Mapping[str, Endpoint], /) -> Mapping[str, str]:
        """Receive the picks of a request.

        Args:
            targets: First pick by profile name; "" is the destination.

        Returns:
            Headers to set on the response.
        """
