"""All ranks of a model, seen from rank 0: what one does, all do.

Each order is a method of `ModelRunner` with its arguments, called here and, sent as they are, on the other
ranks. Whatever goes wrong in one that others take part in is final: ranks that have lost step would wait for
each other, or worse, compute on different things.
"""

import itertools
import logging
import tempfile
import weakref
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model_server.config import EngineConfig
from model_server.errors import AdapterError, WorkerError
from model_server.kv_cache.host_tier import Transfer
from model_server.kv_cache.request import Chunk, LiveRequest
from model_server.model.ranks import Ranks
from model_server.requests import ChosenToken, LoraRequest
from model_server.shapes import Division
from model_server.worker.block_copies import Done
from model_server.worker.model_runner import SpanNumbers, load_runner
from model_server.worker.sampler import SamplingRow, best, log_probabilities, read_logprobs, sample
from model_server.worker.workers import Start, Workers


class Executor:
    """A model on one rank or several, loaded when made; moves blocks as `BlockCopies` tells."""

    def __init__(self, config: EngineConfig) -> None:
        self._size = size = config.tensor_parallel_size
        self._numbers = itertools.count()
        self._dropped: deque[int] = deque()  # filled by whichever thread lets go of an adapter
        ranks = Ranks(Division(0, size))
        with ExitStack() as undo:
            directory = ""
            if size > 1:
                directory = undo.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-ranks-"))
            undo.callback(ranks.leave)
            self._workers = Workers(size - 1, on_loss=ranks.abort)
            undo.callback(self._workers.close)
            level = logging.getLogger().getEffectiveLevel()
            self._workers.start([Start(config, Division(rank, size), level) for rank in range(1, size)])
            self.runner = load_runner(config, ranks)  # rank 0's part
            self._workers.confirm()
            if size > 1:
                self._ask("join", str(Path(directory) / "ranks"))
            self._cleanup = undo.pop_all()
        self.vocab_size = self.runner.model.shape.vocab_size  # token ids are below this
        self.eos_token_ids = self.runner.eos_token_ids  # tokens that end a text
        self.max_positions = self.runner.max_positions  # longest text that the model was made for, in tokens
        self.kv_groups = self.runner.kv_groups  # layers that share a block table
        self.block_bytes = self.runner.block_bytes * size  # bytes of one KV block, on all ranks together

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> dict[str, ChosenToken]:
        """Compute a step; returns the next token by request id, for each chunk that samples.

        A WorkerError where nothing can be computed any more.
        """
        # Single tokens first, by length: that is how attention can batch them with little padding.
        ordered = sorted(chunks, key=lambda chunk: (chunk.length > 1, chunk.stop))
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        sampling = [chunk.live for chunk in ordered if chunk.samples]
        try:
            logits = self._tell("execute", *step_numbers(ordered), dropped)
            tokens = choose_tokens(logits, sampling, self.eos_token_ids)
        except torch.AcceleratorError as error:  # told when results are read; each later step would fail, too
            raise WorkerError(f"the device failed and does not recover: {error}") from error
        return {live.request_id: token for live, token in zip(sampling, tokens, strict=True)}

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Transfer:
        return self._transfer("store", blocks, slots)

    def restore(self, slots: Sequence[int], blocks: Sequence[int]) -> Transfer:
        return self._transfer("restore", slots, blocks)

    def fence(self) -> None:
        self._tell("fence")

    def settle(self, number: int) -> None:
        """Have a transfer that is done here done on all ranks before anything that is told them later."""
        self._tell("settle", number)

    def allocate(self, host_blocks: int) -> None:
        self._ask("allocate", host_blocks)

    def free(self) -> None:
        self._ask("free")

    def load_adapter(self, directory: Path, name: str, lora_id: int) -> LoraRequest:
        """Load an adapter on all ranks, which keep it while anybody has the result, or raise AdapterError."""
        try:
            first, *others = self._ask("load_adapter", str(directory), lora_id)
            if any(content_hash != first for content_hash in others):
                raise AdapterError(f"{directory}: the files change while they are read; load it again")
        except AdapterError:
            self._dropped.append(lora_id)
            raise
        adapter = LoraRequest(name, lora_id, first, directory)
        weakref.finalize(adapter, self._dropped.append, lora_id)
        return adapter

    def check(self) -> None:
        """Raise WorkerError if a rank is lost; called between steps, at least once a second."""
        self._workers.check()

    def close(self) -> None:
        """Stop the other ranks; may be called twice."""
        self._cleanup.close()

    def _tell(self, method: str, *args: Any) -> Any:
        """Have all ranks do the same; what comes out of it here is returned."""
        self._workers.tell(method, args)
        try:
            return getattr(self.runner, method)(*args)
        except Exception as error:
            if self._size > 1:
                raise self._workers.loss(f"failed: {error}") from error
            raise

    def _ask(self, method: str, *args: Any) -> list[Any]:
        """Have all ranks do the same; returns what came of it, by rank, or raises what went wrong."""
        return self._workers.ask(method, args, lambda: getattr(self.runner, method)(*args))

    def _transfer(self, method: str, *args: Sequence[int]) -> Transfer:
        number = next(self._numbers)
        own: Transfer = self._tell(method, number, *args)
        # Copies that are done when their call returns are so on all ranks.
        return own if isinstance(own, Done) else SharedTransfer(number, own, self)


@dataclass(slots=True)
class SharedTransfer:
    """A transfer on all ranks; `executor` settles it on the others once it is done here."""

    _number: int
    _own: Transfer
    _executor: Executor
    _settled: bool = False

    def done(self) -> bool:
        if self._own.done():
            self.wait()
        return self._settled

    def wait(self) -> None:
        if not self._settled:
            self._own.wait()
            self._settled = True
            self._executor.settle(self._number)


def step_numbers(
    chunks: Sequence[Chunk],
) -> tuple["array[int]", "array[int]", list[SpanNumbers], list[int]]:
    """Put chunks, at most one per request, into one batch: the first arguments of `ModelRunner.execute`."""
    token_ids, rows = array("i"), array("i")
    for chunk in chunks:
        token_ids.extend(chunk.live.token_ids[chunk.start : chunk.stop])
        if chunk.samples:
            rows.append(len(token_ids) - 1)
    spans: list[SpanNumbers] = [(chunk.start, chunk.length, chunk.live.block_ids) for chunk in chunks]
    lora_ids = [0 if chunk.live.adapter is None else chunk.live.adapter.lora_id for chunk in chunks]
    return token_ids, rows, spans, lora_ids if any(lora_ids) else []


def choose_tokens(
    logits: Tensor, requests: Sequence[LiveRequest], eos_token_ids: frozenset[int]
) -> list[ChosenToken]:
    """Choose each request's next token.

    Args:
        logits: float32 [requests, vocab_size]; changed in place.
        requests: One per row of logits.
    """
    if all(live.takes_best for live in requests):
        return list(map(ChosenToken, best(logits)))
    counts = [live.request.sampling.logprobs for live in requests]
    logprobs = log_probabilities(logits, counts)
    tokens = sample(logits, [_sampling_row(live, eos_token_ids) for live in requests])
    for live, token in zip(requests, tokens, strict=True):
        if live.request.constraint is not None:
            live.request.constraint.accept(token)
    told = read_logprobs(logprobs, counts, tokens)
    return [ChosenToken(token, entry) for token, entry in zip(tokens, told, strict=True)]


def _sampling_row(live: LiveRequest, eos_token_ids: frozenset[int]) -> SamplingRow:
    params, constraint = live.request.sampling, live.request.constraint
    is_early = live.num_generated < params.min_tokens
    return SamplingRow(
        params=params,
        seed=live.sampling_seed,
        position=live.num_generated,
        banned=params.stop_token_ids | eos_token_ids if is_early else frozenset(),
        token_ids=live.token_ids,
        allowed_bits=None if constraint is None else constraint.allowed_bits(),
    )
