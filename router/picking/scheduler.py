"""From what every candidate's cache holds to a pick that later picks see: matches in, a Decision out.

The short critical section of routing: callers let one request in at a time. Knows no tokenizers, no gRPC and
no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.jit import kernel_with_arrays
from indexer import PodMatches, StreamState
from indexer.audit.mismatch_watch import DispatchedPrompt
from indexer.index.tiers import GPU_TIER, SPECULATIVE_TIER, Tiers
from indexer.keys import Keys
from router.inflight.dispatch import Dispatch
from router.inflight.ledger import Ledger
from router.inflight.rates import Lesson
from router.picking.candidates import Lineup
from router.picking.cost import (
    CREDIT,
    CostParameters,
    RequestFacts,
    adapter_s,
    add_credit,
    least_cost_first,
    price,
)
from router.picking.decision import Candidate, Decision, Ranking
from router.picking.sessions import Sessions, session_of
from router.pods.load_table import PodBoard
from router.pods.pod_set import PodSnapshot
from router.prompts.prompt_tokens import PromptTokens
from router.prompts.request import RouteRequest, usage_is_comparable

if TYPE_CHECKING:
    from router.plugins.pipeline import Pipeline

# What was only just sent to a pod will lie in its device memory.
_DEVICE_TIERS = (GPU_TIER, SPECULATIVE_TIER)
_NO_EXTRA, _NOBODY = np.zeros(0), np.zeros(0, np.int64)
# What candidates hold of a prompt: the first arguments of `add_credit`.
_Held = tuple[
    NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64], int
]
_NO_BLOCKS = np.zeros(0, np.int32)
_NOTHING_HELD: _Held = _NO_BLOCKS, np.zeros((0, 1), np.int32), _NO_BLOCKS, _NOBODY, _NOBODY, 0
# An enum's members take ten times as long to look up, and every pick would.
_EXACT = StreamState.EXACT.value
# Copies and adapters that take longer than this share of a prefill would be learnt as a slow one.
_OTHER_SHARE = 0.1


class Prompted(msgspec.Struct, frozen=True):
    """Facts known of a request's prompts when it is scheduled."""

    request: RouteRequest
    tokens: PromptTokens
    keys: Sequence[Keys]  # block keys of each prompt, in the order of `tokens.prompts`; empty when not known
    degraded: str | None  # why the cache's view is not used; None when it is
    priority: int = 0

    def sent_to(self, pod: str, lineup: Lineup, matches: PodMatches) -> DispatchedPrompt | None:
        """What a pod should make of the first prompt; None where that is not known."""
        base_model, lora_name = lineup.base_model, lineup.lora_name
        if base_model is None:
            return None
        row = matches.rows[pod]
        cached_blocks: int = matches.cached_blocks.item(row)
        assumed_blocks: int = matches.blocks_by_tier.item(row, matches.tiers.number(SPECULATIVE_TIER))
        salt, held_blocks = self.request.cache_salt, cached_blocks - assumed_blocks
        return DispatchedPrompt(
            base_model, lora_name, salt, self.tokens.prompts[0], cached_blocks, held_blocks
        )


class Scheduler:
    """Prices, picks, and enters the pick into the ledger.

    Args:
        ranker: Orders the candidates; None: their cost does.
    """

    def __init__(
        self,
        board: PodBoard,
        ledger: Ledger,
        random: np.random.Generator,
        *,
        block_tokens: int,
        cost: CostParameters | None = None,
        ranker: Pipeline | None = None,
    ) -> None:
        self._board = board
        self._ledger = ledger
        self._draw = random.bit_generator.random_raw
        self._block_tokens = block_tokens
        cost = cost or CostParameters()
        self._parameters = cost.record()
        self._load_age_max_s = cost.load_age_max_s
        self._sessions = Sessions()
        self._ranker = ranker
        self._tiers: Tiers | None = None
        self._device_tiers = _NOBODY
        # Compiles the kernels (or loads them from their cache), so that the first request need not wait.
        nothing, none = (*_NOTHING_HELD, block_tokens, np.zeros(0, CREDIT)), (_NOBODY, _NO_EXTRA)
        add_credit(*nothing)
        _weighed(*nothing, board.pods, *none, 0.0, 0.0, 1.0, 0.0, self._parameters, 1)

    def schedule(
        self,
        prompted: Prompted,
        lineup: Lineup,
        pods: PodSnapshot,
        matches: Sequence[PodMatches],
        now_s: float,
    ) -> tuple[Decision, Sequence[Dispatch]]:
        """Decides, and enters the decision into the ledger.

        Args:
            pods: As they are now; the line-up may be older in what it says of their load.
            matches: One for each prompt's keys.

        Returns:
            The decision, and requests that the ledger had to give up for it.
        """
        request = prompted.request
        session, session_pod = session_of(request.headers), None
        adapters_s = self._adapters_s(lineup, pods, now_s)
        prompt_tokens = prompted.tokens.total
        used = matches if prompted.degraded is None else ()
        credits, prices, order, most_cached_tokens = self._weigh(prompted, lineup, used, adapters_s, now_s)
        if session is not None:
            session_pod = self._sessions.pod_of(session, now_s, lineup.base_model)
            order = _session_first(order, prices["cost_s"], lineup, session_pod)
        routing = None
        if self._ranker is not None:
            known = self._board.known(lineup.rows)
            order, routing = self._ranker.rank(prompted, lineup, pods, used, prices, credits, known, now_s)
        block_tokens, addresses = self._block_tokens, lineup.addresses
        # By place, not by name: that costs half as much.
        decision = Decision(
            request.request_id,
            request.kind,
            request.model,
            Ranking(
                addresses, prices, credits, order, prompt_tokens, block_tokens, matches, most_cached_tokens
            ),
            lineup.excluded,
            prompt_tokens,
            prompted.degraded,
            now_s,
            prompted.priority,
            session_pod,
            request.client_model,
            routing,
            prompted.tokens.partial,
            usage_is_comparable(request, len(prompted.keys)),
        )
        if session is not None:
            self._sessions.moved(session, decision.ranked.best.pod, now_s, lineup.base_model)
        return decision, self._dispatch(decision, lineup, prompted.keys, matches, adapters_s)

    def _weigh(
        self,
        prompted: Prompted,
        lineup: Lineup,
        matches: Sequence[PodMatches],
        extra_s: NDArray[np.float64],
        now_s: float,
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int64], int]:
        """Credits, prices, their order, and the most cached tokens."""
        credits = np.zeros(len(lineup.rows), CREDIT)
        block_tokens, board = self._block_tokens, self._board
        held = list(map(self._held, matches, prompted.tokens.prompts, repeat(lineup))) or [_NOTHING_HELD]
        for further in held[1:]:
            add_credit(*further, block_tokens, credits)
        with board.lock:
            prices, order, most_cached_tokens = _weighed(
                *held[0],
                block_tokens,
                credits,
                board.pods,
                lineup.rows,
                extra_s,
                float(prompted.tokens.total),
                float(now_s),
                float(board.fleet_tokens_per_s),
                float(board.mean_tokens),
                self._parameters,
                self._draw() >> 1,
            )
        return credits, prices, order, most_cached_tokens

    def _held(self, match: PodMatches, prompt: NDArray[np.uint32], lineup: Lineup) -> _Held:
        """What each candidate holds of a prompt, as `add_credit` takes it."""
        if match.tiers is not self._tiers:
            self._tiers = match.tiers
            self._device_tiers = np.array([match.tiers.number(tier) for tier in _DEVICE_TIERS])
        held = match.cached_blocks, match.blocks_by_tier, match.strides
        return *held, self._device_tiers, lineup.places(match.rows), len(prompt)

    def _adapters_s(self, lineup: Lineup, pods: PodSnapshot, now_s: float) -> NDArray[np.float64]:
        """Seconds for the request's adapter on each pod; empty when it needs none."""
        adapter = lineup.lora_name
        if adapter is None:
            return _NO_EXTRA
        adapters_s = np.zeros(len(lineup.rows))
        for place, address in enumerate(lineup.addresses):
            load = pods[address].load if address in pods else None
            if load is not None and now_s - load.scraped_s <= self._load_age_max_s:
                sent = self._ledger.adapters.on(address)
                adapters_s[place] = adapter_s(load.lora, adapter, sent)
        return adapters_s

    def _dispatch(
        self,
        decision: Decision,
        lineup: Lineup,
        keys: Sequence[Keys],
        matches: Sequence[PodMatches],
        adapters_s: NDArray[np.float64],
    ) -> Sequence[Dispatch]:
        if not decision.is_charged:
            return ()
        works, prefill = decision.ranked.best, None
        if decision.routing is not None:
            prefill = decision.routing.prefill
        pod = works.pod
        if prefill is not None:
            # Who prefills is who is charged, and whose blocks tell that it is done.
            works = decision.ranked.at_place(lineup.addresses.index(prefill))
        loading_s = float(adapters_s[lineup.addresses.index(works.pod)]) if len(adapters_s) else 0.0
        coming = [match.whole_blocks(works.pod, each) for match, each in zip(matches, keys, strict=True)]
        # Only other routers need them, where there are any.
        brought = None if self._ledger.changes is None else self._brought(coming, works, prefill)
        return self._ledger.dispatch(
            Dispatch(
                decision.request_id,
                pod,
                works.uncached_tokens,
                works.queued_prefill_s,
                works.own_prefill_s,
                _confirm_key(coming, works.view, matches, works.pod, is_read=decision.degraded is None),
                _lesson(decision, works, loading_s),
                decision.decided_s,
                works.decoding,
                prefill,
                lineup.lora_name,
                # Where another pod prefills, the destination's cache tells what was transferred, too.
                works.cached_tokens if works.view == _EXACT and prefill is None else 0,
            ),
            brought,
        )

    def _brought(self, keys: Sequence[Keys], works: Candidate, prefill: str | None) -> Keys | None:
        """Keys of the blocks that a request brings to its pods, as far as these are not there."""
        if len(keys) != 1 or works.view != _EXACT or prefill is not None:
            return np.concatenate(keys) if keys else None
        return keys[0][works.cached_tokens // self._block_tokens :]


@kernel_with_arrays
def _weighed(
    cached_blocks: NDArray[np.int32],
    blocks_by_tier: NDArray[np.int32],
    strides: NDArray[np.int32],
    device_tiers: NDArray[np.int64],
    places: NDArray[np.int64],
    servable_tokens: int,
    block_tokens: int,
    credits: NDArray[Any],
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
    """`add_credit`, `price` and `least_cost_first` in one call, and the most cached tokens of a candidate."""
    facts = RequestFacts(prompt_tokens, now_s, fleet_tokens_per_s, mean_tokens)
    add_credit(
        cached_blocks, blocks_by_tier, strides, device_tiers, places, servable_tokens, block_tokens, credits
    )
    prices = price(pods, rows, credits, extra_s, facts, parameters[0])
    most_cached_tokens = 0
    for credit in credits["cached_tokens"]:
        most_cached_tokens = max(most_cached_tokens, credit)
    return prices, least_cost_first(prices["cost_s"], seed), most_cached_tokens


def _session_first(
    order: NDArray[np.int64], costs_s: NDArray[np.float64], lineup: Lineup, session_pod: str | None
) -> NDArray[np.int64]:
    """Return the order with the session's pod first, if no candidate costs less."""
    if session_pod not in lineup.asked:
        return order
    place = lineup.addresses.index(session_pod)
    if costs_s[place] > costs_s[order[0]]:
        return order
    return np.concatenate((np.array([place]), order[order != place]))


def _lesson(decision: Decision, works: Candidate, loading_s: float) -> Lesson:
    """What the time to the first token will tell of the rate of the pod that works for it.

    Args:
        loading_s: Of the request's adapter there.
    """
    if decision.degraded is not None or decision.partial is not None:
        return Lesson.NOTHING
    # Whoever finds others waiting tells their prefills' time, too.
    if works.awaiting or works.queued_prefill_s:
        return Lesson.NOTHING
    if works.copy_s + loading_s > _OTHER_SHARE * works.own_prefill_s:
        return Lesson.NOTHING
    return Lesson.RATE if works.view == _EXACT else Lesson.AT_MOST


def _confirm_key(
    keys: Sequence[Keys], view: str, matches: Sequence[PodMatches], pod: str, *, is_read: bool
) -> int | None:
    """The key whose announcement ends the prefill: the last full block's, where the pod will announce it.

    Args:
        keys: Of each prompt's blocks that the pod will hold; a tail that fills no block of the engine is
            announced only once decoding has filled it.
        is_read: Whether the engine reads its cache for the request.
    """
    if len(keys) != 1 or view != _EXACT or not (blocks := len(keys[0])):
        return None
    match = matches[0]
    # A pod that does not read its cache announces all blocks again.
    return keys[0].item(-1) if not is_read or match.cached_blocks.item(match.rows[pod]) < blocks else None
