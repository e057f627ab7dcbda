"""The `kvroute plan` command: flags in, a page of text or one JSON object out."""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from model_server.config import DTYPES, KV_CACHE_DTYPES
from model_server.errors import CapacityError, ConfigError, ModelError
from model_server.plan.deployment import Deployment
from model_server.plan.gpus import CUSTOM, GPUS, Gpu
from model_server.plan.plan import Plan, make_plan
from model_server.plan.pool import DEFAULT_RESERVE_BYTES, DEFAULT_UTILIZATION, Budget
from model_server.plan.presets import PRESETS, find_model
from model_server.plan.record import plan_record
from model_server.plan.text import plan_lines
from model_server.shapes import DTYPE_BYTES, computed_dtype, decoder_shape

_EXIT_REFUSED = 2
_CONTEXT_TOKENS = 8192
_GB = 10**9


def main(argv: Sequence[str] | None = None) -> int:
    """Print a plan.

    Args:
        argv: The arguments after the command's name; None takes the process's own.

    Returns:
        0, or 2 for wrong flags, an unusable model, or a plan for more than the memory holds.
    """
    args = _parser().parse_args(argv)
    try:
        plan = _plan(args)
    except (CapacityError, ConfigError, ModelError) as error:
        print(f"kvroute plan: error: {error}", file=sys.stderr)
        return _EXIT_REFUSED
    lines = [json.dumps(plan_record(plan))] if args.json else plan_lines(plan)
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


class _Parser(argparse.ArgumentParser):
    """argparse with errors of one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(_EXIT_REFUSED, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvroute plan",
        description="Tell how many sequences a model holds on GPUs, how fast it decodes, what to choose.",
    )
    _add_model_flags(parser.add_argument_group("model"))
    _add_gpu_flags(parser.add_argument_group("GPUs"))
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a page of text")
    return parser


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        required=True,
        metavar="DIR|NAME",
        help=f"a checkpoint directory (its config.json is enough), or one of {', '.join(PRESETS)}",
    )
    group.add_argument(
        "--context",
        type=_positive,
        metavar="N",
        help="tokens of a sequence, prompt and answer (default: 8192)",
    )
    group.add_argument("--batch", type=_positive, metavar="N", help="refuse unless so many sequences fit")
    group.add_argument("--dtype", choices=DTYPES, default="auto", help="type of the weights (default: auto)")
    group.add_argument(
        "--kv-cache-dtype",
        "--kv-dtype",
        choices=KV_CACHE_DTYPES,
        default="auto",
        help="type of the KV cache, if not the weights' (default: auto)",
    )
    group.add_argument(
        "--block-size",
        type=_positive,
        default=16,
        metavar="N",
        help="tokens per KV block (default: %(default)s)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=_positive,
        default=2048,
        metavar="N",
        help="token budget of one step, which bounds what sliding windows keep (default: %(default)s)",
    )


def _add_gpu_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--gpu", choices=(*GPUS, CUSTOM.name), default="h100", help="kind of GPU (default: %(default)s)"
    )
    group.add_argument(
        "--tensor-parallel-size",
        "--tp",
        type=_positive,
        default=1,
        metavar="N",
        help="GPUs that share the model (default: %(default)s)",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=DEFAULT_UTILIZATION,
        metavar="SHARE",
        help="of the memory, for weights, reserve and KV (default: %(default)s)",
    )
    group.add_argument(
        "--reserve-gb",
        type=_rest,
        default=DEFAULT_RESERVE_BYTES / _GB,
        metavar="GB",
        help="of each GPU, for activations and the CUDA context (default: %(default)s)",
    )
    group.add_argument(
        "--efficiency",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="of all peak speeds that is reached (default: %(default)s, the roof)",
    )
    overrides = "; instead of the data sheet's"
    group.add_argument("--hbm-gib", type=_amount, metavar="GIB", help=f"memory{overrides}")
    group.add_argument("--hbm-gb-per-s", type=_amount, metavar="GB", help=f"speed of the memory{overrides}")
    group.add_argument("--tflops", type=_amount, metavar="N", help=f"dense 16-bit arithmetic{overrides}")
    group.add_argument("--link-gb-per-s", type=_amount, metavar="GB", help=f"link to the host{overrides}")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


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
