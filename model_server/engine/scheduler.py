"""Decides what each step computes: continuous batching under one token budget, decodes first.

Knows tokens and blocks, not tensors or threads; times are arguments.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from statistics import median
from typing import TypeAlias

from model_server.config import SchedulingPolicy
from model_server.kv_cache.block_pool import Block
from model_server.kv_cache.host_tier import HostBlock
from model_server.kv_cache.manager import BlockManager
from model_server.kv_cache.request import Chunk, LiveRequest

AGE_FACTOR = 10.0
PARTIAL_PROMPTS_MAX = 2

# Least first; of equals the one that was submitted first.
OrderKey: TypeAlias = tuple[float, float, int]

# A shorter prefill takes as long as any step: its speed would make an engine that has had nothing else look
# many times slower than its equals, and routers would send it nothing that could tell otherwise.
_RATE_TOKENS_MIN = 128
_RATE_STEPS = 64
_RATE_STEPS_MIN = 4
# Blocks of waiting prompts that are looked up in a step, most of them hashed for it: 4 ms at the most.
_LOOKUPS_PER_STEP = 512


def order_key(policy: SchedulingPolicy, seconds_per_token: float) -> Callable[[LiveRequest], OrderKey]:
    """Return the key of a policy, where a prompt token takes so many seconds; 0 while that is unknown.

    "fcfs" is by arrival; "priority" by the request's priority, then arrival; "aged" by arrival plus ten times
    the seconds that its own prefill still takes, so that short prompts overtake long ones and whoever waits
    long enough is overtaken no more.
    """
    age_s = AGE_FACTOR * seconds_per_token if policy == "aged" else 0.0

    def key(live: LiveRequest) -> OrderKey:
        first = live.request.priority if policy == "priority" else 0
        return first, live.arrived_s + age_s * live.uncached, live.serial

    return key


class PrefillRate:
    """The speed of prefills: the median of the last steps, which a slow start or a stall does not move."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_RATE_STEPS)
        self.seconds_per_token = 0.0  # 0 before there were enough prefills to tell

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens a second; 0 before there were enough prefills to tell."""
        return 1.0 / self.seconds_per_token if self.seconds_per_token else 0.0

    def observe(self, prefill_tokens: int, decode_tokens: int, seconds: float) -> None:
        """Take one step; one of few prompt tokens, or of mostly decodes, tells nothing of prefills."""
        if prefill_tokens < _RATE_TOKENS_MIN or prefill_tokens <= decode_tokens or seconds <= 0.0:
            return
        self._steps.append(seconds / prefill_tokens)
        if len(self._steps) >= _RATE_STEPS_MIN:
            self.seconds_per_token = median(self._steps)


@dataclass(eq=False)
class Scheduler:
    """Decodes first, then prefills in the policy's order, in chunks; preemption of whoever is last in it.

    The queue of waiting requests is bounded by the engine, which refuses requests before they come here.
    """

    manager: BlockManager
    _: KW_ONLY
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: SchedulingPolicy = "fcfs"
    running: list[LiveRequest] = field(default_factory=list)  # they hold blocks; in the order of admission
    waiting: deque[LiveRequest] = field(default_factory=deque)  # they hold none; preempted ones first
    preemptions: int = 0  # requests pushed back to waiting since the start
    prompt_tokens: int = 0  # prompt tokens of admitted requests since the start
    cached_prompt_tokens: int = 0  # those of them that were found in the cache, in either tier
    host_prompt_tokens: int = 0  # those that had to be restored from the host tier
    _looked_up_to: int = 0

    def __post_init__(self) -> None:
        assert self.max_num_batched_tokens >= self.max_num_seqs, "all running requests must be able to decode"
        self._key = order_key(self.policy, 0.0)

    def add(self, live: LiveRequest) -> None:
        self.waiting.append(live)

    def remove(self, live: LiveRequest) -> None:
        """Drop a request wherever it is; its blocks are free at once."""
        (self.running if live.tables else self.waiting).remove(live)
        self.manager.release(live)
        self.manager.let_go(live)

    def schedule(self, seconds_per_token: float = 0.0) -> list[Chunk]:
        """Choose the next step: decodes, then prefills, begun or waiting, in their order.

        Blocks for the chosen tokens are allocated, and full ones registered, when this returns. Requests
        whose blocks are on their way from the host tier are not chosen before these are there. A prompt
        token takes `seconds_per_token`; 0 while that is unknown.
        """
        self._key = order_key(self.policy, seconds_per_token)
        self._take_restored()
        chunks = self._continue_decodes()
        # Only now, when nobody who decodes can be preempted any more: what is registered must be computed.
        for chunk in chunks:
            self.manager.register(chunk.live, chunk.stop)
        more = True
        while more:  # copies that take effect at once let their requests run in the same step
            self._prefill(chunks)
            self.manager.offload.flush()
            more = self._take_restored()
        return chunks

    def distrust(self, never_computed: Iterable[Block], failed: Iterable[LiveRequest]) -> None:
        """After a failed step: whoever shares a block that was never computed has nothing.

        The requests that the step was for, `failed`, are about to be removed; others begin again.
        """
        never, ending = set(map(id, never_computed)), set(map(id, failed))
        for live in list(self.running):
            if any(id(block) in never for table in live.tables for block in table.blocks):
                live.computed = 0
                if id(live) not in ending:
                    self._preempt(live)

    def _take_restored(self) -> bool:
        """Let requests go on whose blocks have come back; returns whether there were any."""
        self.manager.offload.poll()
        restored = [live for live in self.running if live.restore is not None and live.restore.done]
        for live in restored:
            self.manager.finish_restore(live)
        return bool(restored)

    def _continue_decodes(self) -> list[Chunk]:
        """Give every decoding request its next token, taking blocks from whoever is last if need be."""
        decodes = [live for live in self.running if live.pending == 1 and live.restore is None]
        if self.policy == "priority":
            decodes.sort(key=self._key)
        chunks: list[Chunk] = []
        for live in decodes:
            if not live.tables:  # preempted a moment ago
                continue
            while not self.manager.grow(live, live.num_tokens):
                victim = self._victim(decodes)
                self._preempt(victim)
                if victim is live:
                    break
            else:
                chunks.append(_next_chunk(live, 1))
        return chunks

    def _victim(self, decodes: list[LiveRequest]) -> LiveRequest:
        """Return who gives way to a decode: the last prefill, else the last decode."""
        prefills = [other for other in self.running if other.pending > 1 or other.restore is not None]
        if prefills:
            return max(prefills, key=self._key)
        return [other for other in decodes if other.tables][-1]

    def _prefill(self, chunks: list[Chunk]) -> None:
        if not self.waiting and len(chunks) == len(self.running):  # as in nearly all steps
            return
        budget = self.max_num_batched_tokens - sum(chunk.length for chunk in chunks)
        chosen = {chunk.live.request_id for chunk in chunks}
        queue = self._queue(budget)
        head = next(queue, None)
        while budget > 0:
            begun = [
                live
                for live in self.running
                if live.restore is None and live.pending and live.request_id not in chosen
            ]
            live = min(begun, key=self._key, default=None)
            if head is not None and (live is None or self._key(head) < self._key(live)):
                if not self._admit(head, budget, partial=len(begun)):
                    head = None  # nobody overtakes it
                    continue
                live, head = head, next(queue, None)
                if live.restore is not None:
                    continue
            if live is None:
                break
            chosen.add(live.request_id)
            length = min(live.pending, budget)
            if not self._make_room(live, live.computed + length, chosen, idle=not chunks):
                continue
            chunk = _next_chunk(live, length)
            self.manager.register(live, chunk.stop)
            chunks.append(chunk)
            budget -= length

    def _queue(self, budget: int) -> Iterator[LiveRequest]:
        """Return waiting requests in their order; none where none could be admitted."""
        if not self.waiting or budget <= 0 or len(self.running) >= self.max_num_seqs:
            return iter(())
        if self.policy == "aged":
            self._look_up_waiting()
        return iter(sorted(self.waiting, key=self._key))

    def _look_up_waiting(self) -> None:
        """Look again how much of waiting requests is cached, for as long as a step has time for.

        Where many wait it goes on with the others in the next step.
        """
        left, first = _LOOKUPS_PER_STEP, self._looked_up_to % len(self.waiting)
        waiting = list(self.waiting)
        for live in waiting[first:] + waiting[:first]:
            if left <= 0:
                break
            left -= self.manager.expect(live, left)
            self._looked_up_to += 1

    def _admit(self, live: LiveRequest, budget: int, *, partial: int) -> bool:
        """Begin a waiting request, if it may and its blocks fit."""
        if len(self.running) >= self.max_num_seqs:
            return False
        manager = self.manager
        prefix = manager.find_prefix(live)
        if partial >= PARTIAL_PROMPTS_MAX and live.num_tokens - prefix.length * manager.block_tokens > budget:
            return False
        reserved = sum(manager.still_needed(other) for other in self.running if other.pending > 1)
        if not manager.can_hold(live, prefix, reserved):
            return False
        manager.adopt(live, prefix)
        if live.cached_tokens is None:  # else it comes back from preemption
            live.cached_tokens = live.computed
            self.prompt_tokens += live.num_tokens
            self.cached_prompt_tokens += live.computed
            by_index = zip(*prefix.entries, strict=True)
            in_host = sum(any(isinstance(entry, HostBlock) for entry in entries) for entries in by_index)
            self.host_prompt_tokens += in_host * manager.block_tokens
        self.waiting.remove(live)
        self.running.append(live)
        return True

    def _make_room(self, live: LiveRequest, num_tokens: int, chosen: set[str], *, idle: bool) -> bool:
        """Grow a prefill's tables; only where nothing else would run are others preempted for it."""
        while not self.manager.grow(live, num_tokens):
            others = [other for other in self.running if other.request_id not in chosen]
            if not idle or not others:
                return False
            self._preempt(max(others, key=self._key))
        return True

    def _preempt(self, victim: LiveRequest) -> None:
        """Take the blocks of a request; by its arrival it is among the first to run again."""
        self.running.remove(victim)
        self.manager.preempt(victim)
        self.waiting.appendleft(victim)
        self.preemptions += 1


def _next_chunk(live: LiveRequest, length: int) -> Chunk:
    return Chunk(live, live.computed, length, samples=length == live.pending)
