"""Records of a routing decision and its reasons, read by the protocol handlers and the decision log.

Costs and matches stay in arrays: a pick among hundreds of pods creates one object, and text is formatted only
on demand.
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

from indexer import DispatchKey, PodMatches, PromptCauses, StreamState
from router.prompts.request import RANK_HEADER

_NO_STATES: Mapping[str, StreamState] = MappingProxyType({})
_NO_CAUSES = PromptCauses({})


class Candidate(msgspec.Struct, frozen=True):
    """One pod with the cost of the request there, its cache hit and the state of its view.

    The fields up to `load_age_s` are those of cost.COST_BREAKDOWN, in the same order.
    """

    pod: str
    cost_s: float
    queued_prefill_s: float
    own_prefill_s: float  # before multiplication by `own_weight`
    own_weight: float
    copy_s: float
    kv_pressure_s: float
    extra_s: float  # seconds to load the request's LoRA adapter, and of the pod's last failures
    slowdown: float  # factor by which decoding requests slow the prefill, at least 1
    awaiting: int  # requests from this router that await their first token
    decoding: int  # requests past their first token, from any client
    load_age_s: float | None  # age of the engine's metrics; None if never scraped
    cached_tokens: int  # prompt tokens that the pod serves from its cache, in any tier
    uncached_tokens: int
    host_tokens: int  # those of `cached_tokens` that must be copied to the device first
    view: str  # state of the pod's view in the index: EXACT, RECOVERING or STALE


@dataclass(slots=True, eq=False)
class Ranking:
    """Candidates in the order of preference; never empty."""

    pods: tuple[str, ...]
    breakdowns: NDArray[Any]  # cost.COST_BREAKDOWN [pods]
    hits: NDArray[Any]  # cost.CACHE_HIT [pods]
    order: NDArray[np.int64]  # int64 [candidates], indices into `pods`, best first
    prompt_tokens: int
    block_tokens: int
    matches: Sequence[PodMatches]  # one per prompt; empty if the index was not queried
    most_cached_tokens: int  # maximum of `hits["cached_tokens"]`
    best: Candidate = field(init=False)
    causes: PromptCauses = field(init=False, default=_NO_CAUSES)  # of the request's tokens at its pod
    _states: Mapping[str, StreamState] = field(init=False)

    def __post_init__(self) -> None:
        # Keep the mapping of this moment: the index replaces it when a state changes.
        self._states = self.matches[0].states if self.matches else _NO_STATES
        self.best = self.candidate_at(self.order.item(0))

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Candidate]:
        return map(self.candidate_at, self.order.tolist())

    def __getitem__(self, rank: int) -> Candidate:
        return self.candidate_at(self.order.item(rank))

    @property
    def memory_weight(self) -> int:
        """Return the memory use in units of one candidate with one prompt; each extra prompt adds a fifth."""
        return len(self.pods) * (4 + max(1, len(self.matches))) // 5

    @property
    def views(self) -> tuple[str, ...]:
        """Return the state of each pod's view, in the order of `pods`."""
        return tuple([self._states.get(pod) or self._view(pod) for pod in self.pods])

    def cached_tokens_by_tier(self, rank: int) -> dict[str, int]:
        """Return the matched prompt tokens of a candidate by the fastest tier that has each block.

        The sum may exceed `cached_tokens`: an engine computes the last token and serves only whole blocks.
        """
        pod, tokens = self[rank].pod, dict[str, int]()
        for match in self.matches:
            for tier, blocks in match[pod].blocks_by_tier.items():
                tokens[tier] = tokens.get(tier, 0) + blocks * self.block_tokens
        return tokens

    def candidate_at(self, index: int) -> Candidate:
        """Return the candidate at an index of `pods`, whatever its rank."""
        pod = self.pods[index]
        cached_tokens, host_tokens = self.hits.item(index)
        *cost, age_s = self.breakdowns.item(index)
        return Candidate(  # type: ignore[call-arg]  # mypy cannot count the fields of a cost breakdown
            pod,
            *cost,
            age_s if age_s != math.inf else None,
            cached_tokens,
            self.prompt_tokens - cached_tokens,
            host_tokens,
            self._states.get(pod) or self._view(pod),
        )

    def _view(self, pod: str) -> str:
        """Return the view state of a pod without an open event stream."""
        return self.matches[0].state(pod) if self.matches else StreamState.STALE


def reason_for(
    ranked: Ranking, prompt_tokens: int, degraded: str | None, session_pod: str | None = None
) -> str:
    """Return one sentence for operators that explains why `ranked.best` was picked."""
    best = ranked.best
    if degraded is not None:
        return f"by load alone ({degraded}): {_queue(best)}"
    if len(ranked) == 1:
        return f"the only candidate: {_cached(best, prompt_tokens)}"
    longest, cached_tokens = ranked.most_cached_tokens, ranked.hits["cached_tokens"][ranked.order].tolist()
    if best.cached_tokens < longest:
        holder = ranked[cached_tokens.index(max(cached_tokens))]
        return (
            f"lowest cost: {_queue(best)}, although {holder.pod} has {longest} of {prompt_tokens} tokens "
            f"cached (cost {holder.cost_s:.3f} s against {best.cost_s:.3f} s)"
        )
    if cached_tokens.count(max(cached_tokens)) == 1:
        return f"longest cached prefix: {_cached(best, prompt_tokens)}"
    if best.cost_s == ranked[1].cost_s:
        chosen = "session's pod" if best.pod == session_pod else "random pod"
        return f"{chosen} among equal costs: {_cached(best, prompt_tokens)}"
    return f"lowest cost: {_cached(best, prompt_tokens)}, {_queue(best)}"


def _cached(candidate: Candidate, prompt_tokens: int) -> str:
    return f"{candidate.cached_tokens} of {prompt_tokens} tokens cached"


def _queue(candidate: Candidate) -> str:
    if not candidate.awaiting:
        return "queue empty"
    return f"queue of {candidate.awaiting} ({candidate.queued_prefill_s:.3f} s)"


class PipelineResult(msgspec.Struct, frozen=True):
    """Decision of a configured plugin pipeline, apart from the order of the candidates."""

    destinations: tuple[str, ...]  # addresses that the gateway tries in order; never empty
    scores: Mapping[str, float]  # weighted sum by address, of all pods that passed the filters
    excluded: Mapping[str, str]  # reason by address, of all pods that a filter removed
    request_headers: Mapping[str, str]  # to set on the request
    response_headers: Mapping[str, str]  # to set on the response
    prefill: str | None  # address of the pod that prefills, if the destination only decodes
    reason: str  # one clause for operators


class Decision(msgspec.Struct, frozen=True):
    """Routing decision for one request, with its reasons."""

    request_id: str
    kind: str
    model: str | None
    ranked: Ranking
    excluded: Mapping[str, str]  # reason by address, of the pods that were no candidates
    prompt_tokens: int  # estimated from the body's size when `degraded`
    degraded: str | None  # why the index was not used; None if it was
    decided_s: float  # on the router's monotonic clock
    priority: int = 0  # of the request's objective; requests below 0 may be rejected under load
    session_pod: str | None = None  # last pod of the request's session; None without one
    client_model: str | None = None  # model name that the client sent, if the router rewrote it
    pipeline: PipelineResult | None = None  # None if the default cost policy picked
    partial: str | None = None  # why only a prefix of the prompt was known; None if all of it was
    rank: int | None = None  # data-parallel rank of the pod; None where the pod has one, or chooses it
    sequences: int = 1  # sequences that the engine decodes: samples or beams of all prompts

    @property
    def key(self) -> DispatchKey:
        return DispatchKey(self.request_id, self.decided_s)

    @property
    def is_charged(self) -> bool:
        """Return whether the request counts as load of its pod; requests without a body do not."""
        return self.prompt_tokens > 0

    @property
    def primary(self) -> Candidate:
        return self.ranked.best

    @property
    def destination(self) -> str:
        """Return the comma-separated addresses that the gateway tries in order."""
        return self.primary.pod if self.pipeline is None else ",".join(self.pipeline.destinations)

    @property
    def request_headers(self) -> Mapping[str, str]:
        """Return the headers to set on the request besides the destination."""
        headers: Mapping[str, str] = self.pipeline.request_headers if self.pipeline is not None else {}
        return headers if self.rank is None else {**headers, RANK_HEADER: str(self.rank)}

    @property
    def prefill_pod(self) -> str | None:
        """Return the address of the pod that prefills, or None if the destination does."""
        return self.pipeline.prefill if self.pipeline is not None else None

    @property
    def reason(self) -> str:
        if self.pipeline is not None:
            return self.pipeline.reason
        return reason_for(self.ranked, self.prompt_tokens, self.degraded, self.session_pod)
