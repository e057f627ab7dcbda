"""Share of the device's peak speeds that the engine reaches, beside the plan's prediction.

The model has random weights: Llama-3.1-8B on CUDA, one of 91 million parameters on a CPU, or `--model`. A
share is the time that `kvroute plan` predicts at the device's peak speeds, divided by the measured time. The
peaks are those of the data sheet, or measured ones (`roof_*`). Times are wall times of whole engine steps.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_load import Load, Target, model_of
from benchmarks.random_checkpoint import write_checkpoint
from benchmarks.report import Figure
from benchmarks.roofs import roof_of
from model_server.shapes.shape import DecoderShape
from planning.plan import decode_step, prefill_s

BATCHES = (1, 32, 128)
_STORE_BATCH = 32


def measure(rounds: int, device_name: str, model: str | None, *, quick: bool) -> Iterator[Figure]:
    """Yield the roofs, decode with both types of KV, prefill, and the effect of a store to the host tier."""
    device = torch.device(device_name)
    with tempfile.TemporaryDirectory(prefix="kvroute-bench-") as directory:
        write_checkpoint(model_of(model, device, quick=quick), Path(directory))
        target = Target(Path(directory), device, roof_of(device, quick=quick), quick)
        yield from roofs(target)
        yield from decode(target, rounds)
        yield from decode(target, rounds, fp8=True)
        yield from prefill(target, rounds, (2048, 8192))
        yield from store(target, rounds)


def roofs(target: Target) -> Iterator[Figure]:
    """Yield the peak speeds to which shares relate."""
    setting: dict[str, object] = {"roof": target.roof.name, "device": str(target.device)}
    yield Figure("roof_memory_gb_per_s", "GB/s", round(target.roof.memory_bytes_per_s / 1e9, 2), setting)
    yield Figure("roof_tflops", "TFLOP/s", round(target.roof.flops_per_s / 1e12, 3), setting)


def decode(
    target: Target,
    rounds: int,
    *,
    fp8: bool = False,
    batches: Sequence[int] = BATCHES,
    context_tokens: int = 1024,
    label: str = "",
    **settings: Any,
) -> Iterator[Figure]:
    """Yield the time of a decode step by batch size, its plan, share of the roof, and time of the host.

    Args:
        target: Model and device.
        rounds: Measurements of each figure.
        fp8: Store the KV in 8 bits.
        batches: Batch sizes.
        context_tokens: Tokens of each sequence; a few more while measuring.
        label: Prefix of the figures' names.
        settings: Settings of the engine.
    """
    context_tokens, deployment = target.size(context_tokens, 48), target.deployment(fp8=fp8)
    kind = {"kv_cache_dtype": "fp8"} if fp8 else {}
    with target.engine(target.config(max(batches), context_tokens, **kind, **settings)) as engine:
        load = Load(engine, target.device)
        load.fill(max(batches), context_tokens)
        for batch in sorted(batches, reverse=True):
            load.keep(batch)
            steps = load.warm_up()
            plan = decode_step(deployment, target.roof, batch, load.context_tokens)
            step_s = statistics.median(load.run(steps) for _ in range(rounds))
            host_s = load.host_s(steps)
            name = f"{label}decode_b{batch}{'_fp8' if fp8 else ''}"
            setting: dict[str, object] = {"context_tokens": load.context_tokens, "bound": plan.bound}
            yield Figure(f"{name}_step_ms", "ms", round(1e3 * step_s, 3), setting)
            yield Figure(f"{name}_plan_ms", "ms", round(1e3 * plan.step_s, 3), setting)
            yield Figure(f"{name}_roof_percent", "%", round(100 * plan.step_s / step_s, 1), setting)
            yield Figure(f"{name}_host_ms", "ms", round(1e3 * host_s, 3), setting)


def prefill(target: Target, rounds: int, lengths: Sequence[int]) -> Iterator[Figure]:
    """Yield the time of one uncached prompt by length, its plan and MFU."""
    longest = target.size(max(lengths), 256)
    with target.engine(target.config(1, longest)) as engine:
        load, deployment = Load(engine, target.device), target.deployment()
        for tokens in sorted({min(length, longest) for length in lengths}):
            times_s = []
            for _ in range(rounds + 1):
                started_s = time.perf_counter()
                load.start(1, tokens, 1)  # with a second one, CUDA would compute it before sending the first
                times_s.append(time.perf_counter() - started_s)
            taken_s = statistics.median(times_s[1:])  # the first warms up
            used = prefill_flops(deployment.shape, tokens) / taken_s / target.roof.flops_per_s
            setting: dict[str, object] = {"tokens": tokens}
            yield Figure(f"prefill_{tokens}_ms", "ms", round(1e3 * taken_s, 2), setting)
            planned_s = prefill_s(deployment, target.roof, tokens)
            yield Figure(f"prefill_{tokens}_plan_ms", "ms", round(1e3 * planned_s, 2), setting)
            yield Figure(f"prefill_{tokens}_mfu_percent", "%", round(100 * used, 1), setting)


def prefill_flops(shape: DecoderShape, tokens: int) -> int:
    """Return the operations of a prompt, without lookups of embeddings, with logits of the last token."""
    projections = shape.hidden * (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    linear = shape.layers * (projections + 3 * shape.hidden * shape.intermediate)
    pairs = sum(attended_pairs(tokens, window) for window in shape.windows)
    return (
        2 * tokens * linear + 4 * shape.heads * shape.head_dim * pairs + 2 * shape.hidden * shape.vocab_size
    )


def attended_pairs(tokens: int, window: int | None) -> int:
    """Return the pairs of a token and one that it attends to, in one layer."""
    many = tokens if window is None else min(tokens, window)
    return many * (many + 1) // 2 + (tokens - many) * many


def store(target: Target, rounds: int, batch: int = _STORE_BATCH) -> Iterator[Figure]:
    """Yield the change of step time while 1 GB is stored in the host tier.

    `call` is the time of the engine's thread in the call that starts the store, `done` the time until it is
    complete, rounded up to the end of a step.
    """
    context_tokens = target.size(1024, 48)
    blocks = target.size(10**9, 1 << 24) // target.deployment().gpu_block_bytes
    pool = target.config(batch, context_tokens).gpu_blocks + blocks
    config = target.config(batch, context_tokens, gpu_blocks=pool, cpu_blocks=blocks)
    changes, calls_s, done_s = [], [], []
    with target.engine(config) as engine:
        load = Load(engine, target.device)
        load.fill(batch, context_tokens)
        before_steps = load.warm_up()
        for _ in range(rounds + 1):
            before_s, steps = load.run(before_steps), 0
            started_s = time.perf_counter()
            # The host tier is empty, and a store only reads: any blocks and slots will do.
            transfer = engine.executor.store(list(range(blocks)), list(range(blocks)))
            calls_s.append(time.perf_counter() - started_s)
            while not steps or not transfer.done():
                load.run(1)
                steps += 1
            done_s.append(time.perf_counter() - started_s)
            changes.append(done_s[-1] / steps / before_s - 1)
    setting: dict[str, object] = {"bytes": blocks * target.deployment().gpu_block_bytes}
    name, median = f"store_b{batch}", statistics.median
    yield Figure(f"{name}_step_change_percent", "%", round(100 * median(changes[1:]), 1), setting)
    yield Figure(f"{name}_call_ms", "ms", round(1e3 * median(calls_s[1:]), 2), setting)
    yield Figure(f"{name}_done_ms", "ms", round(1e3 * median(done_s[1:]), 2), setting)
