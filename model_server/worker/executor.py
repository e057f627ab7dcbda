"""Executor: runs each operation on all tensor-parallel ranks of a model, from rank 0.

An operation is a call of a `ModelRunner` method. It is made here and sent, with its arguments, to the other
ranks. A failure of an operation that other ranks take part in is fatal: ranks out of step would wait for each
other, or compute on different data.
"""

import itertools
import logging
import tempfile
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from model_server.config import EngineConfig
from model_server.errors import AdapterError, ConfigError, WorkerError
from model_server.kv_cache.host_tier import Transfer
from model_server.kv_cache.request import Request, ScheduledRequest
from model_server.model.ranks import Ranks
from model_server.requests import ChosenToken, LoraRequest
from model_server.shapes.shape import ModelRank
from model_server.worker.block_copies import CompletedTransfer
from model_server.worker.block_tables import BlockTableChanges, SpanNumbers
from model_server.worker.model_runner import load_runner
from model_server.worker.sampler import Sampler, SamplingRow
from model_server.worker.workers import Start, WorkerProcesses


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that may still be computed."""

    result: Callable[[], dict[str, ChosenToken]]  # waits for the tokens; returns them by request id


class Executor:
    """A model on one or several ranks, loaded by the constructor. Implements `CacheMemory`."""

    def __init__(self, config: EngineConfig) -> None:
        self._size = size = config.tensor_parallel_size
        self._numbers = itertools.count()
        self._unloaded: deque[int] = deque()  # LoRA ids; filled by the thread that drops an adapter
        self._tables = BlockTableChanges(config.max_num_seqs)
        ranks = Ranks(ModelRank(0, size))
        with ExitStack() as undo:
            directory = ""
            if size > 1:
                directory = undo.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-ranks-"))
            undo.callback(ranks.leave)
            level = logging.getLogger().getEffectiveLevel()
            starts = [Start(config, ModelRank(rank, size), level) for rank in range(1, size)]
            self._workers = WorkerProcesses(starts, on_loss=ranks.abort)
            undo.callback(self._workers.close)
            self.runner = load_runner(config, ranks)  # rank 0's share of the model
            self._workers.read_results()
            if size > 1:
                self._collective_rpc("join", str(Path(directory) / "ranks"))
            # Blocks of the pool: the same on all ranks.
            self.num_blocks = config.gpu_blocks or min(self._collective_rpc("profile"))
            self._cleanup = undo.pop_all()
        # Whether `launch` returns before the step is computed.
        self.is_async = self.runner.attention.is_capturable
        self._failure: str | None = None
        model = self.runner.model
        self._sampler = Sampler(config.max_num_seqs, model.shape.vocab_size, model.device)
        self.vocab_size = self.runner.model.shape.vocab_size  # token ids are below this
        self.eos_token_ids = self.runner.eos_token_ids  # end-of-sequence tokens
        self.max_positions = self.runner.model.shape.max_positions  # the model's maximum context, in tokens
        self.kv_groups = self.runner.kv_groups  # layers that share a block table
        self.block_bytes = self.runner.block_bytes * size  # bytes of one KV block, summed over all ranks

    def launch(self, scheduled: Sequence[ScheduledRequest]) -> LaunchedStep:
        """Start one step, which a CPU computes in `result`. Both calls may raise any exception."""
        return LaunchedStep(self._run(scheduled) if self.is_async else partial(self.execute_model, scheduled))

    def execute_model(self, scheduled: Sequence[ScheduledRequest]) -> dict[str, ChosenToken]:
        """Run one step; return the sampled tokens by request id."""
        return self._run(scheduled)()

    @torch.inference_mode()
    def _run(self, scheduled: Sequence[ScheduledRequest]) -> Callable[[], dict[str, ChosenToken]]:
        # Decodes first, by context length, so that attention can batch them with little padding.
        ordered = sorted(scheduled, key=lambda item: (item.num_tokens > 1, item.stop))
        unloaded = [self._unloaded.popleft() for _ in range(len(self._unloaded))]
        requests = [item.request for item in ordered if item.samples]
        step = flatten_step(ordered, self._tables)
        logits = self._run_on_all_ranks("execute_model", *step, unloaded)
        is_greedy = all(request.is_greedy for request in requests)
        rows = [] if is_greedy else [_sampling_row(request, self.eos_token_ids) for request in requests]
        sample = self._sampler.launch(logits, rows)

        def tokens() -> dict[str, ChosenToken]:
            token_ids, logprobs = sample.result()
            for request, token_id in zip(requests, token_ids, strict=True):
                if request.core_request.constraint is not None:
                    request.core_request.constraint.consume_token(token_id)
            names = (request.request_id for request in requests)
            return dict(zip(names, map(ChosenToken, token_ids, logprobs), strict=True))

        return tokens

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Transfer:
        return self._transfer("store", blocks, slots)

    def restore(self, slots: Sequence[int], blocks: Sequence[int]) -> Transfer:
        return self._transfer("restore", slots, blocks)

    def fence(self) -> None:
        self._run_on_all_ranks("fence")

    def allocate(self, host_blocks: int) -> None:
        self._collective_rpc("allocate", self.num_blocks, host_blocks)

    def free(self) -> int:
        """Release the memory of both tiers; return its bytes on all devices."""
        return sum(self._collective_rpc("free"))

    def load_adapter(self, directory: Path, name: str, lora_id: int) -> LoraRequest:
        """Load an adapter on all ranks, until the result is garbage-collected; may raise an AdapterError."""
        try:
            first, *others = self._collective_rpc("load_adapter", str(directory), lora_id)
            if any(content_hash != first for content_hash in others):
                raise AdapterError(f"{directory}: the files changed while the ranks read them; load it again")
        except Exception as error:
            self._unloaded.append(lora_id)
            self.raise_if_fatal(error)
            raise
        adapter = LoraRequest(name, lora_id, first, directory)
        weakref.finalize(adapter, self._unloaded.append, lora_id)
        return adapter

    def check_health(self) -> None:
        """Raise a WorkerError if a rank or device is lost. Called between steps, at least once per second."""
        if self._failure is not None:
            raise WorkerError(self._failure)
        self._workers.check_health()

    def raise_if_fatal(self, error: Exception) -> None:
        """Raise a WorkerError for a lost rank or a device error, other than lack of the device's memory."""
        if isinstance(error, WorkerError):
            raise error
        is_other = not self.is_async or isinstance(error, torch.OutOfMemoryError | ConfigError | AdapterError)
        is_named = "CUDA" in str(error) or "cuDNN" in str(error)  # by libraries, Triton and other ranks
        if isinstance(error, torch.AcceleratorError) or (is_named and not is_other):
            self._failure = f"the device failed and does not recover: {error}"
            raise WorkerError(self._failure) from error

    def bind_thread(self) -> None:
        self.runner.bind_thread()

    def close(self) -> None:
        """Stop the other ranks. Idempotent."""
        self._cleanup.close()

    def _run_on_all_ranks(self, method: str, *args: Any) -> Any:
        """Call a method on all ranks without waiting for the others; return rank 0's result."""
        self._workers.send_call(method, args)
        try:
            return getattr(self.runner, method)(*args)
        except Exception as error:
            self._tables.clear()
            if self._size > 1:
                raise self._workers.lost_error(f"failed: {error}") from error
            raise

    def _collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method on all ranks; return the results by rank, or raise the first failure."""
        return self._workers.collective_rpc(method, args, lambda: getattr(self.runner, method)(*args))

    def _transfer(self, method: str, *args: Sequence[int]) -> Transfer:
        number = next(self._numbers)
        own: Transfer = self._run_on_all_ranks(method, number, *args)
        # A synchronous copy is synchronous on every rank.
        if isinstance(own, CompletedTransfer):
            return own
        return MultiRankTransfer(own, partial(self._run_on_all_ranks, "wait_transfer", number))


@dataclass(slots=True)
class MultiRankTransfer:
    """Transfer on all ranks. Once done on rank 0, the other ranks complete it before any later call."""

    _own: Transfer
    _wait_on_all_ranks: Callable[[], object]
    _completed: bool = False

    def done(self) -> bool:
        if self._own.done():
            self.wait()
        return self._completed

    def wait(self) -> None:
        if not self._completed:
            self._own.wait()
            self._completed = True
            self._wait_on_all_ranks()


def flatten_step(
    scheduled: Sequence[ScheduledRequest], tables: BlockTableChanges
) -> tuple["array[int]", "array[int]", list[SpanNumbers], list[int]]:
    """Flatten a step into the first arguments of `ModelRunner.execute_model`."""
    token_ids, rows = array("i"), array("i")
    for item in scheduled:
        token_ids.extend(item.request.token_ids[item.start : item.stop])
        if item.samples:
            rows.append(len(token_ids) - 1)
    spans = [tables.take(item) for item in scheduled]
    loras = [item.request.lora_request for item in scheduled]
    lora_ids = [0 if lora is None else lora.lora_id for lora in loras]
    return token_ids, rows, spans, lora_ids if any(lora_ids) else []


def _sampling_row(request: Request, eos_token_ids: frozenset[int]) -> SamplingRow:
    params, constraint = request.core_request.sampling, request.core_request.constraint
    below_minimum = request.num_output_tokens < params.min_tokens
    return SamplingRow(
        params=params,
        seed=request.sampling_seed,
        position=request.num_output_tokens,
        banned=params.stop_token_ids | eos_token_ids if below_minimum else frozenset(),
        token_ids=request.token_ids,
        allowed_bits=None if constraint is None else constraint.compute_bitmask(),
        arrival_index=request.arrival_index,
    )
