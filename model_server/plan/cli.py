"""The `kvroute plan` command: flags in, a page of text or one JSON object out."""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from model_server.config import DType, KvCacheDType
from model_server.errors import CapacityError, ConfigError, ModelError
from model_server.flags import Flag, OneLineParser, add_flags, positive
from model_server.plan.deployment import Deployment
from model_server.plan.plan import DEFAULT_RESERVE_BYTES, DEFAULT_UTILIZATION, Budget, Plan, make_plan
from model_server.plan.presets import CUSTOM, GPUS, PRESETS, Gpu, find_model
from model_server.plan.text import plan_lines
from model_server.shapes import DTYPE_BYTES, computed_dtype, decoder_shape

_EXIT_REFUSED = 2
_CONTEXT_TOKENS = 8192
_GB = 10**9
_OVERRIDES = "; instead of the data sheet's"


def _amount(text: str) -> float:
    number = _rest(text)
    if not number:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _rest(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more")
    return number


@dataclass(frozen=True, slots=True)
class _ModelFlags:
    """Which model, and how it is served."""

    model: Annotated[
        str,
        Flag(
            f"a checkpoint directory (its config.json is enough), or one of {', '.join(PRESETS)}",
            metavar="DIR|NAME",
        ),
    ]
    context: Annotated[
        int | None,
        Flag("tokens of a sequence, prompt and answer", default_text=f"{_CONTEXT_TOKENS}", read=positive),
    ] = None
    batch: Annotated[int | None, Flag("refuse unless so many sequences fit", read=positive)] = None
    dtype: Annotated[DType, Flag("type of the weights")] = "auto"
    kv_cache_dtype: Annotated[
        KvCacheDType,
        Flag("type of the KV cache, if not the weights'", ("--kv-cache-dtype", "--kv-dtype")),
    ] = "auto"
    block_size: Annotated[int, Flag("tokens per KV block", read=positive)] = 16
    max_num_batched_tokens: Annotated[
        int,
        Flag("token budget of one step, which bounds what sliding windows keep", read=positive),
    ] = 2048


@dataclass(frozen=True, slots=True)
class _GpuFlags:
    """Which GPUs, how many, and how much of them may be used."""

    gpu: Annotated[Literal[(*GPUS, CUSTOM.name)], Flag("kind of GPU")] = "h100"  # type: ignore[valid-type]
    tensor_parallel_size: Annotated[
        int, Flag("GPUs that share the model", ("--tensor-parallel-size", "--tp"), read=positive)
    ] = 1
    gpu_memory_utilization: Annotated[
        float, Flag("of the memory, for weights, reserve and KV", metavar="SHARE")
    ] = DEFAULT_UTILIZATION
    reserve_gb: Annotated[
        float, Flag("of each GPU, for activations and the CUDA context", read=_rest, metavar="GB")
    ] = DEFAULT_RESERVE_BYTES / _GB
    efficiency: Annotated[
        float,
        Flag("of all peak speeds that is reached", default_text="%(default)s, the roof", metavar="SHARE"),
    ] = 1.0
    hbm_gib: Annotated[float | None, Flag(f"memory{_OVERRIDES}", read=_amount)] = None
    hbm_gb_per_s: Annotated[
        float | None, Flag(f"speed of the memory{_OVERRIDES}", read=_amount, metavar="GB")
    ] = None
    tflops: Annotated[
        float | None, Flag(f"dense 16-bit arithmetic{_OVERRIDES}", read=_amount, metavar="N")
    ] = None
    link_gb_per_s: Annotated[
        float | None, Flag(f"link to the host{_OVERRIDES}", read=_amount, metavar="GB")
    ] = None


def main(argv: Sequence[str] | None = None) -> int:
    """Print a plan; without arguments the process's own are taken.

    Returns:
        0, or 2 for wrong flags, an unusable model, or a plan for more than the memory holds.
    """
    args = _parser().parse_args(argv)
    try:
        plan = _plan(args)
    except (CapacityError, ConfigError, ModelError) as error:
        print(f"kvroute plan: error: {error}", file=sys.stderr)
        return _EXIT_REFUSED
    lines = [json.dumps(plan.record())] if args.json else plan_lines(plan)
    # A reader that has seen enough, such as head, may close the pipe.
    with contextlib.suppress(BrokenPipeError):
        print("\n".join(lines), flush=True)
    return 0


def _plan(args: argparse.Namespace) -> Plan:
    if not 0 < args.efficiency <= 1:
        raise ConfigError(f"efficiency is {args.efficiency:g}; it must be above 0, at most 1")
    config = find_model(args.model)
    shape = decoder_shape(config)
    gpu = _gpu(args)
    deployment = Deployment(
        shape,
        weight_bytes=DTYPE_BYTES[computed_dtype(config, args.dtype)],
        fp8_kv=args.kv_cache_dtype == "fp8",
        tensor_parallel=args.tensor_parallel_size,
        block_tokens=args.block_size,
        chunk_tokens=args.max_num_batched_tokens,
    )
    return make_plan(
        config.where,
        deployment,
        gpu.at(args.efficiency),
        Budget(gpu.memory_bytes, args.gpu_memory_utilization, int(args.reserve_gb * _GB)),
        min(_CONTEXT_TOKENS, shape.max_positions) if args.context is None else args.context,
        args.batch,
    )


def _gpu(args: argparse.Namespace) -> Gpu:
    """Return the preset, with whatever the flags say of it instead."""
    if args.gpu == CUSTOM.name:
        needed = {"--hbm-gib": args.hbm_gib, "--hbm-gb-per-s": args.hbm_gb_per_s, "--tflops": args.tflops}
        if absent := [flag for flag, value in needed.items() if value is None]:
            raise ConfigError(f"--gpu {CUSTOM.name} needs {', '.join(absent)}")
    gpu = CUSTOM if args.gpu == CUSTOM.name else GPUS[args.gpu]
    if args.hbm_gib is not None:
        gpu = replace(gpu, memory_bytes=int(args.hbm_gib * 2**30))
    if args.hbm_gb_per_s is not None:
        gpu = replace(gpu, memory_bytes_per_s=args.hbm_gb_per_s * _GB)
    if args.tflops is not None:
        gpu = replace(gpu, flops_per_s=args.tflops * 1e12)
    if args.link_gb_per_s is not None:
        gpu = replace(gpu, link_bytes_per_s=args.link_gb_per_s * _GB)
    return gpu


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="kvroute plan",
        description="Tell how many sequences a model holds on GPUs, how fast it decodes, what to choose.",
    )
    add_flags(parser.add_argument_group("model"), _ModelFlags)
    add_flags(parser.add_argument_group("GPUs"), _GpuFlags)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a page of text")
    return parser
