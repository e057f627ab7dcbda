"""Router core: turns one request into one Decision, for all protocol handlers.

Tokenizing and hashing run in parallel. Matching, costs, picking and the ledger entry form one short critical
section, so that each pick sees the load and the cached blocks that earlier picks cause.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from indexer import Cause, PodMatches, PromptCauses, TokenError
from indexer.config import engine_name
from indexer.keys import Keys
from router.errors import SaturatedError
from router.inflight.dispatch import Dispatch
from router.inflight.failures import PodFailures
from router.picking.candidates import CandidateCache, CandidateSet
from router.picking.decision import Decision
from router.picking.flow import FlowControl
from router.picking.flow_queue import ProbabilisticAdmitter, SaturationDetector
from router.picking.scheduler import Scheduler, TokenizedRequest
from router.pods.load_table import PodLoadTable
from router.pods.pod_set import Pod, PodSet
from router.prompts.request import (
    CACHE_NOT_READ,
    LONGER_THAN_CONTEXT,
    PROMPTS_MAX,
    RANKED_KINDS,
    TOO_MANY_PROMPTS,
    PromptTokens,
    RouteRequest,
    reads_cache,
)
from router.prompts.tokenizers import TokenizerRegistry

if TYPE_CHECKING:
    from indexer import KvIndexer


# In the order of precedence.
OBJECTIVE_HEADERS = ("x-llm-d-inference-objective", "x-gateway-inference-objective")


@dataclass(slots=True)
class Admission:
    """Rejects requests of negative priority while their candidates are saturated."""

    priorities: Mapping[str, int]  # by objective; the mapping is replaced on changes
    detector: SaturationDetector | None  # None: no request is rejected
    load_table: PodLoadTable
    admitters: Sequence[ProbabilisticAdmitter] = ()  # reject requests at random, before saturation

    def admit(self, headers: Mapping[str, str], rows: NDArray[np.int64], now_s: float) -> int:
        """Return the request's priority.

        Args:
            rows: int64 [candidates], their rows in the load table.

        Raises:
            SaturatedError: 429: the priority is below 0 and the candidates are saturated.
        """
        priority = self.priority_of(headers)
        if priority >= 0 or (self.detector is None and not self.admitters):
            return priority
        pods = self.load_table.known(rows)
        saturation = self.detector.saturation(pods, 0, now_s) if self.detector is not None else 0.0
        if saturation >= 1.0 or any(admitter.rejects(pods, now_s) for admitter in self.admitters):
            raise SaturatedError(
                f"the model servers are saturated ({saturation:.2f}) and the request's priority is {priority}"
            )
        return priority

    def priority_of(self, headers: Mapping[str, str]) -> int:
        """Return the priority of the request's objective; 0 without a known objective."""
        priorities = self.priorities
        if not priorities:
            return 0
        objective = next((headers[name] for name in OBJECTIVE_HEADERS if name in headers), "")
        return priorities.get(objective, 0)


@dataclass(slots=True, kw_only=True)
class Router:
    """Picks a pod for each request. Thread-safe."""

    pods: PodSet
    tokenizers: TokenizerRegistry
    index: KvIndexer
    admission: Admission
    scheduler: Scheduler
    # Called with each decision, the ledger entries evicted for it, and the arrival time of its request.
    dispatched: Callable[[Decision, Sequence[Dispatch], float], None]
    failures: PodFailures
    flow: FlowControl | None = None  # None: flow control is off
    wake: Callable[[Sequence[Pod]], None] | None = None  # called with candidates that all sleep
    picked: Callable[[TokenizedRequest, Decision], None] | None = None  # called with each pick
    clock: Callable[[], float] = time.perf_counter  # measures the time spent inside
    _candidates: CandidateCache = field(init=False)
    _picking: Lock = field(init=False, default_factory=Lock)

    def __post_init__(self) -> None:
        self._candidates = CandidateCache(self.pods)

    def route(
        self,
        request: RouteRequest,
        now_s: float,
        is_active: Callable[[], bool] | None = None,
        step_done: Callable[[], None] = lambda: None,
    ) -> Decision:
        """Pick a pod and enter the request into the ledger.

        A dry request does not wait in flow control, but pods may be asked to render its prompt.

        Args:
            now_s: Arrival of the request, on the router's monotonic clock.
            is_active: Returns whether the client is still connected; None if that is unknown.
            step_done: Called once the candidates are known, and again once the index has been matched.

        Raises:
            RequestError: The request cannot be routed; the error carries the response to the client.
        """
        started_s = self.clock()
        if self.flow is None or request.dry:
            tokenized, decision, displaced = self._routed(request, started_s, now_s, step_done)
        else:
            with self.flow.admit(request, is_active):
                waited_s = self.clock() - started_s
                begun_s = started_s + waited_s
                tokenized, decision, displaced = self._routed(request, begun_s, now_s + waited_s, step_done)
        if request.dry:
            return decision
        self.dispatched(decision, displaced, now_s)
        if self.picked is not None:
            self.picked(tokenized, decision)
        return decision

    def _routed(
        self, request: RouteRequest, started_s: float, now_s: float, step_done: Callable[[], None]
    ) -> tuple[TokenizedRequest, Decision, Sequence[Dispatch]]:
        candidates = self._candidates.get(request)
        priority = self.admission.admit(request.headers, candidates.rows, now_s)
        step_done()
        base_model, context_tokens = candidates.base_model, candidates.context_tokens
        tokens = self.tokenizers.prompt_tokens(request, base_model, context_tokens, candidates.pods)
        # A sleeping pod is a candidate only if all candidates sleep. Requests without a body wake none.
        if candidates.pods[0].asleep and self.wake is not None and tokens.total and not request.dry:
            self.wake(candidates.pods)
        keys, degraded = self._keys(request, tokens, candidates)
        if degraded is None and not reads_cache(request):
            # Keep the keys: the engine stores the blocks anyway, and their events end the prefill.
            degraded = CACHE_NOT_READ
        tokenized = TokenizedRequest(request, tokens, keys, degraded, priority)
        with self._picking:
            decision, displaced = self._pick(tokenized, candidates, started_s, now_s, step_done)
        decision.ranked.causes = self._causes(tokenized, candidates, decision)
        return tokenized, decision, displaced

    def _causes(
        self, tokenized: TokenizedRequest, candidates: CandidateSet, decision: Decision
    ) -> PromptCauses:
        """Return why the request's tokens are served from a cache or computed."""
        model, total = candidates.base_model, decision.prompt_tokens
        if decision.degraded is not None or model is None:
            return PromptCauses({Cause.UNKNOWN: total} if total else {})
        pod = decision.prefill_pod or decision.primary.pod
        matches, keys, prompts = decision.ranked.matches, tokenized.keys, tokenized.tokens.prompts
        if len(matches) == 1 and decision.partial is None:
            return self.index.causes(model, matches[0], pod, keys[0], prompts[0])
        each_prompt = zip(matches, keys, prompts, strict=True)
        causes = [self.index.causes(model, match, pod, its, ids) for match, its, ids in each_prompt]
        tokens: Counter[str] = Counter()
        for each in causes:
            tokens.update(each.tokens)
        if unknown := total - tokens.total():
            tokens[Cause.UNKNOWN] = unknown
        evicted = (each.evicted_s_ago for each in causes if each.evicted_s_ago is not None)
        return PromptCauses(dict(tokens), next(evicted, None))

    def _keys(
        self, request: RouteRequest, tokens: PromptTokens, candidates: CandidateSet
    ) -> tuple[list[Keys], str | None]:
        """Return the block keys of each prompt, or no keys and the reason."""
        if tokens.degraded is not None or candidates.base_model is None:
            return [], tokens.degraded or "no_model"
        if len(tokens.prompts) > PROMPTS_MAX:
            return [], TOO_MANY_PROMPTS
        context_tokens = candidates.context_tokens
        if context_tokens is not None and context_tokens < max(map(len, tokens.prompts), default=0):
            # Every engine rejects the prompt, so no cache will ever contain it.
            return [], LONGER_THAN_CONTEXT
        base, lora = candidates.base_model, candidates.lora_name
        salt, dry = request.cache_salt, request.dry
        try:
            return [
                self.index.block_keys(base, ids, lora_name=lora, cache_salt=salt, extras=extras, dry=dry)
                for ids, extras in zip(tokens.prompts, tokens.extras(self.index.block_tokens), strict=True)
            ], None
        except TokenError:
            return [], "token_error"

    def _pick(
        self,
        tokenized: TokenizedRequest,
        candidates: CandidateSet,
        started_s: float,
        now_s: float,
        step_done: Callable[[], None],
    ) -> tuple[Decision, Sequence[Dispatch]]:
        # Without a chosen rank, vLLM spreads several prompts over a pod's ranks.
        is_ranked = len(tokenized.keys) == 1 and tokenized.request.kind in RANKED_KINDS
        pending = self.scheduler.ledger.pending_tokens if is_ranked else None
        # Block keys include the base model, so pods of another base match nothing.
        match, pods, dry = self.index.match, candidates.address_set, tokenized.request.dry
        matches = [
            match(keys, pods, prompt_tokens=len(prompt), tokens=prompt, pending_tokens=pending, dry=dry)
            for keys, prompt in zip(tokenized.keys, tokenized.tokens.prompts, strict=False)
        ]
        step_done()
        # Start the prefill clock here so that tokenization and queueing time are not charged to the pod.
        decided_s = now_s + self.clock() - started_s
        decision, displaced = self.scheduler.schedule(
            tokenized, candidates, self.pods.current, matches, decided_s
        )
        if dry:
            return decision, displaced
        if self.failures.trials and decision.is_charged:
            self.failures.dispatched(decision.ranked.best.pod, decided_s)
        if keys := tokenized.keys:
            key, pod = decision.key, decision.ranked.best.pod
            engine = pod if decision.rank is None else engine_name(pod, decision.rank)
            # The pod's events are compared with the prompt to detect a different tokenization.
            prompt = tokenized.sent_prompt(pod, candidates, matches[0]) if len(keys) == 1 else None
            self.index.speculate(key, engine, _stored_keys(pod, keys, matches), decided_s, prompt)
            if (prefill := decision.prefill_pod) is not None:
                self.index.speculate(key, prefill, _stored_keys(prefill, keys, matches), decided_s, None)
        return decision, displaced


def _stored_keys(pod: str, keys: Sequence[Keys], matches: Sequence[PodMatches]) -> Keys:
    """Return the keys of all blocks that the pod will store for these prompts."""
    whole = [match.whole_blocks(pod, each) for match, each in zip(matches, keys, strict=True)]
    return whole[0] if len(whole) == 1 else np.concatenate(whole)
