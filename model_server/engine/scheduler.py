"""Scheduler of the engine's steps: continuous batching under one token budget, decodes first.

Works on tokens and blocks, without tensors, threads or clocks; times are arguments.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from statistics import median
from typing import Literal, NamedTuple, TypeAlias

from model_server.config import PreemptionMode, SchedulingPolicy
from model_server.kv_cache.block_pool import KVCacheBlock
from model_server.kv_cache.host_tier import HostBlock
from model_server.kv_cache.manager import KVCacheManager
from model_server.kv_cache.request import Request, ScheduledRequest

AGE_FACTOR = 10.0
PARTIAL_PROMPTS_MAX = 2

# Which request needed the blocks, or a failed step that shared them.
PreemptionCause: TypeAlias = Literal["decode", "prefill", "failed_step"]
# Sort key, least first; the last element breaks ties by order of submission.
OrderKey: TypeAlias = tuple[float, float, int]

# Ignore shorter prefills: a step's fixed cost dominates their time. An engine that has had no others would
# look many times slower than its peers, and routers would send it no prompt that corrects the estimate.
_RATE_TOKENS_MIN = 128
_RATE_STEPS = 64
_RATE_STEPS_MIN = 4
# Blocks of waiting prompts looked up per step. Most of them must be hashed first; this takes at most 4 ms.
_LOOKUPS_PER_STEP = 512


def order_key(policy: SchedulingPolicy, seconds_per_token: float) -> Callable[[Request], OrderKey]:
    """Return the sort key of a scheduling policy; `seconds_per_token` is 0 while unknown.

    "fcfs" sorts by arrival; "priority" by the request's priority, then arrival; "aged" by arrival plus ten
    times the seconds that the request's prefill still takes. So short prompts overtake long ones, but a
    request that has waited long enough is not overtaken any more.
    """
    age_s = AGE_FACTOR * seconds_per_token if policy == "aged" else 0.0

    def key(request: Request) -> OrderKey:
        first = request.core_request.priority if policy == "priority" else 0
        return first, request.arrived_s + age_s * request.estimated_prefill_tokens, request.arrival_index

    return key


class PrefillRate:
    """Prefill throughput: the median of the last 64 steps, robust against a slow start or a stall."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_RATE_STEPS)
        self.seconds_per_token = 0.0  # 0 until there are enough samples

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens per second; 0 until there are enough samples."""
        return 1.0 / self.seconds_per_token if self.seconds_per_token else 0.0

    def observe(self, prefill_tokens: int, decode_tokens: int, seconds: float) -> None:
        """Record one step. Steps with few prompt tokens, or with mostly decodes, are ignored."""
        if prefill_tokens < _RATE_TOKENS_MIN or prefill_tokens <= decode_tokens or seconds <= 0.0:
            return
        self._steps.append(seconds / prefill_tokens)
        if len(self._steps) >= _RATE_STEPS_MIN:
            self.seconds_per_token = median(self._steps)


class Preemption(NamedTuple):
    """A request that lost its blocks and waits again."""

    request_id: str
    cause: PreemptionCause
    mode: PreemptionMode
    computed_tokens: int
    swapped_blocks: int  # pinned in the host tier; the other tokens are computed again


@dataclass(eq=False)
class Scheduler:
    """Schedules decodes first, then chunked prefills in the policy's order; preempts the last in that order.

    The engine bounds the waiting queue: it rejects requests before they reach the scheduler.
    """

    kv_cache_manager: KVCacheManager
    _: KW_ONLY
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: SchedulingPolicy = "fcfs"
    running: list[Request] = field(default_factory=list)  # in order of admission
    waiting: deque[Request] = field(default_factory=deque)  # preempted requests first
    preemptions: int = 0  # since start
    preempted: list[Preemption] = field(default_factory=list)  # since the caller last emptied it
    prompt_tokens: int = 0  # of admitted requests since start
    cached_prompt_tokens: int = 0  # those found in the cache, in either tier
    host_prompt_tokens: int = 0  # those restored from the host tier
    _next_lookup: int = 0

    def __post_init__(self) -> None:
        assert self.max_num_batched_tokens >= self.max_num_seqs, "all running requests must be able to decode"
        self._key = order_key(self.policy, 0.0)

    def add_request(self, request: Request) -> None:
        self.waiting.append(request)

    def remove_request(self, request: Request) -> None:
        """Remove a running or waiting request and free its blocks."""
        (self.running if request.block_tables else self.waiting).remove(request)
        self.kv_cache_manager.free(request)
        self.kv_cache_manager.unpin_swapped_blocks(request)

    def schedule(self, seconds_per_token: float = 0.0) -> list[ScheduledRequest]:
        """Schedule the next step: decodes, then running and waiting prefills in the policy's order.

        On return, blocks for the scheduled tokens are allocated and full ones are in the prefix cache.
        Requests with a running restore are not scheduled. `seconds_per_token` is 0 while unknown.
        """
        self._key = order_key(self.policy, seconds_per_token)
        self._resume_restored()
        scheduled = self._schedule_decodes()
        # Cache blocks only now, when no decode can be preempted any more: cached blocks must be computed.
        for item in scheduled:
            self.kv_cache_manager.cache_blocks(item.request, item.stop)
        more = True
        while more:  # requests whose restore is synchronous run in the same step
            self._schedule_prefills(scheduled)
            self.kv_cache_manager.offloading.start_transfers()
            more = self._resume_restored()
        return scheduled

    def invalidate_blocks(self, uncomputed: Iterable[KVCacheBlock], failed: Iterable[Request]) -> None:
        """Restart requests that share an uncomputed block of a failed step; `failed` are its own requests."""
        invalid, ending = set(map(id, uncomputed)), set(map(id, failed))
        for request in list(self.running):
            if any(id(block) in invalid for table in request.block_tables for block in table.blocks):
                request.num_computed_tokens = 0
                if id(request) not in ending:
                    self._preempt(request, "failed_step")

    def _resume_restored(self) -> bool:
        """Resume requests whose restore has completed; return whether there were any."""
        self.kv_cache_manager.offloading.poll_transfers()
        restored = [req for req in self.running if req.restore is not None and req.restore.done]
        for request in restored:
            self.kv_cache_manager.finish_restore(request)
        return bool(restored)

    def _schedule_decodes(self) -> list[ScheduledRequest]:
        """Schedule one token of every decoding request, preempting the last request if blocks run out."""
        decodes = [req for req in self.running if req.num_pending_tokens == 1 and req.restore is None]
        if self.policy == "priority":
            decodes.sort(key=self._key)
        scheduled: list[ScheduledRequest] = []
        for request in decodes:
            if not request.block_tables:  # preempted by this loop
                continue
            while not self.kv_cache_manager.allocate_slots(request, request.num_tokens):
                victim = self._preemption_victim(decodes)
                self._preempt(victim, "decode")
                if victim is request:
                    break
            else:
                scheduled.append(_schedule_tokens(request, 1))
        return scheduled

    def _preemption_victim(self, decodes: list[Request]) -> Request:
        """Return the request to preempt for a decode: the last prefill, else the last decode."""
        prefills = [req for req in self.running if req.num_pending_tokens > 1 or req.restore is not None]
        if prefills:
            return max(prefills, key=self._key)
        return [other for other in decodes if other.block_tables][-1]

    def _schedule_prefills(self, scheduled: list[ScheduledRequest]) -> None:
        if not self.waiting and len(scheduled) == len(self.running):  # nearly all steps
            return
        budget = self.max_num_batched_tokens - sum(item.num_tokens for item in scheduled)
        chosen = {item.request.request_id for item in scheduled}
        queue = self._waiting_in_order(budget)
        head = next(queue, None)
        while budget > 0:
            ready = [req for req in self.running if req.restore is None and req.num_pending_tokens]
            started = [req for req in ready if req.request_id not in chosen]
            request = min(started, key=self._key, default=None)
            if head is not None and (request is None or self._key(head) < self._key(request)):
                if not self._admit(head, budget, partial=len(started)):
                    head = None  # no waiting request may overtake it
                    continue
                request, head = head, next(queue, None)
                if request.restore is not None:
                    continue
            if request is None:
                break
            chosen.add(request.request_id)
            length = min(request.num_pending_tokens, budget)
            if not self._make_room(request, request.num_computed_tokens + length, chosen, idle=not scheduled):
                continue
            item = _schedule_tokens(request, length)
            self.kv_cache_manager.cache_blocks(request, item.stop)
            scheduled.append(item)
            budget -= length

    def _waiting_in_order(self, budget: int) -> Iterator[Request]:
        """Return waiting requests in the policy's order; empty if none can be admitted."""
        if not self.waiting or budget <= 0 or len(self.running) >= self.max_num_seqs:
            return iter(())
        if self.policy == "aged":
            self._update_waiting_hits()
        return iter(sorted(self.waiting, key=self._key))

    def _update_waiting_hits(self) -> None:
        """Update expected cache hits of waiting requests, up to a limit; the next step continues there."""
        left, first = _LOOKUPS_PER_STEP, self._next_lookup % len(self.waiting)
        waiting = list(self.waiting)
        for request in waiting[first:] + waiting[:first]:
            if left <= 0:
                break
            left -= self.kv_cache_manager.update_expected_hits(request, left)
            self._next_lookup += 1

    def _admit(self, request: Request, budget: int, *, partial: int) -> bool:
        """Move a waiting request to running if the limits permit and its blocks fit."""
        if len(self.running) >= self.max_num_seqs:
            return False
        manager = self.kv_cache_manager
        prefix = manager.get_computed_blocks(request)
        uncached = request.num_tokens - prefix.num_blocks * manager.block_tokens
        if partial >= PARTIAL_PROMPTS_MAX and uncached > budget:
            return False
        prefills = [other for other in self.running if other.num_pending_tokens > 1]
        reserved = sum(map(manager.num_blocks_to_allocate, prefills))
        if not manager.can_fit(request, prefix, reserved):
            return False
        manager.attach_prefix(request, prefix)
        if request.num_cached_tokens is None:  # not None after a preemption
            request.num_cached_tokens = request.num_computed_tokens
            self.prompt_tokens += request.num_tokens
            self.cached_prompt_tokens += request.num_computed_tokens
            by_index = zip(*prefix.entries, strict=True)
            in_host = sum(any(isinstance(entry, HostBlock) for entry in entries) for entries in by_index)
            self.host_prompt_tokens += in_host * manager.block_tokens
        self.waiting.remove(request)
        self.running.append(request)
        return True

    def _make_room(self, request: Request, num_tokens: int, chosen: set[str], *, idle: bool) -> bool:
        """Allocate blocks for a prefill; preempt others only if the step would otherwise be empty."""
        while not self.kv_cache_manager.allocate_slots(request, num_tokens):
            others = [other for other in self.running if other.request_id not in chosen]
            if not idle or not others:
                return False
            self._preempt(max(others, key=self._key), "prefill")
        return True

    def _preempt(self, victim: Request, cause: PreemptionCause) -> None:
        """Free a request's blocks and return it to the front of the waiting queue."""
        computed_tokens = victim.num_computed_tokens
        self.running.remove(victim)
        self.kv_cache_manager.preempt(victim)
        self.waiting.appendleft(victim)
        self.preemptions += 1
        mode: PreemptionMode = "swap" if self.kv_cache_manager.swap else "recompute"
        swapped_blocks = len(victim.swapped_blocks)
        self.preempted.append(Preemption(victim.request_id, cause, mode, computed_tokens, swapped_blocks))


def _schedule_tokens(request: Request, count: int) -> ScheduledRequest:
    samples = count == request.num_pending_tokens
    return ScheduledRequest(request, request.num_computed_tokens, count, samples)
