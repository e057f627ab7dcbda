"""The whole plan of one model on one kind of GPU, or why there can be none.

A roof, not a forecast: it counts what must be read and computed, all weights once a step, and leaves out what
GPUs of one model say to each other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from model_server.errors import CapacityError, ConfigError
from model_server.shapes import divides
from model_server.shapes.deployment import Budget, Deployment, Pool
from planning.presets import Gpu

PARALLEL_SIZES = (1, 2, 4, 8)  # a node's
# With a share h left for KV, twice the GPUs have (1 + h) / h times the pool: at a third four times, twice for
# each GPU. Below it the GPUs mostly repeat weights.
ENOUGH_HEADROOM = 1 / 3

_GB = 1e9


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One step in which every sequence of a batch gets a token."""

    batch: int  # sequences
    step_s: float  # seconds of the step
    weights_s: float  # reading the weights
    kv_s: float  # reading the KV of all sequences
    compute_s: float  # the arithmetic, which goes on meanwhile
    tokens_per_s: float  # tokens a second, of all sequences
    bound: Literal["weights bandwidth", "KV bandwidth", "compute"]  # what to have more of to be faster


@dataclass(frozen=True, slots=True)
class ParallelOption:
    """A model on so many GPUs."""

    tensor_parallel: int  # the GPUs
    gpu_weights_bytes: int  # weights on each
    gpu_pool_bytes: int  # what is left for KV on each; below 0 if the weights do not fit
    headroom: float  # that as a share of what weights and KV have together
    max_sequences: int  # held at once, on all of them together; 0 if there is no room for the weights and one


@dataclass(frozen=True, slots=True)
class Preemption:
    """What it takes until a preempted sequence can go on."""

    recompute_s: float  # computing its KV again
    swap_s: float  # copying it to the host and back
    even_link_bytes_per_s: float  # speed of the link to the host at which both take equally long
    mode: Literal["recompute", "swap"]  # the one that takes less time; as the engine's --preemption-mode


@dataclass(frozen=True, slots=True)
class Plan:
    """What a model does on some GPUs."""

    name: str  # of the model
    gpu: Gpu  # each of them, at the speeds that the plan counts with
    pool: Pool  # its KV cache, with the deployment and the budget it comes from
    context_tokens: int  # length of the sequences that are planned for
    sequences: int  # held at once; the concurrency ceiling
    longest_context: int  # what one sequence alone can have, in tokens
    steps: tuple[DecodeStep, ...]  # decode steps over batches up to the ceiling
    prefill_s: float  # time of a prompt of the context's length, alone and uncached
    options: tuple[ParallelOption, ...]  # numbers of GPUs beside each other
    advised: ParallelOption | None  # the one to take
    preemption: Preemption  # recompute or swap

    def record(self) -> dict[str, object]:
        """Return the plan as one JSON object, units in the names; for charts and scripts."""
        deployment, budget = self.pool.deployment, self.pool.budget
        return {
            "model": self.name,
            "gpu": self.gpu.name,
            "tensor_parallel": deployment.tensor_parallel,
            "context_tokens": self.context_tokens,
            "parameters": deployment.parameters,
            "weight_bytes": deployment.weight_bytes,
            "kv_cache_dtype": "fp8" if deployment.fp8_kv else "auto",
            "gpu_memory_bytes": budget.memory_bytes,
            "gpu_memory_utilization": budget.utilization,
            "gpu_reserve_bytes": budget.reserve_bytes,
            "gpu_weights_bytes": deployment.gpu_weights_bytes,
            "gpu_pool_bytes": self.pool.gpu_bytes,
            "gpu_block_bytes": deployment.gpu_block_bytes,
            "block_tokens": deployment.block_tokens,
            "num_gpu_blocks": self.pool.blocks,
            "kv_bytes_per_token": deployment.token_bytes,
            "kv_groups": [
                {"kind": group.kind, "window_tokens": group.window_tokens, "layers": len(group.layers)}
                for group in deployment.groups
            ],
            "max_sequences": self.sequences,
            "max_context_tokens": self.longest_context,
            "prefill_s": self.prefill_s,
            "decode": msgspec.to_builtins(self.steps),
            "tensor_parallel_options": msgspec.to_builtins(self.options),
            "advised_tensor_parallel": self.advised.tensor_parallel if self.advised else None,
            "preemption": msgspec.to_builtins(self.preemption),
        }


def make_plan(
    name: str, deployment: Deployment, gpu: Gpu, budget: Budget, context_tokens: int, batch: int | None = None
) -> Plan:
    """Plan for sequences of one length; `batch` are wanted at once, or as many as there is room for.

    A ConfigError where the model was not made for such a context or the batch is none, a CapacityError where
    model, context or batch do not fit.
    """
    most_tokens = deployment.shape.max_positions
    if not 0 < context_tokens <= most_tokens:
        raise ConfigError(f"a context of {context_tokens:,} tokens: {name} was made for 1 to {most_tokens:,}")
    if batch is not None and batch < 1:
        raise ConfigError(f"a batch of {batch}; it must be at least 1")
    pool = Pool(deployment, budget)
    options = _parallel_options(deployment, budget, context_tokens)
    _check_capacity(name, pool, context_tokens, batch, options)
    sequences = pool.sequences(context_tokens)
    return Plan(
        name=name,
        gpu=gpu,
        pool=pool,
        context_tokens=context_tokens,
        sequences=sequences,
        longest_context=pool.longest_context(most_tokens),
        steps=tuple(
            _decode_step(deployment, gpu, size, context_tokens) for size in _batches(sequences, batch)
        ),
        prefill_s=_prefill_s(deployment, gpu, context_tokens),
        options=options,
        advised=_advised(options),
        preemption=_preemption(deployment, gpu, context_tokens),
    )


def _decode_step(deployment: Deployment, gpu: Gpu, batch: int, context_tokens: int) -> DecodeStep:
    """Return the step of a batch whose sequences all have this many tokens."""
    weights_s = deployment.gpu_weights_bytes / gpu.memory_bytes_per_s
    kv_s = batch * deployment.gpu_kv_read_bytes(context_tokens) / gpu.memory_bytes_per_s
    flops = batch * deployment.decode_flops(context_tokens) / deployment.tensor_parallel
    compute_s = flops / gpu.flops_per_s
    step_s = max(weights_s + kv_s, compute_s)
    bound: Literal["weights bandwidth", "KV bandwidth", "compute"] = "compute"
    if compute_s <= weights_s + kv_s:
        bound = "weights bandwidth" if weights_s >= kv_s else "KV bandwidth"
    return DecodeStep(
        batch, step_s, weights_s, kv_s=kv_s, compute_s=compute_s, tokens_per_s=batch / step_s, bound=bound
    )


def _batches(most: int, asked: int | None) -> Iterator[int]:
    """Yield powers of two up to `most`, and `most` itself; in order, with the batch that was asked for."""
    sizes = {1 << power for power in range(most.bit_length())} | {most}
    yield from sorted(sizes if asked is None else sizes | {asked})


def _prefill_s(deployment: Deployment, gpu: Gpu, tokens: int) -> float:
    """Return the seconds of computing a prompt of which nothing is cached."""
    compute_s = deployment.prefill_flops(tokens) / deployment.tensor_parallel / gpu.flops_per_s
    return max(compute_s, deployment.gpu_weights_bytes / gpu.memory_bytes_per_s)


def _parallel_options(
    deployment: Deployment, budget: Budget, context_tokens: int
) -> tuple[ParallelOption, ...]:
    """Return what each number of GPUs gives that the model can be divided among."""
    sizes = sorted({*PARALLEL_SIZES, deployment.tensor_parallel})
    deployments = [
        replace(deployment, tensor_parallel=size) for size in sizes if divides(deployment.shape, size)
    ]
    return tuple(
        ParallelOption(
            pool.deployment.tensor_parallel,
            pool.deployment.gpu_weights_bytes,
            pool.gpu_bytes,
            pool.headroom,
            pool.sequences(context_tokens),
        )
        for pool in (Pool(each, budget) for each in deployments)
    )


def _advised(options: Sequence[ParallelOption]) -> ParallelOption | None:
    """Return the least number of GPUs with enough headroom, else the largest that fits, else None."""
    fitting = [option for option in options if option.max_sequences]
    return next(
        (option for option in fitting if option.headroom >= ENOUGH_HEADROOM), fitting[-1] if fitting else None
    )


def _preemption(deployment: Deployment, gpu: Gpu, context_tokens: int) -> Preemption:
    """Weigh recomputing a sequence of this length against swapping it, each GPU over a link of its own."""
    recompute_s = _prefill_s(deployment, gpu, context_tokens)
    copied = deployment.decoding_blocks(context_tokens) * deployment.gpu_block_bytes
    swap_s = 2 * (copied / gpu.link_bytes_per_s)
    even = gpu.link_bytes_per_s * swap_s / recompute_s
    return Preemption(recompute_s, swap_s, even, "swap" if swap_s < recompute_s else "recompute")


def _check_capacity(
    name: str, pool: Pool, context_tokens: int, batch: int | None, options: tuple[ParallelOption, ...]
) -> None:
    deployment, budget = pool.deployment, pool.budget
    size = deployment.tensor_parallel
    fitting = next((option.tensor_parallel for option in options if option.max_sequences), None)
    way_out = (
        f"it fits from tensor parallel {fitting} on" if fitting is not None else "take GPUs with more memory"
    )
    if pool.gpu_bytes < deployment.gpu_block_bytes:
        raise CapacityError(
            f"{name} does not fit at tensor parallel {size}: its weights take "
            f"{deployment.gpu_weights_bytes / _GB:.1f} GB of each GPU, which has "
            f"{(budget.usable_bytes - budget.reserve_bytes) / _GB:.1f} GB for weights and KV "
            f"({budget.utilization:g} of {budget.memory_bytes / _GB:.1f} GB, less "
            f"{budget.reserve_bytes / _GB:.1f} GB of reserve); {way_out}"
        )
    sequences = pool.sequences(context_tokens)
    if not sequences:
        needed = deployment.prefilling_blocks(context_tokens) * deployment.gpu_block_bytes
        raise CapacityError(
            f"no sequence of {context_tokens:,} tokens fits: it needs {needed / _GB:.2f} GB of KV on each "
            f"GPU, but the pool has {pool.gpu_bytes / _GB:.2f} GB, enough for "
            f"{pool.longest_context(context_tokens):,} tokens; {way_out}, or take a shorter --context"
        )
    if batch is not None and batch > sequences:
        fp8 = "" if deployment.fp8_kv else ", --kv-dtype fp8"
        raise CapacityError(
            f"a batch of {batch:,} is over capacity: the pool holds {sequences:,} sequences of "
            f"{context_tokens:,} tokens; take a smaller --batch, a shorter --context{fp8} or more GPUs (--tp)"
        )
