"""A request's candidates in the order of their prices: arrays in, a Candidate out for each one asked for.

Keeps arrays as they came from pricing and matching, so that a pick among hundreds of pods makes one object,
and the rest only for whoever wants to see them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from indexer import PodMatches, StreamState

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


class Ranking:
    """Candidates, best first; never empty.

    Args:
        prices: cost.PRICE [pods].
        credits: cost.CREDIT [pods].
        order: int64 [pods], places in the above, best first.
        matches: One for each prompt; empty when the cache's view was not used.
        most_cached_tokens: The most that any candidate would serve from its cache.
    """

    __slots__ = (
        *("_block_tokens", "_matches", "_states", "_tokens", "best", "credits"),
        *("most_cached_tokens", "order", "pods", "prices"),
    )

    def __init__(
        self,
        pods: tuple[str, ...],
        prices: NDArray[Any],
        credits: NDArray[Any],
        order: NDArray[np.int64],
        prompt_tokens: int,
        block_tokens: int,
        matches: Sequence[PodMatches],
        most_cached_tokens: int,
    ) -> None:
        self.pods = pods
        self.prices = prices
        self.credits = credits
        self.order = order
        self._tokens = prompt_tokens
        self._block_tokens = block_tokens
        self._matches = matches
        self.most_cached_tokens = most_cached_tokens
        # The states go on, as others; what is told later is what was true now.
        self._states = matches[0].states if matches else _NO_STATES
        self.best = self.at_place(order.item(0))

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Candidate]:
        return map(self.at_place, self.order.tolist())

    def __getitem__(self, rank: int) -> Candidate:
        return self.at_place(self.order.item(rank))

    @property
    def weight(self) -> int:
        """As how many candidates for one prompt it takes memory: a further prompt adds about a fifth."""
        return len(self.pods) * (4 + max(1, len(self._matches))) // 5

    @property
    def holders_of_most(self) -> tuple[int, int]:
        """How many would serve the most, and the rank of the best of them."""
        cached_tokens = self.credits["cached_tokens"][self.order].tolist()
        most = max(cached_tokens)
        return cached_tokens.count(most), cached_tokens.index(most)

    @property
    def views(self) -> tuple[str, ...]:
        """Return what each pod's Candidate says of its view, in the order of `pods`."""
        return tuple([self._states.get(pod) or self._view(pod) for pod in self.pods])

    def cached_tokens_by_tier(self, at: int) -> dict[str, int]:
        """Prompt tokens whose blocks this candidate best holds in which tier.

        All of them, while an engine computes at least the last token and serves only whole blocks.
        """
        pod, tokens = self[at].pod, dict[str, int]()
        for match in self._matches:
            for tier, blocks in match[pod].blocks_by_tier.items():
                tokens[tier] = tokens.get(tier, 0) + blocks * self._block_tokens
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
            self._tokens - cached_tokens,
            host_tokens,
            self._states.get(pod) or self._view(pod),
        )

    def _view(self, pod: str) -> str:
        """Of a pod whose stream was not opened."""
        return self._matches[0].state(pod) if self._matches else StreamState.STALE


def reason_for(
    ranked: Ranking, prompt_tokens: int, degraded: str | None, session_pod: str | None = None
) -> str:
    """One sentence for a person: why the first of `ranked`."""
    best = ranked.best
    if degraded is not None:
        return f"by load alone ({degraded}): {_queue(best)}"
    if len(ranked) == 1:
        return f"the only candidate: {_cached(best, prompt_tokens)}"
    longest, (holders, first) = ranked.most_cached_tokens, ranked.holders_of_most
    if best.cached_tokens < longest:
        holder = ranked[first]
        return (
            f"{_queue(best)}, though {holder.pod} holds {longest} of {prompt_tokens} tokens: "
            f"it would answer later ({holder.cost_s:.3f} s against {best.cost_s:.3f} s)"
        )
    if holders == 1:
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
