"""One request in, one Decision out: the straight line from tokens to the ledger that all doors share.

Knows no gRPC and no HTTP. Tokenizing and hashing run in parallel; matching, pricing, picking and entering
into the ledger are one short critical section, so that concurrent picks see each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from indexer import PodMatches, TokenError
from indexer.keys import Keys
from router.inflight.dispatch import Dispatch
from router.picking.admission import Admission
from router.picking.candidates import Lineup, Lineups
from router.picking.decision import Decision
from router.picking.flow import FlowControl
from router.picking.scheduler import Prompted, Scheduler
from router.pods.pod_set import PodSet
from router.prompts.prompt_tokens import LONGER_THAN_CONTEXT, PROMPTS_MAX, TOO_MANY_PROMPTS, PromptTokens
from router.prompts.request import CACHE_NOT_READ, RouteRequest, reads_cache
from router.prompts.tokenizers import TokenizerRegistry

if TYPE_CHECKING:
    from indexer import KvIndexer


@dataclass(slots=True, kw_only=True)
class Router:
    """Routes requests; safe to call from any number of threads."""

    pods: PodSet
    tokenizers: TokenizerRegistry
    index: KvIndexer
    admission: Admission
    scheduler: Scheduler
    # Receives each decision, the requests that the ledger dropped for it, and when its request arrived.
    dispatched: Callable[[Decision, Sequence[Dispatch], float], None]
    flow: FlowControl | None = None  # None: no request waits
    clock: Callable[[], float] = time.perf_counter  # measures the time spent inside
    _lineups: Lineups = field(init=False)
    _picking: Lock = field(init=False, default_factory=Lock)

    def __post_init__(self) -> None:
        self._lineups = Lineups(self.pods)

    def route(
        self,
        request: RouteRequest,
        now_s: float,
        is_active: Callable[[], bool] | None = None,
        step_done: Callable[[], None] = lambda: None,
    ) -> Decision:
        """Pick a pod and enter the request into the ledger.

        Args:
            now_s: Arrival of the request, on the router's monotonic clock.
            is_active: Returns whether the client still waits; None if that is unknown.
            step_done: Called when the candidates are known, and again when their cached prefixes are.

        Raises:
            RequestError: The request cannot be routed; carries the client's answer.
        """
        started_s = self.clock()
        if self.flow is None:
            decision, displaced = self._routed(request, started_s, now_s, step_done)
        else:
            with self.flow.turn(request, is_active):
                waited_s = self.clock() - started_s
                begun_s = started_s + waited_s
                decision, displaced = self._routed(request, begun_s, now_s + waited_s, step_done)
        self.dispatched(decision, displaced, now_s)
        return decision

    def _routed(
        self, request: RouteRequest, started_s: float, now_s: float, step_done: Callable[[], None]
    ) -> tuple[Decision, Sequence[Dispatch]]:
        lineup = self._lineups.of(request)
        priority = self.admission.admit(request.headers, lineup.rows, now_s)
        step_done()
        tokens = self.tokenizers.prompt_tokens(request, lineup.base_model, lineup.context_tokens, lineup.pods)
        prompted = self._prompted(request, tokens, lineup, priority)
        with self._picking:
            return self._pick(prompted, lineup, started_s, now_s, step_done)

    def _prompted(
        self, request: RouteRequest, tokens: PromptTokens, lineup: Lineup, priority: int
    ) -> Prompted:
        keys, degraded = self._keys(request, tokens, lineup)
        if degraded is None and not reads_cache(request):
            # Its blocks will be stored all the same, which tells the end of its prefill.
            degraded = CACHE_NOT_READ
        return Prompted(request, tokens, keys, degraded, priority)

    def _keys(
        self, request: RouteRequest, tokens: PromptTokens, lineup: Lineup
    ) -> tuple[list[Keys], str | None]:
        """Block keys per prompt, and why there are none."""
        if tokens.degraded is not None or lineup.base_model is None:
            return [], tokens.degraded or "no_model"
        if len(tokens.prompts) > PROMPTS_MAX:
            return [], TOO_MANY_PROMPTS
        context_tokens = lineup.context_tokens
        if context_tokens is not None and context_tokens < max(map(len, tokens.prompts), default=0):
            # The engine will refuse it: no pod's cache will ever hold it.
            return [], LONGER_THAN_CONTEXT
        base, lora, salt = lineup.base_model, lineup.lora_name, request.cache_salt
        try:
            return [
                self.index.block_keys(base, ids, lora_name=lora, cache_salt=salt, extras=extras)
                for ids, extras in zip(tokens.prompts, tokens.extras(self.index.block_tokens), strict=True)
            ], None
        except TokenError:
            return [], "token_error"

    def _pick(
        self,
        prompted: Prompted,
        lineup: Lineup,
        started_s: float,
        now_s: float,
        step_done: Callable[[], None],
    ) -> tuple[Decision, Sequence[Dispatch]]:
        # Pods of another base model (two bases may share a name) hold none of these keys, truly.
        matches = [
            self.index.match(keys, lineup.asked, prompt_tokens=length)
            for keys, length in zip(prompted.keys, map(len, prompted.tokens.prompts), strict=False)
        ]
        step_done()
        # Start the prefill clock here so that tokenization and queueing time are not charged to the pod.
        decided_s = now_s + self.clock() - started_s
        decision, displaced = self.scheduler.schedule(
            prompted, lineup, self.pods.snapshot(), matches, decided_s
        )
        if keys := prompted.keys:
            key, pod = decision.key, decision.ranked.best.pod
            # The pod's events are held against the prompt, to see that both sides mean the same by it.
            prompt = prompted.sent_to(pod, lineup, matches[0]) if len(keys) == 1 else None
            self.index.speculate(key, pod, _coming_to(pod, keys, matches), decided_s, prompt)
            if (prefill := decision.prefill_pod) is not None:
                self.index.speculate(key, prefill, _coming_to(prefill, keys, matches), decided_s, None)
        return decision, displaced


def _coming_to(pod: str, keys: Sequence[Keys], matches: Sequence[PodMatches]) -> Keys:
    """Return the keys of all blocks that the pod will hold of these prompts."""
    whole = [match.whole_blocks(pod, each) for match, each in zip(matches, keys, strict=True)]
    return whole[0] if len(whole) == 1 else np.concatenate(whole)
