"""One request in, one Decision out: the straight line from tokens to the ledger that all doors share.

Knows no gRPC and no HTTP. Tokenizing and hashing run in parallel; matching, pricing, picking and entering
into the ledger are one short critical section, so that concurrent picks see each other.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from random import Random
from threading import Lock
from typing import Protocol

from indexer import PodMatch, StreamState, TokenError
from indexer.tiers import GPU_TIER
from router.candidates import Candidates, candidates_for
from router.cost import CostParameters, PodFacts, price
from router.decision import Decision
from router.errors import RequestError
from router.ledger import Dispatch, Ledger
from router.pick import least_cost_first, reason_for
from router.pods import Pod, PodSet
from router.rates import PrefillRates
from router.request import RouteRequest
from router.tokens import LONGER_THAN_CONTEXT, PromptTokens, TokenizerRegistry

_LOAD_AGE_MAX_S = 5.0
# Each prompt of a request is matched on its own, while other picks wait.
_PROMPTS_MAX = 64


class Index(Protocol):
    """What routing needs of the indexer; see indexer.KvIndexer."""

    @property
    def block_tokens(self) -> int:
        """Tokens of one block."""

    def block_keys(
        self, model: str, token_ids: Sequence[int], *, lora_name: str | None, cache_salt: str | None
    ) -> list[int]:
        """Keys of the full blocks of a prompt."""

    def match(self, keys: Sequence[int], pods: Collection[str]) -> Mapping[str, PodMatch]:
        """How much of `keys` each pod holds."""

    def speculate(self, request_id: str, pod: str, keys: Sequence[int], now_s: float) -> None:
        """Assumes that the pod will soon hold `keys`."""


class DecisionSink(Protocol):
    """Is told of every decision and every refusal."""

    def decided(self, decision: Decision, displaced: Sequence[Dispatch], took_s: float) -> None:
        """A pod was picked; `displaced` are requests that the ledger had to give up for it."""

    def refused(self, error: RequestError, took_s: float) -> None:
        """No pod was picked."""


class Router:
    """Routes requests; safe to call from any number of threads."""

    def __init__(
        self,
        *,
        pods: PodSet,
        tokenizers: TokenizerRegistry,
        index: Index,
        ledger: Ledger,
        rates: PrefillRates,
        cost: CostParameters,
        sink: DecisionSink,
        random: Random,
    ) -> None:
        self._pods = pods
        self._tokenizers = tokenizers
        self._index = index
        self._ledger = ledger
        self._rates = rates
        self._cost = cost
        self._sink = sink
        self._random = random
        self._picking = Lock()

    def route(self, request: RouteRequest, now_s: float) -> Decision:
        """Picks a pod and enters the request into the ledger.

        Raises:
            RequestError: The request cannot be routed; carries the answer for the client.
        """
        started_s = time.perf_counter()
        try:
            candidates = candidates_for(request, self._pods.snapshot())
            tokens = self._tokenizers.prompt_tokens(request, candidates.base_model, candidates.context_tokens)
            keys, degraded = self._keys(request, tokens, candidates)
        except RequestError as error:
            self._sink.refused(error, time.perf_counter() - started_s)
            raise
        addresses = [pod.address for pod in candidates.pods]
        with self._picking:
            # Pods of another base model (two bases may share a name) hold none of these keys, truly.
            matches = [self._index.match(prompt, addresses) for prompt in keys]
            facts = self._facts(candidates.pods, tokens, matches, now_s)
            decision = self._decide(request, tokens, degraded, candidates, facts, now_s)
            displaced = self._commit(decision, keys, matches)
        self._sink.decided(decision, displaced, time.perf_counter() - started_s)
        return decision

    def _keys(
        self, request: RouteRequest, tokens: PromptTokens, candidates: Candidates
    ) -> tuple[list[list[int]], str | None]:
        """Block keys per prompt, and why there are none."""
        if tokens.degraded is not None or candidates.base_model is None:
            return [], tokens.degraded or "no_model"
        if len(tokens.prompts) > _PROMPTS_MAX:
            return [], "too_many_prompts"
        context_tokens = candidates.context_tokens
        if context_tokens is not None and context_tokens < max(map(len, tokens.prompts), default=0):
            # The engine will refuse it: no pod's cache will ever hold it.
            return [], LONGER_THAN_CONTEXT
        base, lora, salt = candidates.base_model, candidates.lora_name, request.cache_salt
        try:
            return [
                self._index.block_keys(base, ids, lora_name=lora, cache_salt=salt) for ids in tokens.prompts
            ], None
        except TokenError:
            return [], "token_error"

    def _facts(
        self,
        pods: Sequence[Pod],
        tokens: PromptTokens,
        matches: Sequence[Mapping[str, PodMatch]],
        now_s: float,
    ) -> list[PodFacts]:
        return [
            self._pod_facts(pod, tokens, [match[pod.address] for match in matches], now_s) for pod in pods
        ]

    def _pod_facts(
        self, pod: Pod, tokens: PromptTokens, matches: Sequence[PodMatch], now_s: float
    ) -> PodFacts:
        work = self._ledger.work(pod.address)
        block = self._index.block_tokens
        cached = host = 0
        for match, prompt in zip(matches, tokens.prompts, strict=False):
            # An engine computes at least the last token, and serves only whole blocks.
            servable = min(match.cached_blocks * block, max(0, len(prompt) - 1) // block * block)
            cached += servable
            # Whatever is not on the device has to be brought there first.
            host += max(0, servable - match.blocks_by_tier.get(GPU_TIER, 0) * block)
        used, capacity = _kv_use(pod, work.held_tokens, now_s)
        return PodFacts(
            pod=pod.address,
            cached_tokens=cached,
            host_tokens=host,
            queued_tokens=work.awaiting_tokens,
            awaiting=work.awaiting,
            decoding=work.decoding,
            prefill_tokens_per_s=self._rates.tokens_per_s(pod.address),
            kv_used_tokens=used,
            kv_capacity_tokens=capacity,
            view=(matches[0].state if matches else StreamState.STALE).value,
        )

    def _decide(
        self,
        request: RouteRequest,
        tokens: PromptTokens,
        degraded: str | None,
        candidates: Candidates,
        facts: Sequence[PodFacts],
        now_s: float,
    ) -> Decision:
        priced, weight = price(tokens.total, facts, self._cost)
        ranked = least_cost_first(priced, self._random)
        return Decision(
            request_id=request.request_id,
            kind=request.kind.value,
            model=request.model,
            ranked=ranked,
            excluded=candidates.excluded,
            own_weight=weight,
            prompt_tokens=tokens.total,
            degraded=degraded,
            reason=reason_for(ranked, tokens.total, degraded),
            decided_s=now_s,
        )

    def _commit(
        self, decision: Decision, keys: list[list[int]], matches: Sequence[Mapping[str, PodMatch]]
    ) -> Sequence[Dispatch]:
        """Enters the pick into the ledger and the index, so that the next pick sees it."""
        if not decision.prompt_tokens:
            return ()
        best = decision.primary
        displaced = self._ledger.dispatch(
            Dispatch(
                request_id=decision.request_id,
                pod=best.pod,
                uncached_tokens=best.uncached_tokens,
                queued_prefill_s=best.queued_prefill_s,
                own_prefill_s=best.own_prefill_s,
                confirm_key=_confirm_key(keys, [match[best.pod] for match in matches]),
                found_idle=best.awaiting == 0,
                dispatched_s=decision.decided_s,
            )
        )
        if keys:
            every_key = [key for prompt in keys for key in prompt]
            self._index.speculate(decision.request_id, best.pod, every_key, decision.decided_s)
        return displaced


def _confirm_key(keys: list[list[int]], matches: Sequence[PodMatch]) -> int | None:
    """The key whose announcement ends the prefill: the last full block's, where the pod will announce it."""
    if len(keys) != 1 or not keys[0] or matches[0].state is not StreamState.EXACT:
        return None
    return keys[0][-1] if matches[0].cached_blocks < len(keys[0]) else None


def _kv_use(pod: Pod, held_tokens: int, now_s: float) -> tuple[float, int | None]:
    """Tokens that running requests hold in a pod's KV cache (the greater of two accounts), and its size."""
    load = pod.load
    if load is None or load.kv_capacity_tokens is None:
        return float(held_tokens), None
    if now_s - load.scraped_s > _LOAD_AGE_MAX_S:
        return float(held_tokens), load.kv_capacity_tokens
    return max(load.kv_usage * load.kv_capacity_tokens, held_tokens), load.kv_capacity_tokens
