"""What a plugin is given and what it answers: one request, its candidate endpoints, and four protocols.

Plugins run inside the pick, one request at a time: they must not block, and need no locks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from router.pods.engine_load import LoraLoad


class PrefixMatch(NamedTuple):
    """How much of a request's prompt an endpoint's cache holds, by one producer's account."""

    blocks: float  # matched blocks, each weighted by its tier
    total_blocks: int  # full blocks of the request; 0: the prompt is shorter than one
    cached_blocks: int  # matched blocks, unweighted
    block_tokens: int  # tokens of one block

    @property
    def ratio(self) -> float:
        return self.blocks / self.total_blocks if self.total_blocks else 0.0


NO_MATCH = PrefixMatch(0.0, 0, 0, 1)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One candidate: what it declared, what its engine told last, and what this router knows of it."""

    address: str  # "ip:port", its identity
    id: str  # "namespace/name"
    labels: Mapping[str, str] = field(default_factory=dict)  # as in Kubernetes
    waiting_requests: int = 0  # in the engine's queue
    running_requests: int = 0  # being computed
    kv_usage: float = 0.0  # share of the KV cache in use, 0..1
    load_age_s: float | None = None  # age of the three above (0: not told); None if the engine never told
    lora: LoraLoad | None = None  # the engine's places for adapters; None if not told
    inflight_requests: int = 0  # sent there by this router and not yet over
    inflight_tokens: int = 0  # their uncached prompt tokens
    uncached_tokens: int = 0  # prompt tokens of this request that it would have to compute
    cost_s: float = 0.0  # what the default policy charges, in seconds


@dataclass(frozen=True, slots=True)
class PluginRequest:
    """One request, as plugins see it."""

    id: str  # the request's id
    model: str | None  # as the pod will be asked for it; None where the API is not known
    headers: Mapping[str, str]  # by lower-case name
    prompt_tokens: int  # of all prompts; estimated from the body's size where no tokenizer knows
    priority: int  # of its objective
    now_s: float  # on the router's monotonic clock
    random: np.random.Generator  # to break ties with
    attributes: Mapping[str, str] = field(default_factory=dict)  # from producers, such as a session's id
    prefixes: Mapping[str, Mapping[str, PrefixMatch]] = field(default_factory=dict)  # by producer and address
    multimodal: bool = False  # whether the prompt carries more than text

    def prefix(self, producer: str, endpoint: Endpoint) -> PrefixMatch:
        """What a producer knows of the prompt on this endpoint."""
        return self.prefixes.get(producer, {}).get(endpoint.address, NO_MATCH)


@dataclass(frozen=True, slots=True)
class Scored:
    """An endpoint and the weighted sum of its scores."""

    endpoint: Endpoint
    score: float


@runtime_checkable
class Filter(Protocol):
    """Narrows the candidates."""

    def filter(self, request: PluginRequest, endpoints: Sequence[Endpoint], /) -> Sequence[Endpoint]:
        """Those of `endpoints` that may stay; none: the request is answered with 429."""


@runtime_checkable
class Scorer(Protocol):
    """Says how good each candidate is."""

    def score(self, request: PluginRequest, endpoints: Sequence[Endpoint], /) -> Sequence[float]:
        """One score for each, in their order; what is not within 0..1 is clamped, NaN is 0."""


@runtime_checkable
class Picker(Protocol):
    """Chooses among the scored candidates."""

    def pick(self, request: PluginRequest, scored: Sequence[Scored], /) -> Sequence[Endpoint]:
        """The chosen ones, best first; never empty."""


@runtime_checkable
class Stateful(Protocol):
    """May be any plugin, too: shows people what it remembers."""

    def state(self) -> object:
        """Something that JSON can say; asked on another thread than the picks'."""


@runtime_checkable
class Observer(Protocol):
    """May be any plugin, too: learns what was picked, and may say something in the response's headers."""

    def picked(self, request: PluginRequest, targets: Mapping[str, Endpoint], /) -> Mapping[str, str]:
        """Is told the picks.

        Args:
            targets: By profile; "" is the destination.

        Returns:
            Headers to set on the response.
        """
