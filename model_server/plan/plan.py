"""The whole plan of one model on one kind of GPU, or why there can be none.

In: a deployment, a GPU, a budget, the context and perhaps a batch. Out: pool, ceiling, decode steps, advice.
"""

from dataclasses import dataclass

from model_server.errors import CapacityError, ConfigError
from model_server.plan.advice import ParallelOption, Preemption, advised, parallel_options, preemption
from model_server.plan.deployment import Deployment
from model_server.plan.gpus import Gpu
from model_server.plan.pool import Budget, Pool
from model_server.plan.throughput import DecodeStep, batches, decode_step, prefill_s

_GB = 1e9


@dataclass(frozen=True, slots=True)
class Plan:
    """What a model does on some GPUs.

    Attributes:
        name: Of the model.
        gpu: Each of them, at the speeds that the plan counts with.
        pool: Its KV cache, with the deployment and the budget it comes from.
        context_tokens: Length of the sequences that are planned for.
        batch: What was asked for, or None.
        sequences: Held at once; the concurrency ceiling.
        longest_context: What one sequence alone can have, in tokens.
        steps: Decode steps over batches up to the ceiling.
        prefill_s: Time of a prompt of the context's length, alone and uncached.
        options: Numbers of GPUs beside each other.
        advised: The one to take.
        preemption: Recompute or swap.
    """

    name: str
    gpu: Gpu
    pool: Pool
    context_tokens: int
    batch: int | None
    sequences: int
    longest_context: int
    steps: tuple[DecodeStep, ...]
    prefill_s: float
    options: tuple[ParallelOption, ...]
    advised: ParallelOption | None
    preemption: Preemption


def make_plan(
    name: str, deployment: Deployment, gpu: Gpu, budget: Budget, context_tokens: int, batch: int | None = None
) -> Plan:
    """Plan for sequences of one length.

    Args:
        name: Of the model, for messages.
        deployment: The model and how it is served.
        gpu: With the speeds to count with.
        budget: Of each GPU's memory.
        context_tokens: Prompt and answer of a sequence together.
        batch: Sequences that are wanted at once; None takes what there is room for.

    Raises:
        ConfigError: The model was not made for such a context, or the batch is none.
        CapacityError: The model does not fit, or the context, or the batch.
    """
    most_tokens = deployment.shape.max_positions
    if not 0 < context_tokens <= most_tokens:
        raise ConfigError(f"a context of {context_tokens:,} tokens: {name} was made for 1 to {most_tokens:,}")
    if batch is not None and batch < 1:
        raise ConfigError(f"a batch of {batch}; it must be at least 1")
    pool = Pool(deployment, budget)
    options = parallel_options(deployment, budget, context_tokens)
    _check_capacity(name, pool, context_tokens, batch, options)
    sequences = pool.sequences(context_tokens)
    return Plan(
        name=name,
        gpu=gpu,
        pool=pool,
        context_tokens=context_tokens,
        batch=batch,
        sequences=sequences,
        longest_context=pool.longest_context(most_tokens),
        steps=tuple(decode_step(deployment, gpu, size, context_tokens) for size in batches(sequences, batch)),
        prefill_s=prefill_s(deployment, gpu, context_tokens),
        options=options,
        advised=advised(options),
        preemption=preemption(deployment, gpu, context_tokens),
    )


def _check_capacity(
    name: str, pool: Pool, context_tokens: int, batch: int | None, options: tuple[ParallelOption, ...]
) -> None:
    deployment, budget = pool.deployment, pool.budget
    size = deployment.tensor_parallel
    fitting = next((option.tensor_parallel for option in options if option.fits), None)
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
