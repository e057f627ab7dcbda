"""Capacity plan of one model on one GPU model.

Speeds are upper bounds (roofline), not forecasts: a step reads the weights once and computes at peak speed.
Communication between GPUs is not included.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from model_server.errors import CapacityError, ConfigError
from model_server.shapes.deployment import Budget, Deployment, Pool
from model_server.shapes.shape import divides
from planning.presets import Gpu

PARALLEL_SIZES = (1, 2, 4, 8)  # GPUs of one node
# Minimum share h of the memory left for KV. Twice the GPUs give (1 + h) / h times the pool: 4 times at h =
# 1/3, so 2 times per GPU. Below it, most memory holds copies of weights.
ENOUGH_HEADROOM = 1 / 3

_GB = 1e9


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Decode step: one token for each sequence of a batch."""

    batch: int  # sequences
    step_s: float  # duration in seconds
    weights_s: float  # time to read the weights
    kv_s: float  # time to read the KV of all sequences
    compute_s: float  # time of the arithmetic, which overlaps with reading
    tokens_per_s: float  # of all sequences together
    bound: Literal["weights bandwidth", "KV bandwidth", "compute"]  # the bottleneck


@dataclass(frozen=True, slots=True)
class Preemption:
    """Time until a preempted sequence can resume, by recomputing or swapping."""

    recompute_s: float  # seconds to recompute its KV
    swap_s: float  # seconds to copy its KV to the host and back
    even_link_bytes_per_s: float  # host link speed at which both take equally long
    mode: Literal["recompute", "swap"]  # the faster one, for --preemption-mode


@dataclass(frozen=True, slots=True)
class Plan:
    """Capacity plan of a model on GPUs."""

    name: str  # name of the model
    gpu: Gpu  # GPU with the speeds used by the plan
    pool: Pool  # KV cache, with its deployment and budget
    context_tokens: int  # length of the planned sequences
    sequences: int  # concurrent sequences, prefix sharing aside
    longest_context: int  # tokens of the longest single sequence
    steps: tuple[DecodeStep, ...]  # decode steps by batch size, up to `sequences`
    prefill_s: float  # seconds to prefill one uncached prompt of `context_tokens`
    options: tuple[Pool, ...]  # comparison of tensor parallel sizes
    advised: Pool | None  # recommended option; None if none fits
    preemption: Preemption  # comparison of recompute and swap

    def record(self) -> dict[str, object]:
        """Return the plan as a JSON object with units in the field names."""
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
            "tensor_parallel_options": [
                {
                    "tensor_parallel": pool.deployment.tensor_parallel,
                    "gpu_weights_bytes": pool.deployment.gpu_weights_bytes,
                    "gpu_pool_bytes": pool.gpu_bytes,
                    "headroom": pool.headroom,
                    "max_sequences": pool.sequences(self.context_tokens),
                }
                for pool in self.options
            ],
            "advised_tensor_parallel": self.advised.deployment.tensor_parallel if self.advised else None,
            "preemption": msgspec.to_builtins(self.preemption),
        }


def make_plan(
    name: str, deployment: Deployment, gpu: Gpu, budget: Budget, context_tokens: int, batch: int | None = None
) -> Plan:
    """Make a plan for sequences of `context_tokens` tokens.

    Args:
        batch: Required number of concurrent sequences; None: as many as fit.

    Raises:
        ConfigError: The context exceeds that of the model, or `batch` is below 1.
        CapacityError: Model, context or batch do not fit.
    """
    most_tokens = deployment.shape.max_positions
    if not 0 < context_tokens <= most_tokens:
        raise ConfigError(f"--context is {context_tokens:,}; {name} supports 1 to {most_tokens:,} tokens")
    if batch is not None and batch < 1:
        raise ConfigError(f"--batch is {batch}; it must be at least 1")
    pool = Pool(deployment, budget)
    sizes = sorted({*PARALLEL_SIZES, deployment.tensor_parallel})
    supported = (size for size in sizes if divides(deployment.shape, size))
    options = tuple(Pool(replace(deployment, tensor_parallel=size), budget) for size in supported)
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
            decode_step(deployment, gpu, size, context_tokens) for size in _batches(sequences, batch)
        ),
        prefill_s=prefill_s(deployment, gpu, context_tokens),
        options=options,
        advised=_advised([option for option in options if option.sequences(context_tokens)]),
        preemption=_preemption(deployment, gpu, context_tokens),
    )


def decode_step(deployment: Deployment, gpu: Gpu, batch: int, context_tokens: int) -> DecodeStep:
    """Return the decode step of a batch of sequences with `context_tokens` tokens each."""
    weights_s = deployment.gpu_read_weights_bytes / gpu.memory_bytes_per_s
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
    """Yield the powers of two up to `most`, `most`, and the requested batch, in ascending order."""
    sizes = {1 << power for power in range(most.bit_length())} | {most}
    yield from sorted(sizes if asked is None else sizes | {asked})


def prefill_s(deployment: Deployment, gpu: Gpu, tokens: int) -> float:
    """Return the seconds to prefill an uncached prompt."""
    compute_s = deployment.prefill_flops(tokens) / deployment.tensor_parallel / gpu.flops_per_s
    return max(compute_s, deployment.gpu_read_weights_bytes / gpu.memory_bytes_per_s)


def _advised(fitting: Sequence[Pool]) -> Pool | None:
    """Return the smallest option with enough headroom, else the largest, else None."""
    return next(
        (option for option in fitting if option.headroom >= ENOUGH_HEADROOM), fitting[-1] if fitting else None
    )


def _preemption(deployment: Deployment, gpu: Gpu, context_tokens: int) -> Preemption:
    """Compare recomputing with swapping a sequence; each GPU has its own host link."""
    recompute_s = prefill_s(deployment, gpu, context_tokens)
    copied = deployment.decoding_blocks(context_tokens) * deployment.gpu_block_bytes
    swap_s = 2 * (copied / gpu.link_bytes_per_s)
    even = gpu.link_bytes_per_s * swap_s / recompute_s
    return Preemption(recompute_s, swap_s, even, "swap" if swap_s < recompute_s else "recompute")


def _check_capacity(
    name: str, pool: Pool, context_tokens: int, batch: int | None, options: tuple[Pool, ...]
) -> None:
    deployment, budget = pool.deployment, pool.budget
    size = deployment.tensor_parallel
    fitting = next((option for option in options if option.sequences(context_tokens)), None)
    way_out = "use GPUs with more memory"
    if fitting is not None:
        way_out = f"it fits from --tp {fitting.deployment.tensor_parallel}"
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
            f"{pool.longest_context(context_tokens):,} tokens; {way_out}, or use a shorter --context"
        )
    if batch is not None and batch > sequences:
        fp8 = "" if deployment.fp8_kv else ", --kv-dtype fp8"
        raise CapacityError(
            f"a batch of {batch:,} exceeds the capacity: the pool holds {sequences:,} sequences of "
            f"{context_tokens:,} tokens; use a smaller --batch, a shorter --context{fp8} or more GPUs (--tp)"
        )
