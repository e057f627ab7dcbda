"""Decides what each step computes: continuous batching under one token budget.

In: requests to add and to remove. Out: the step's chunks, decodes first. Knows tokens and blocks,
not tensors, threads or time.
"""

from collections import deque
from dataclasses import dataclass

from model_server.block_manager import BlockManager
from model_server.live_request import LiveRequest


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `length` tokens of one request, to be computed in this step.

    Attributes:
        live: The request; its tokens before `start` have their KV.
        start: Position of the chunk's first token.
        length: Tokens in the chunk; 1 for a decode.
        samples: Whether it reaches the last known token, so that the next one is sampled.
    """

    live: LiveRequest
    start: int
    length: int
    samples: bool

    @property
    def stop(self) -> int:
        """Position after the chunk's last token."""
        return self.start + self.length


class Scheduler:
    """First come, first served; chunked prefill; preemption by recompute.

    The queue of waiting requests is bounded by the engine, which refuses requests before they come here.

    Attributes:
        running: Requests that hold blocks, in the order of their admission.
        waiting: Requests that hold none, first to run first.
        preemptions: Requests pushed back to waiting since the start.
        prompt_tokens: Prompt tokens of admitted requests since the start.
        cached_prompt_tokens: Those of them that were found in the cache.
    """

    def __init__(self, manager: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        assert max_num_batched_tokens >= max_num_seqs, "every running request must be able to decode"
        self._manager = manager
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self.running: list[LiveRequest] = []
        self.waiting: deque[LiveRequest] = deque()
        self.preemptions = 0
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0

    def add(self, live: LiveRequest) -> None:
        """Queue a request."""
        self.waiting.append(live)

    def remove(self, live: LiveRequest) -> None:
        """Drop a request wherever it is; its blocks are free at once."""
        (self.running if live.blocks else self.waiting).remove(live)
        self._manager.release(live)

    def schedule(self) -> list[Chunk]:
        """Choose the next step: decodes, then prefills already begun, then waiting requests.

        Blocks for the chosen tokens are allocated, and full ones registered, when this returns.
        """
        chunks = self._continue_running()
        # Only now, when nobody can be preempted any more: what is registered must be computed in this step.
        for chunk in chunks:
            self._manager.register(chunk.live, chunk.stop)
        self._admit_waiting(chunks)
        return chunks

    def _continue_running(self) -> list[Chunk]:
        """Choose the next tokens of running requests.

        Taken in the order of admission, decodes come first by themselves: only the last one can be in its
        prefill still, for as long as it is it leaves no budget to admit another.
        """
        chunks: list[Chunk] = []
        budget = self._max_num_batched_tokens
        for live in list(self.running):
            if not live.blocks:  # preempted a moment ago
                continue
            length = min(live.pending, budget)
            assert length > 0, "the budget covers a token of every running request"
            while not self._manager.grow(live, live.computed + length):
                if self._preempt_last() is live:
                    break
            else:
                chunks.append(_next_chunk(live, length))
                budget -= length
        return chunks

    def _admit_waiting(self, chunks: list[Chunk]) -> None:
        budget = self._max_num_batched_tokens - sum(chunk.length for chunk in chunks)
        while self.waiting and budget > 0 and len(self.running) < self._max_num_seqs:
            live = self.waiting[0]
            prefix = self._manager.find_prefix(live)
            if not self._manager.can_hold(live, prefix):
                break
            self.waiting.popleft()
            self.running.append(live)
            self._manager.adopt(live, prefix)
            if live.cached_tokens is None:  # else it comes back from preemption
                live.cached_tokens = live.computed
                self.prompt_tokens += live.num_tokens
                self.cached_prompt_tokens += live.computed
            chunk = _next_chunk(live, min(live.pending, budget))
            grown = self._manager.grow(live, chunk.stop)
            assert grown, "can_hold promised room for the whole request"
            self._manager.register(live, chunk.stop)
            chunks.append(chunk)
            budget -= chunk.length

    def _preempt_last(self) -> LiveRequest:
        """Take the blocks of the request that came last; it is the first to run again."""
        victim = self.running.pop()
        self._manager.release(victim)
        self.waiting.appendleft(victim)
        self.preemptions += 1
        return victim


def _next_chunk(live: LiveRequest, length: int) -> Chunk:
    return Chunk(live, live.computed, length, samples=length == live.pending)
