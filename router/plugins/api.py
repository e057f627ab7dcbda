"""What a plugin is given and what it answers: one request, its candidate endpoints, and four protocols.

Plugins run inside the pick, one request at a time: they must not block, and need no locks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from router.scrape import LoraLoad


class PrefixMatch(NamedTuple):
    """How much of a request's prompt an endpoint's cache holds, by one producer's account.

    Attributes:
        blocks: Matched blocks, each weighted by its tier.
        total_blocks: Full blocks of the request; 0: the prompt is shorter than one.
        cached_blocks: Matched blocks, unweighted.
        block_tokens: Tokens of one block.
    """

    blocks: float
    total_blocks: int
    cached_blocks: int
    block_tokens: int

    @property
    def ratio(self) -> float:
        return self.blocks / self.total_blocks if self.total_blocks else 0.0


NO_MATCH = PrefixMatch(0.0, 0, 0, 1)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One candidate: what it declared, what its engine told last, and what this router knows of it.

    Attributes:
        address: "ip:port", its identity.
        id: "namespace/name".
        labels: As in Kubernetes.
        waiting_requests: In the engine's queue.
        running_requests: Being computed.
        kv_usage: Share of the KV cache in use, 0..1.
        load_age_s: Age of the three above, of which one that is not told is 0; None if the engine never told.
        lora: The engine's places for adapters; None if not told.
        inflight_requests: Sent there by this router and not yet over.
        inflight_tokens: Their uncached prompt tokens.
        uncached_tokens: Prompt tokens of this request that it would have to compute.
        cost_s: What the default policy charges, in seconds.
    """

    address: str
    id: str
    labels: Mapping[str, str] = field(default_factory=dict)
    waiting_requests: int = 0
    running_requests: int = 0
    kv_usage: float = 0.0
    load_age_s: float | None = None
    lora: LoraLoad | None = None
    inflight_requests: int = 0
    inflight_tokens: int = 0
    uncached_tokens: int = 0
    cost_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PluginRequest:
    """One request, as plugins see it.

    Attributes:
        id: The request's id.
        model: As the pod will be asked for it; None where the API is not known.
        headers: By lower-case name.
        prompt_tokens: Of all prompts; estimated from the body's size where no tokenizer knows.
        priority: Of its objective.
        now_s: On the router's monotonic clock.
        random: To break ties with.
        attributes: What producers found out, such as a session's id.
        prefixes: By producer's name: matches by address.
        multimodal: Whether the prompt carries more than text.
    """

    id: str
    model: str | None
    headers: Mapping[str, str]
    prompt_tokens: int
    priority: int
    now_s: float
    random: np.random.Generator
    attributes: Mapping[str, str] = field(default_factory=dict)
    prefixes: Mapping[str, Mapping[str, PrefixMatch]] = field(default_factory=dict)
    multimodal: bool = False

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
