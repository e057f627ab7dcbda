"""The `kvroute plan` command: prints a plan as text or as one JSON object. GB are 10^9 bytes."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, replace
from functools import partial

from common.flags import CommandParser, add_flags, flag, positive
from model_server.config import DType, EngineConfig, KvCacheDType
from model_server.errors import CapacityError, ConfigError, ModelError
from model_server.shapes.deployment import (
    DEFAULT_RESERVE_BYTES,
    DEFAULT_UTILIZATION,
    Budget,
    Deployment,
    size_text,
)
from model_server.shapes.shape import KvGroupSpec
from planning.ladder import Load, Rung, ladder
from planning.plan import Plan, make_plan
from planning.presets import CUSTOM, GPUS, PRESETS, Gpu, find_model

_EXIT_REFUSED = 2
_CONTEXT_TOKENS = 8192
_GB = 10**9
_OVERRIDES = "; replaces the figure of the data sheet"

_model_flag = partial(flag, "model")
_gpu_flag = partial(flag, "GPUs")
_load_flag = partial(flag, "load")


def _number(wanted: str, is_wanted: Callable[[float], bool], text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (number := float(text)) < float("inf") and is_wanted(number):
            return number
    raise argparse.ArgumentTypeError(f"{text} is not {wanted}")


_zero_or_more = partial(_number, "0 or more", lambda _: True)
_above_zero = partial(_number, "above 0", lambda number: number > 0)
_share = partial(_number, "0 or more and below 1", lambda number: number < 1)


@dataclass(frozen=True, slots=True)
class _ModelFlags:
    model: str = _model_flag(
        "--model",
        str,
        MISSING,
        f"checkpoint directory (its config.json is enough), or one of {', '.join(PRESETS)}",
        metavar="DIR|NAME",
    )
    context: int | None = _model_flag(
        "--context",
        positive,
        None,
        f"tokens of a sequence, prompt and output together (default: {_CONTEXT_TOKENS})",
    )
    batch: int | None = _model_flag("--batch", positive, None, "fail unless this many sequences fit")
    dtype: DType = _model_flag("--dtype", DType, "auto", "type of the weights")
    kv_cache_dtype: KvCacheDType = _model_flag(
        "--kv-cache-dtype --kv-dtype", KvCacheDType, "auto", "type of the KV cache; auto: that of --dtype"
    )
    block_size: int = _model_flag("--block-size", positive, 16, "tokens per KV block")
    max_num_batched_tokens: int = _model_flag(
        "--max-num-batched-tokens",
        positive,
        EngineConfig(device="cuda").max_num_batched_tokens,
        "token budget of one step, which bounds the KV of sliding windows",
    )


@dataclass(frozen=True, slots=True)
class _GpuFlags:
    gpu: str = _gpu_flag("--gpu", str, "h100", "GPU model", choices=(*GPUS, CUSTOM.name))
    tensor_parallel_size: int = _gpu_flag(
        "--tensor-parallel-size --tp", positive, 1, "GPUs that share the model"
    )
    gpu_memory_utilization: float = _gpu_flag(
        "--gpu-memory-utilization",
        float,
        DEFAULT_UTILIZATION,
        "share of the memory for weights, reserve and KV",
        metavar="SHARE",
    )
    reserve_gb: float = _gpu_flag(
        "--reserve-gb",
        _zero_or_more,
        DEFAULT_RESERVE_BYTES / _GB,
        "memory of each GPU for activations and the CUDA context",
        metavar="GB",
    )
    efficiency: float = _gpu_flag(
        "--efficiency",
        float,
        1.0,
        "reached share of all peak speeds (default: 1, the upper bound)",
        metavar="SHARE",
    )
    hbm_gib: float | None = _gpu_flag("--hbm-gib", _above_zero, None, f"memory{_OVERRIDES}", metavar="GIB")
    hbm_gb_per_s: float | None = _gpu_flag(
        "--hbm-gb-per-s", _above_zero, None, f"memory bandwidth{_OVERRIDES}", metavar="GB"
    )
    tflops: float | None = _gpu_flag("--tflops", _above_zero, None, f"dense 16-bit arithmetic{_OVERRIDES}")
    link_gb_per_s: float | None = _gpu_flag(
        "--link-gb-per-s", _above_zero, None, f"bandwidth to the host{_OVERRIDES}", metavar="GB"
    )


@dataclass(frozen=True, slots=True)
class _LoadFlags:
    requests_per_s: float | None = _load_flag(
        "--requests-per-s", _above_zero, None, "also print the growth ladder for this load", metavar="N"
    )
    prompt_tokens: int = _load_flag("--prompt-tokens", positive, 4096, "tokens of a prompt")
    output_tokens: int = _load_flag("--output-tokens", positive, 256, "tokens of an answer")
    reused_share: float = _load_flag(
        "--reused-share",
        _share,
        0.7,
        "share of a prompt that an earlier one had, such as a conversation's past",
        metavar="SHARE",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 for invalid flags, an unusable model, or a plan above the capacity."""
    args = _parser().parse_args(argv)
    try:
        plan = _plan(args)
        rungs = _rungs(args, plan)
    except (CapacityError, ConfigError, ModelError) as error:
        print(f"kvroute plan: error: {error}", file=sys.stderr)
        return _EXIT_REFUSED
    if args.json:
        lines = [json.dumps(plan.record() | {"ladder": [rung._asdict() for rung in rungs]})]
    else:
        lines = [*plan_lines(plan), *ladder_lines(rungs)]
    # A reader such as head may close the pipe early.
    with contextlib.suppress(BrokenPipeError):
        print("\n".join(lines), flush=True)
    return 0


def _plan(args: argparse.Namespace) -> Plan:
    if not 0 < args.efficiency <= 1:
        raise ConfigError(f"efficiency is {args.efficiency:g}; it must be above 0, at most 1")
    config = find_model(args.model)
    gpu = _gpu(args)
    deployment = Deployment.of(
        config,
        args.dtype,
        args.kv_cache_dtype,
        tensor_parallel=args.tensor_parallel_size,
        block_tokens=args.block_size,
        chunk_tokens=args.max_num_batched_tokens,
    )
    return make_plan(
        config.source,
        deployment,
        gpu.at(args.efficiency),
        Budget(gpu.memory_bytes, args.gpu_memory_utilization, int(args.reserve_gb * _GB)),
        min(_CONTEXT_TOKENS, deployment.shape.max_positions) if args.context is None else args.context,
        args.batch,
    )


def _rungs(args: argparse.Namespace, plan: Plan) -> Sequence[Rung]:
    """Return the growth ladder; empty without a load."""
    if args.requests_per_s is None:
        return ()
    load = Load(args.requests_per_s, args.prompt_tokens, args.output_tokens, args.reused_share)
    return tuple(ladder(plan.pool.deployment, plan.gpu, plan.pool.budget, load))


def _gpu(args: argparse.Namespace) -> Gpu:
    """Return the preset with the overrides of the flags."""
    if args.gpu == CUSTOM.name:
        needed = {"--hbm-gib": args.hbm_gib, "--hbm-gb-per-s": args.hbm_gb_per_s, "--tflops": args.tflops}
        if absent := [flag for flag, value in needed.items() if value is None]:
            raise ConfigError(f"--gpu {CUSTOM.name} needs {', '.join(absent)}")
    overrides = {
        "memory_bytes": (args.hbm_gib, 2**30),
        "memory_bytes_per_s": (args.hbm_gb_per_s, _GB),
        "flops_per_s": (args.tflops, 10**12),
        "link_bytes_per_s": (args.link_gb_per_s, _GB),
    }
    given = {name: value * unit for name, (value, unit) in overrides.items() if value is not None}
    if "memory_bytes" in given:
        given["memory_bytes"] = int(given["memory_bytes"])
    return replace(CUSTOM if args.gpu == CUSTOM.name else GPUS[args.gpu], **given)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="kvroute plan",
        description="Compute how many sequences of a model fit on GPUs, and how fast they decode.",
    )
    add_flags(parser, _ModelFlags, _GpuFlags, _LoadFlags)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def plan_lines(plan: Plan) -> Iterator[str]:
    """Yield the lines of the text report."""
    deployment = plan.pool.deployment
    kv_bits = 8 if deployment.fp8_kv else 8 * deployment.weight_bytes
    yield (
        f"{plan.name} on {deployment.tensor_parallel} x {plan.gpu.name}: {8 * deployment.weight_bytes}-bit "
        f"weights, {kv_bits}-bit KV, sequences of {plan.context_tokens:,} tokens"
    )
    for part in (_memory, _kv_groups, _capacity, _decode, _parallel, _preemption):
        yield ""
        yield from part(plan)


def ladder_lines(rungs: Sequence[Rung]) -> Iterator[str]:
    """Yield the lines of the growth ladder."""
    if not rungs:
        return
    yield ""
    yield "Growth ladder (each rung keeps those before it)"
    rows = [
        (
            str(number),
            rung.name,
            str(rung.gpus),
            f"{rung.sequences:,}" if rung.sequences else "does not fit",
            f"{rung.requests_per_s:,.2f}",
            f"{1000 * rung.ttft_s:,.0f}",
            f"{rung.replicas:,}",
            f"{rung.replicas * rung.gpus:,}",
        )
        for number, rung in enumerate(rungs)
    ]
    heads = ("", "rung", "GPUs", "sequences", "requests/s", "TTFT ms", "pods", "all GPUs")
    yield from _table(heads, rows, "><>>>>>>")
    for number, rung in enumerate(rungs[1:], 1):
        yield f"  {number}: seen before: {rung.before}"
        yield f"     climb: {rung.command}"


def _capacity(plan: Plan) -> Iterator[str]:
    yield (
        f"Concurrency: {plan.sequences:,} sequences of {plan.context_tokens:,} tokens. "
        f"Longest single sequence: {plan.longest_context:,} tokens."
    )


def _memory(plan: Plan) -> Iterator[str]:
    pool, budget = plan.pool, plan.pool.budget
    deployment = pool.deployment
    rows = [
        ("usable", budget.usable_bytes, f"{budget.utilization:g} of {budget.memory_bytes / _GB:,.1f} GB"),
        ("weights", deployment.gpu_weights_bytes, f"{deployment.parameters / _GB:.2f} G parameters"),
        ("reserve", budget.reserve_bytes, "activations, CUDA context"),
        ("KV pool", pool.gpu_bytes, f"{pool.blocks:,} blocks of {deployment.block_tokens} tokens"),
    ]
    yield "Memory of each GPU"
    yield from _table(("", "GB", ""), ((name, _gb(amount), note) for name, amount, note in rows), "<><")


def _kv_groups(plan: Plan) -> Iterator[str]:
    deployment = plan.pool.deployment
    block_bytes = deployment.gpu_block_bytes * deployment.tensor_parallel
    groups_of: dict[int | None, list[KvGroupSpec]] = {}
    for group in deployment.groups:
        groups_of.setdefault(group.window_tokens, []).append(group)
    rows = [
        (
            f"{sum(len(group.layers) for group in groups):,}",
            f"{len(groups):,}",
            "all tokens" if window is None else f"the last {window:,} tokens",
            f"{len(groups) * block_bytes / deployment.block_tokens:,.0f}",
            size_text(deployment.decoding_blocks(plan.context_tokens, groups) * block_bytes),
        )
        for window, groups in groups_of.items()
    ]
    yield f"KV of a sequence: {deployment.token_bytes:,.0f} bytes per further token"
    yield from _table(("layers", "groups", "keep", "bytes/token", "total"), rows, ">><>>")


def _decode(plan: Plan) -> Iterator[str]:
    gpu = plan.gpu
    yield (
        f"Decode at {gpu.memory_bytes_per_s / _GB:,.0f} GB/s and {gpu.flops_per_s / 1e12:,.0f} TFLOP/s each "
        "(an upper bound, not a forecast)"
    )
    rows = [
        (
            f"{step.batch:,}",
            f"{1000 * step.step_s:,.2f}",
            f"{step.tokens_per_s:,.0f}",
            f"{step.tokens_per_s / step.batch:,.1f}",
            step.bound,
        )
        for step in plan.steps
    ]
    yield from _table(("batch", "step ms", "tokens/s", "each", "bound by"), rows, ">>>><")


def _parallel(plan: Plan) -> Iterator[str]:
    yield "Tensor parallel"
    rows = [
        (
            str(pool.deployment.tensor_parallel),
            _gb(pool.deployment.gpu_weights_bytes),
            _gb(pool.gpu_bytes) if pool.gpu_bytes > 0 else "-",
            f"{pool.headroom:.0%}" if pool.headroom > 0 else "-",
            f"{sequences:,}" if sequences else "does not fit",
            f"{sequences / pool.deployment.tensor_parallel:,.1f}" if sequences else "",
        )
        for pool, sequences in ((pool, pool.sequences(plan.context_tokens)) for pool in plan.options)
    ]
    heads = ("GPUs", "weights GB", "KV GB", "left for KV", "sequences", "per GPU")
    yield from _table(heads, rows, ">>>>>>")
    if plan.advised is not None:
        yield f"Advice: {plan.advised.deployment.tensor_parallel}, {_reason(plan)}."


def _reason(plan: Plan) -> str:
    assert plan.advised is not None
    share = f"{plan.advised.headroom:.0%} of the memory left for KV"
    if plan.advised == next(pool for pool in plan.options if pool.sequences(plan.context_tokens)):
        return f"the smallest that fits, with {share}"
    return f"the smallest with enough room, {share}; with fewer GPUs most memory holds weights"


def _preemption(plan: Plan) -> Iterator[str]:
    weighed, gpu = plan.preemption, plan.gpu
    yield f"A preempted sequence of {plan.context_tokens:,} tokens"
    ways = [
        ("recompute", weighed.recompute_s, f"{plan.context_tokens / weighed.recompute_s:,.0f} tokens/s"),
        ("swap out and in", weighed.swap_s, f"{gpu.link_bytes_per_s / _GB:,.0f} GB/s to the host"),
    ]
    rows = [(name, f"{1000 * seconds:,.1f}", note) for name, seconds, note in ways]
    yield from _table(("", "ms", ""), rows, "<><")
    yield (
        f"Advice: --preemption-mode {weighed.mode}; both take equally long at "
        f"{weighed.even_link_bytes_per_s / _GB:,.1f} GB/s to the host."
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], sides: str) -> Iterator[str]:
    """Yield aligned lines; `sides` has "<" or ">" per column. If all heads are empty, they are left out."""
    lines = [heads, *rows] if any(heads) else [*rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(sides))]
    for line in lines:
        cells = (f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True))
        yield f"  {'  '.join(cells)}".rstrip()


def _gb(amount: float) -> str:
    return f"{amount / _GB:,.1f}"
