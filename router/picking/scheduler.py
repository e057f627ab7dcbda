"""Scheduler: turns index matches and pod loads into a Decision and enters it into the in-flight ledger.

This is the critical section of routing: callers admit one request at a time. No clock, no tokenizers, no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from itertools import repeat
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.jit import kernel_with_arrays
from indexer import GPU_TIER, SPECULATIVE_TIER, PodMatches, SentPrompt, StreamState, Tiers
from indexer.config import engine_name
from indexer.keys import Keys
from router.inflight.dispatch import SEQUENCES_MAX, Dispatch
from router.inflight.ledger import Ledger
from router.inflight.rates import RateSample
from router.picking.candidates import CandidateSet, SessionPods
from router.picking.cost import (
    CACHE_HIT,
    CostInputs,
    CostParameters,
    adapter_delay_s,
    add_hits,
    cost_breakdowns,
    least_cost_first,
)
from router.picking.decision import Candidate, Decision, PipelineResult, Ranking
from router.pods.load_table import PodLoadTable
from router.pods.pod_set import PodSnapshot
from router.prompts.request import PromptTokens, RouteRequest, sequences_of, session_of

# Speculative blocks of a request just sent will be in device memory.
_DEVICE_TIERS = (GPU_TIER, SPECULATIVE_TIER)
_NO_EXTRA, _NO_ROWS = np.zeros(0), np.zeros(0, np.int64)
# First arguments of `add_hits`, which describe the matches of one prompt.
_HitArgs = tuple[
    NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64], int
]
_NO_BLOCKS = np.zeros(0, np.int32)
_NO_MATCHES: _HitArgs = _NO_BLOCKS, np.zeros((0, 1), np.int32), _NO_BLOCKS, _NO_ROWS, _NO_ROWS, 0
# A module global is ten times faster to read than an enum member.
_EXACT = StreamState.EXACT.value
# Copies and adapter loading above this share of a prefill would distort the observed prefill rate.
_OTHER_SHARE = 0.1


class TokenizedRequest(msgspec.Struct, frozen=True):
    """Request with its prompts' tokens and block keys, ready to be scheduled."""

    request: RouteRequest
    tokens: PromptTokens
    keys: Sequence[Keys]  # block keys of each prompt, in the order of `tokens.prompts`; empty if unknown
    degraded: str | None  # why the index is not used; None if it is
    priority: int = 0

    def sent_prompt(self, pod: str, candidates: CandidateSet, matches: PodMatches) -> SentPrompt | None:
        """Return what a pod should store for the first prompt; None if the base model is unknown."""
        base_model, lora_name = candidates.base_model, candidates.lora_name
        if base_model is None:
            return None
        row = matches.rows[pod]
        cached_blocks: int = matches.cached_blocks.item(row)
        speculative_blocks: int = matches.blocks_by_tier.item(row, matches.tiers.speculative)
        salt, held_blocks = self.request.cache_salt, cached_blocks - speculative_blocks
        return SentPrompt(base_model, lora_name, salt, self.tokens.prompts[0], cached_blocks, held_blocks)


class PricedCandidates(NamedTuple):
    """Request with its candidates and their costs, to be ranked."""

    tokenized: TokenizedRequest
    candidates: CandidateSet
    pods: PodSnapshot  # current pods; the candidates may carry older load figures
    matches: Sequence[PodMatches]  # one per prompt; empty if the index is not used
    breakdowns: NDArray[Any]  # cost.COST_BREAKDOWN [candidates]
    hits: NDArray[Any]  # cost.CACHE_HIT [candidates]
    loads: NDArray[Any]  # load_table.POD [candidates]
    now_s: float


class Ranker(Protocol):
    """Replacement for the default order by cost, such as a configured plugin pipeline."""

    def rank(self, priced: PricedCandidates) -> tuple[NDArray[np.int64], PipelineResult]:
        """Return the indices of the candidates that may be picked, best first, and the pipeline's result.

        Raises:
            RequestError: 429 if no candidate passes the filters, 500 if a plugin fails.
        """


@dataclass(eq=False)
class Scheduler:
    """Computes costs, picks a pod and enters the request into the in-flight ledger."""

    load_table: PodLoadTable
    ledger: Ledger
    random: InitVar[np.random.Generator]
    block_tokens: int
    cost: CostParameters = field(default_factory=CostParameters)
    ranker: Ranker | None = None

    def __post_init__(self, random: np.random.Generator) -> None:
        self._draw = random.bit_generator.random_raw
        self._parameters = self.cost.record()
        self._sessions = SessionPods()
        self._tiers: Tiers | None = None
        self._device_tiers = _NO_ROWS
        # Compile the kernels, or load them from their cache, before the first request arrives.
        no_hits, none = (*_NO_MATCHES, self.block_tokens, np.zeros(0, CACHE_HIT)), (_NO_ROWS, _NO_EXTRA)
        add_hits(*no_hits)
        _predict_costs(*no_hits, self.load_table.pods, *none, 0.0, 0.0, 1.0, 0.0, self._parameters, 1)

    def queued_s(self, pods: Sequence[str], now_s: float) -> list[float]:
        """Return the seconds that a request without a prompt would wait at each pod, KV pressure included."""
        rows, hits = self.load_table.rows(pods), np.zeros(len(pods), CACHE_HIT)
        breakdowns, _, _ = self._costs(_NO_MATCHES, hits, rows, _NO_EXTRA, 0, now_s)
        seconds: list[float] = (breakdowns["queued_prefill_s"] + breakdowns["kv_pressure_s"]).tolist()
        return seconds

    def schedule(
        self,
        tokenized: TokenizedRequest,
        candidates: CandidateSet,
        pods: PodSnapshot,
        matches: Sequence[PodMatches],
        now_s: float,
    ) -> tuple[Decision, Sequence[Dispatch]]:
        """Pick a pod and enter the request into the ledger.

        Args:
            pods: Current pods; the candidates may carry older load figures.
            matches: One per prompt.

        Returns:
            The decision, and the entries that the ledger evicted for it; a dry request is not entered.
        """
        request = tokenized.request
        session, session_pod = session_of(request), None
        adapter_s = self._adapter_s(candidates, pods, now_s)
        used = matches if tokenized.degraded is None else ()
        hits, breakdowns, order, most_cached = self._predict(tokenized, candidates, used, adapter_s, now_s)
        if session is not None:
            session_pod = self._sessions.pod_of(session, now_s, candidates.base_model)
            order = _session_first(order, breakdowns["cost_s"], candidates, session_pod)
        result = None
        if self.ranker is not None:
            loads = self.load_table.known(candidates.rows)
            priced = PricedCandidates(tokenized, candidates, pods, used, breakdowns, hits, loads, now_s)
            order, result = self.ranker.rank(priced)
        ranked = Ranking(
            pods=candidates.addresses,
            breakdowns=breakdowns,
            hits=hits,
            order=order,
            prompt_tokens=tokenized.tokens.total,
            block_tokens=self.block_tokens,
            matches=matches,
            most_cached_tokens=most_cached,
        )
        decision = Decision(
            request_id=request.request_id,
            kind=request.kind,
            model=request.model,
            ranked=ranked,
            excluded=candidates.excluded,
            prompt_tokens=tokenized.tokens.total,
            degraded=tokenized.degraded,
            decided_s=now_s,
            priority=tokenized.priority,
            session_pod=session_pod,
            client_model=request.client_model,
            rank=matches[0].ranks.get(ranked.best.pod) if used else None,
            pipeline=result,
            partial=tokenized.tokens.partial,
            sequences=sequences_of(request, len(tokenized.tokens.prompts), SEQUENCES_MAX),
        )
        if request.dry:
            return decision, ()
        return decision, self._enter(decision, candidates, tokenized.keys, matches, adapter_s, session)

    def _predict(
        self,
        tokenized: TokenizedRequest,
        candidates: CandidateSet,
        matches: Sequence[PodMatches],
        extra_s: NDArray[np.float64],
        now_s: float,
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int64], int]:
        """Return the candidates' hits and cost breakdowns, their order, and the most cached tokens."""
        hits = np.zeros(len(candidates.rows), CACHE_HIT)
        prompts = map(self._hit_args, matches, tokenized.tokens.prompts, repeat(candidates))
        first, *others = list(prompts) or [_NO_MATCHES]
        for other in others:
            add_hits(*other, self.block_tokens, hits)
        return hits, *self._costs(first, hits, candidates.rows, extra_s, tokenized.tokens.total, now_s)

    def _costs(
        self,
        first: _HitArgs,
        hits: NDArray[Any],
        rows: NDArray[np.int64],
        extra_s: NDArray[np.float64],
        prompt_tokens: int,
        now_s: float,
    ) -> tuple[NDArray[Any], NDArray[np.int64], int]:
        """Add the first prompt's hits; return cost breakdowns, order and the most cached tokens."""
        load_table = self.load_table
        with load_table.lock:
            return _predict_costs(
                *first,
                self.block_tokens,
                hits,
                load_table.pods,
                rows,
                extra_s,
                float(prompt_tokens),
                float(now_s),
                float(load_table.fleet_tokens_per_s),
                float(load_table.mean_tokens),
                self._parameters,
                self._draw() >> 1,
            )

    def _hit_args(self, match: PodMatches, prompt: NDArray[np.uint32], candidates: CandidateSet) -> _HitArgs:
        """Return the first arguments of `add_hits` for the match of one prompt."""
        if match.tiers is not self._tiers:
            self._tiers = match.tiers
            self._device_tiers = np.array([match.tiers.number(tier) for tier in _DEVICE_TIERS])
        blocks = match.cached_blocks, match.blocks_by_tier, match.strides
        return *blocks, self._device_tiers, candidates.match_rows(match.rows), len(prompt)

    def _adapter_s(self, candidates: CandidateSet, pods: PodSnapshot, now_s: float) -> NDArray[np.float64]:
        """Return the seconds until each pod can use the request's adapter; empty without an adapter."""
        adapter = candidates.lora_name
        if adapter is None:
            return _NO_EXTRA
        adapter_s = np.zeros(len(candidates.rows))
        for at, address in enumerate(candidates.addresses):
            load = pods[address].load if address in pods else None
            if load is not None and now_s - load.scraped_s <= self.cost.load_age_max_s:
                sent = self.ledger.adapters.on(address)
                adapter_s[at] = adapter_delay_s(load.lora, adapter, sent)
        return adapter_s

    def _enter(
        self,
        decision: Decision,
        candidates: CandidateSet,
        keys: Sequence[Keys],
        matches: Sequence[PodMatches],
        adapter_s: NDArray[np.float64],
        session: str | None,
    ) -> Sequence[Dispatch]:
        """Record the session's pod, and enter the request into the ledger if it is charged."""
        executor, prefill = decision.ranked.best, decision.prefill_pod
        if session is not None:
            self._sessions.record(session, executor.pod, decision.decided_s, candidates.base_model)
        if not decision.is_charged:
            return ()
        pod = executor.pod
        if prefill is not None:
            # Charge the prefill to the pod that executes it; the events of its blocks mark the end.
            executor = decision.ranked.candidate_at(candidates.addresses.index(prefill))
        is_exact = executor.view == _EXACT and prefill is None
        loading_s = float(adapter_s[candidates.addresses.index(executor.pod)]) if len(adapter_s) else 0.0
        stored = [match.whole_blocks(executor.pod, each) for match, each in zip(matches, keys, strict=True)]
        # The keys are needed only if other routers follow this one's ledger.
        new_keys = None if self.ledger.changes is None else self._new_keys(stored, executor, prefill)
        return self.ledger.dispatch(
            Dispatch(
                request_id=decision.request_id,
                pod=pod,
                uncached_tokens=executor.uncached_tokens,
                queued_prefill_s=executor.queued_prefill_s,
                own_prefill_s=executor.own_prefill_s,
                confirm_key=_confirm_key(
                    stored, executor.view, matches, executor.pod, is_read=decision.degraded is None
                ),
                rate_sample=_rate_sample(decision, executor, loading_s),
                dispatched_s=decision.decided_s,
                decoding=executor.decoding,
                prefill_pod=prefill,
                adapter=candidates.lora_name,
                sequences=decision.sequences,
                engine=None if decision.rank is None else engine_name(pod, decision.rank),
                # With a separate prefill pod, the reported usage includes transferred blocks.
                predicted_hit_tokens=executor.cached_tokens if is_exact else 0,
            ),
            new_keys,
        )

    def _new_keys(self, keys: Sequence[Keys], executor: Candidate, prefill: str | None) -> Keys | None:
        """Return the keys of the blocks that the request's pods will store and do not have yet."""
        if len(keys) != 1 or executor.view != _EXACT or prefill is not None:
            return np.concatenate(keys) if keys else None
        return keys[0][executor.cached_tokens // self.block_tokens :]


@kernel_with_arrays
def _predict_costs(
    cached_blocks: NDArray[np.int32],
    blocks_by_tier: NDArray[np.int32],
    strides: NDArray[np.int32],
    device_tiers: NDArray[np.int64],
    match_rows: NDArray[np.int64],
    matched_tokens: int,
    block_tokens: int,
    hits: NDArray[Any],
    pods: NDArray[Any],
    rows: NDArray[np.int64],
    extra_s: NDArray[np.float64],
    prompt_tokens: float,
    now_s: float,
    fleet_tokens_per_s: float,
    mean_tokens: float,
    parameters: NDArray[Any],
    seed: int,
) -> tuple[NDArray[Any], NDArray[np.int64], int]:
    """Run `add_hits`, `cost_breakdowns` and `least_cost_first`; also return the most cached tokens."""
    inputs = CostInputs(prompt_tokens, now_s, fleet_tokens_per_s, mean_tokens)
    add_hits(
        cached_blocks, blocks_by_tier, strides, device_tiers, match_rows, matched_tokens, block_tokens, hits
    )
    breakdowns = cost_breakdowns(pods, rows, hits, extra_s, inputs, parameters[0])
    most_cached_tokens = 0
    for cached_tokens in hits["cached_tokens"]:
        most_cached_tokens = max(most_cached_tokens, cached_tokens)
    return breakdowns, least_cost_first(breakdowns["cost_s"], seed), most_cached_tokens


def _session_first(
    order: NDArray[np.int64], costs_s: NDArray[np.float64], candidates: CandidateSet, session_pod: str | None
) -> NDArray[np.int64]:
    """Return the order with the session's pod first, if no candidate costs less."""
    if session_pod not in candidates.address_set:
        return order
    at = candidates.addresses.index(session_pod)
    if costs_s[at] > costs_s[order[0]]:
        return order
    return np.concatenate((np.array([at]), order[order != at]))


def _rate_sample(decision: Decision, executor: Candidate, loading_s: float) -> RateSample:
    """Return how the request's time to first token may be used to estimate the executor's prefill rate."""
    if decision.degraded is not None or decision.partial is not None:
        return RateSample.NONE
    # Behind a queue, the time to first token includes the prefills of other requests.
    if executor.awaiting or executor.queued_prefill_s:
        return RateSample.NONE
    if executor.copy_s + loading_s > _OTHER_SHARE * executor.own_prefill_s:
        return RateSample.NONE
    return RateSample.EXACT if executor.view == _EXACT else RateSample.UPPER_BOUND


def _confirm_key(
    keys: Sequence[Keys], view: str, matches: Sequence[PodMatches], pod: str, *, is_read: bool
) -> int | None:
    """Return the key of the last full block, whose event ends the prefill; None if no event is expected."""
    # A partial last block is published only once decoding has filled it.
    if len(keys) != 1 or view != _EXACT or not (blocks := len(keys[0])):
        return None
    match = matches[0]
    # An engine that does not read its cache publishes all blocks again.
    return keys[0].item(-1) if not is_read or match.cached_blocks.item(match.rows[pod]) < blocks else None
