"""What was decided for one request and why, as doors answer it and explain keeps it; values only.

Arrays stay as they came from pricing and matching: a pick among hundreds of pods makes one object, and
nothing is put into words before somebody asks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from indexer import DispatchKey, PodMatches, StreamState

_NO_STATES: Mapping[str, StreamState] = MappingProxyType({})


class Candidate(msgspec.Struct, frozen=True):
    """One pod with its price (see cost.PRICE, in that order), its credit, and what was known of its cache."""

    pod: str
    cost_s: float
    queued_prefill_s: float
    own_prefill_s: float  # not yet multiplied by `own_weight`
    own_weight: float
    copy_s: float
    kv_pressure_s: float
    extra_s: float  # seconds to bring the request's adapter in
    slowdown: float  # by how much decoding requests slow its prefill, 1 or more
    awaiting: int  # requests of ours that await their first token there
    decoding: int  # requests past it, others' among them
    load_age_s: float | None  # age of the engine's own account of its load; None if it never told
    cached_tokens: int  # prompt tokens that the pod will serve from its cache, in any tier
    uncached_tokens: int
    host_tokens: int  # served tokens that must be copied from beyond the device first
    view: str  # whether what is known of the cache is EXACT, RECOVERING or STALE


@dataclass(slots=True, eq=False)
class Ranking:
    """Candidates, best first; never empty."""

    pods: tuple[str, ...]
    prices: NDArray[Any]  # cost.PRICE [pods]
    credits: NDArray[Any]  # cost.CREDIT [pods]
    order: NDArray[np.int64]  # int64 [pods], places in the above, best first
    prompt_tokens: int
    block_tokens: int
    matches: Sequence[PodMatches]  # one for each prompt; empty when the cache's view was not used
    most_cached_tokens: int  # the most that any candidate would serve from its cache
    best: Candidate = field(init=False)
    _states: Mapping[str, StreamState] = field(init=False)

    def __post_init__(self) -> None:
        # The states go on, as others; what is told later is what was true now.
        self._states = self.matches[0].states if self.matches else _NO_STATES
        self.best = self.at_place(self.order.item(0))

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Candidate]:
        return map(self.at_place, self.order.tolist())

    def __getitem__(self, rank: int) -> Candidate:
        return self.at_place(self.order.item(rank))

    @property
    def weight(self) -> int:
        """As how many candidates for one prompt it takes memory: a further prompt adds about a fifth."""
        return len(self.pods) * (4 + max(1, len(self.matches))) // 5

    @property
    def views(self) -> tuple[str, ...]:
        """Return what each pod's Candidate says of its view, in the order of `pods`."""
        return tuple([self._states.get(pod) or self._view(pod) for pod in self.pods])

    def cached_tokens_by_tier(self, at: int) -> dict[str, int]:
        """Prompt tokens whose blocks this candidate best holds in which tier.

        All of them, while an engine computes at least the last token and serves only whole blocks.
        """
        pod, tokens = self[at].pod, dict[str, int]()
        for match in self.matches:
            for tier, blocks in match[pod].blocks_by_tier.items():
                tokens[tier] = tokens.get(tier, 0) + blocks * self.block_tokens
        return tokens

    def at_place(self, place: int) -> Candidate:
        """The candidate at a place of the arrays, whatever its rank."""
        pod = self.pods[place]
        cached_tokens, host_tokens = self.credits.item(place)
        *price, age_s = self.prices.item(place)
        return Candidate(  # type: ignore[call-arg]  # a price has as many fields as there are here
            pod,
            *price,
            age_s if age_s != math.inf else None,
            cached_tokens,
            self.prompt_tokens - cached_tokens,
            host_tokens,
            self._states.get(pod) or self._view(pod),
        )

    def _view(self, pod: str) -> str:
        """State of a pod whose stream was not opened."""
        return self.matches[0].state(pod) if self.matches else StreamState.STALE


def reason_for(
    ranked: Ranking, prompt_tokens: int, degraded: str | None, session_pod: str | None = None
) -> str:
    """One sentence for a person: why the first of `ranked`."""
    best = ranked.best
    if degraded is not None:
        return f"by load alone ({degraded}): {_queue(best)}"
    if len(ranked) == 1:
        return f"the only candidate: {_cached(best, prompt_tokens)}"
    longest, held = ranked.most_cached_tokens, ranked.credits["cached_tokens"][ranked.order].tolist()
    if best.cached_tokens < longest:
        holder = ranked[held.index(max(held))]
        return (
            f"{_queue(best)}, though {holder.pod} holds {longest} of {prompt_tokens} tokens: "
            f"it would answer later ({holder.cost_s:.3f} s against {best.cost_s:.3f} s)"
        )
    if held.count(max(held)) == 1:
        return f"longest cached prefix: {_cached(best, prompt_tokens)}"
    if best.cost_s == ranked[1].cost_s:
        chosen = "its session's pod" if best.pod == session_pod else "by chance"
        return f"{chosen} among equals: {_cached(best, prompt_tokens)}"
    return f"least work: {_cached(best, prompt_tokens)}, {_queue(best)}"


def _cached(candidate: Candidate, prompt_tokens: int) -> str:
    return f"{candidate.cached_tokens} of {prompt_tokens} tokens cached"


def _queue(candidate: Candidate) -> str:
    if not candidate.awaiting:
        return "nobody queues there"
    return f"{candidate.awaiting} queued there ({candidate.queued_prefill_s:.3f} s)"


class Routing(msgspec.Struct, frozen=True):
    """Decisions of a configured pipeline beyond the order."""

    destinations: tuple[str, ...]  # addresses for the gateway to try, in order; never empty
    scores: Mapping[str, float]  # weighted sums by address, of all that passed the filters
    excluded: Mapping[str, str]  # those that did not pass, and why
    request_headers: Mapping[str, str]  # to set on the request
    response_headers: Mapping[str, str]  # to set on the response
    prefill: str | None  # address of the pod that prefills, where the destination only decodes; else None
    reason: str  # one clause for a person


class Decision(msgspec.Struct, frozen=True):
    """Decision for one request, and its grounds."""

    request_id: str
    kind: str
    model: str | None
    ranked: Ranking  # the candidates, best first; never empty
    excluded: Mapping[str, str]  # the other pods, and why each was none
    prompt_tokens: int  # estimated from the body's size when `degraded`
    degraded: str | None  # why the cache's view was not used; None when it was
    decided_s: float  # on the router's monotonic clock
    priority: int = 0  # of the request; below 0 it may be shed
    session_pod: str | None = None  # where its session was; None: it has none, or it is the first request
    client_model: str | None = None  # as the client named the model, where it was rewritten
    routing: Routing | None = None  # what a configured pipeline decided; None where the cost policy picked
    partial: str | None = None  # why only the beginning of the prompt was known; None when all of it was
    is_comparable: bool = True  # whether the answer's usage tells what is predicted

    @property
    def key(self) -> DispatchKey:
        return DispatchKey(self.request_id, self.decided_s)

    @property
    def is_charged(self) -> bool:
        """Whether it is work for a pod, and so in the ledger: a request without a body is none."""
        return self.prompt_tokens > 0

    @property
    def primary(self) -> Candidate:
        return self.ranked.best

    @property
    def destination(self) -> str:
        """Addresses for a gateway to try, in order, between commas."""
        return self.primary.pod if self.routing is None else ",".join(self.routing.destinations)

    @property
    def prefill_pod(self) -> str | None:
        """The pod that prefills, where the picked one only decodes; else None."""
        return self.routing.prefill if self.routing is not None else None

    @property
    def reason(self) -> str:
        if self.routing is not None:
            return self.routing.reason
        return reason_for(self.ranked, self.prompt_tokens, self.degraded, self.session_pod)
