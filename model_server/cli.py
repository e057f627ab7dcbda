"""The command line of the model server: flags in (vLLM's names where it has them), exit code out.

Loads nothing heavy before the flags are known to be right, so that ``--help`` answers at once.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from model_server.config import (
    DTYPES,
    KV_CACHE_DTYPES,
    PREEMPTION_MODES,
    SCHEDULING_POLICIES,
    TINY_MODEL,
    EngineConfig,
)
from model_server.errors import ConfigError, ModelServerError
from model_server.server_flags import add_server_flags, admin_token, positive

if TYPE_CHECKING:
    from model_server.publish import KVEventsConfig

_EXIT_FAILED = 1
_EXIT_USAGE = 2
_DEMO = "demo-offload"
# Packages of the extra `model-server`, whose absence is the user's to mend rather than a bug.
_EXTRA = frozenset(
    {"torch", "numpy", "safetensors", "starlette", "uvicorn", "uvloop", "httptools", "llguidance"}
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a model server until it is stopped.

    Args:
        argv: The arguments after the command's name; None takes the process's own.

    Returns:
        0 after a regular stop, 1 if it could not start, 2 for wrong flags.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == [_DEMO]:
        return _demo_offload(arguments[1:])
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        engine, events = _engine_config(args), _events_config(args)
        token = admin_token(args)
    except ConfigError as error:
        parser.error(str(error))
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # Its warnings are about clients that do not speak HTTP: any stranger could fill the log with them.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, _exit_at_once)
    try:
        from model_server import serve
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        return _fail(f"{error.name} is not installed; install kvroute[model-server]")
    options = serve.ServeOptions(
        engine=engine,
        host=args.host,
        port=args.port,
        served_names=tuple(args.served_model_name or [_default_name(engine.model)]),
        events=events,
        max_body_bytes=args.max_body_bytes,
        api_key=args.api_key,
        admin_port=args.admin_port,
        admin_token=token,
        runtime_loras=args.allow_runtime_lora_updating,
    )
    try:
        serve.run(options)
    except ConfigError as error:
        parser.error(str(error))
    except ModelServerError as error:
        return _fail(str(error))
    return 0


def _demo_offload(arguments: Sequence[str]) -> int:
    parser = _Parser(
        prog=f"kvroute model-server {_DEMO}",
        description="Show what the host tier saves: one prompt cold, from the device, and from the host.",
    )
    parser.add_argument(
        "--prompt-tokens", type=positive, default=2048, metavar="N", help="its length (default: %(default)s)"
    )
    _add_engine_flags(parser.add_argument_group("engine"), fit_prompt=True)
    args = parser.parse_args(arguments)
    try:
        from model_server.demo_offload import demonstrate, fitting

        host = 0 if args.cpu_blocks is None and args.cpu_gib is not None else args.cpu_blocks
        sizes = fitting(args.prompt_tokens, max(1, args.block_size), args.num_gpu_blocks, host)
        args.num_gpu_blocks, args.cpu_blocks = sizes
        for line in demonstrate(_engine_config(args), args.prompt_tokens):
            print(line)
    except ConfigError as error:
        parser.error(str(error))
    except ModelServerError as error:
        return _fail(str(error))
    return 0


def _fail(message: str) -> int:
    print(f"kvroute model-server: error: {message}", file=sys.stderr)
    return _EXIT_FAILED


def _exit_at_once(_: int, __: FrameType | None) -> NoReturn:
    # Until the server handles signals itself: an exception raised in the middle of importing torch
    # may be swallowed there, and nothing has been made yet that would have to be cleaned up.
    os._exit(0)


class _Parser(argparse.ArgumentParser):
    """argparse with errors of one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(_EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvroute model-server",
        description="Serve one model over an OpenAI-compatible API and publish what its KV cache holds.",
    )
    parser.add_argument("--version", action="version", version=f"kvroute {version('kvroute')}")
    add_server_flags(parser.add_argument_group("server"))
    _add_engine_flags(parser.add_argument_group("engine"))
    _add_event_flags(parser.add_argument_group("KV cache events (ZMQ, as vLLM's)"))
    return parser


def _add_engine_flags(group: argparse._ArgumentGroup, *, fit_prompt: bool = False) -> None:
    defaults = EngineConfig()
    _add_model_flags(group, defaults)
    _add_pool_flags(group, defaults, fit_prompt)
    _add_scheduling_flags(group, defaults)
    _number(group, "--torch-threads", None, "threads of one CPU operation (default: torch's choice)")
    _number(group, "--seed", defaults.seed, "seeds requests that bring no seed")


def _add_model_flags(group: argparse._ArgumentGroup, defaults: EngineConfig) -> None:
    group.add_argument(
        "--model",
        default=TINY_MODEL,
        help="a Hugging Face checkpoint directory, or the built-in tiny model (default: %(default)s)",
    )
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        default=defaults.dtype,
        help="type of weights and KV cache (default: %(default)s, the checkpoint's own)",
    )
    group.add_argument(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        default=defaults.kv_cache_dtype,
        help="type of the KV cache, if not --dtype: fp8 takes half the bytes of a 16-bit type "
        "(default: %(default)s)",
    )
    group.add_argument("--device", default=defaults.device, help="torch device (default: %(default)s)")
    _number(
        group,
        "--tensor-parallel-size",
        defaults.tensor_parallel_size,
        "processes that compute the model together, on CUDA each on a GPU of its own",
        "-tp",
    )
    _number(group, "--max-loras", defaults.max_loras, "most LoRA adapters loaded at once")


def _add_pool_flags(group: argparse._ArgumentGroup, defaults: EngineConfig, fit_prompt: bool) -> None:
    _number(group, "--block-size", defaults.block_tokens, "tokens per KV block")
    _number(
        group,
        "--num-gpu-blocks",
        None if fit_prompt else defaults.gpu_blocks,
        "KV blocks in the pool" + (" (default: just the prompt's)" if fit_prompt else ""),
        "--gpu-blocks",
        "--num-gpu-blocks-override",
    )
    _number(
        group,
        "--cpu-blocks",
        None if fit_prompt else defaults.cpu_blocks,
        "KV blocks in the host tier" + (" (default: four times the pool's)" if fit_prompt else ""),
    )
    group.add_argument("--cpu-gib", type=float, metavar="GIB", help="the same as GiB of host memory")
    _number(
        group, "--max-model-len", None, "most tokens of prompt and answer together (default: the model's own)"
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=defaults.enable_prefix_caching,
        help="reuse blocks between requests (default: they are)",
    )


def _add_scheduling_flags(group: argparse._ArgumentGroup, defaults: EngineConfig) -> None:
    _number(group, "--max-num-seqs", defaults.max_num_seqs, "most requests running at once")
    _number(group, "--max-num-batched-tokens", defaults.max_num_batched_tokens, "token budget of one step")
    _number(
        group, "--max-num-queued-reqs", defaults.max_waiting, "most requests waiting; one more is refused"
    )
    group.add_argument(
        "--scheduling-policy",
        choices=SCHEDULING_POLICIES,
        default=defaults.scheduling_policy,
        help="order of prefills: by arrival, by the request's priority, or by arrival plus ten times the "
        "prefill's own seconds (default: %(default)s)",
    )
    group.add_argument(
        "--preemption-mode",
        choices=PREEMPTION_MODES,
        default=defaults.preemption_mode,
        help="what a preempted request does to go on: compute its KV again, or fetch it from the host tier "
        "(default: %(default)s)",
    )


def _number(group: argparse._ArgumentGroup, name: str, default: int | None, text: str, *aliases: str) -> None:
    shown = text if default is None else f"{text} (default: {default})"
    group.add_argument(name, *aliases, type=int, default=default, metavar="N", help=shown)


def _add_event_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--no-kv-events", action="store_true", help="publish no events")
    group.add_argument(
        "--kv-events-endpoint",
        default="tcp://*:5557",
        metavar="ENDPOINT",
        help="PUB socket: bound if it holds * or ::, or is ipc or inproc; otherwise connected "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--kv-events-bind",
        action="store_true",
        help="bind --kv-events-endpoint whatever it is, a loopback address too",
    )
    group.add_argument(
        "--kv-replay-endpoint",
        default="tcp://*:5558",
        metavar="ENDPOINT",
        help="ROUTER socket for replays, always bound; empty turns replay off (default: %(default)s)",
    )
    group.add_argument(
        "--kv-events-topic", default="", metavar="TOPIC", help="first frame (default: kv@HOST:PORT@MODEL)"
    )


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        model=args.model,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        device=args.device,
        tensor_parallel_size=args.tensor_parallel_size,
        block_tokens=args.block_size,
        gpu_blocks=args.num_gpu_blocks,
        cpu_blocks=args.cpu_blocks,
        cpu_gib=args.cpu_gib,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_waiting=args.max_num_queued_reqs,
        scheduling_policy=args.scheduling_policy,
        preemption_mode=args.preemption_mode,
        enable_prefix_caching=args.enable_prefix_caching,
        max_loras=args.max_loras,
        torch_threads=args.torch_threads,
        seed=args.seed,
    )


def _events_config(args: argparse.Namespace) -> "KVEventsConfig | None":
    if args.no_kv_events:
        return None
    from model_server.publish import KVEventsConfig

    return KVEventsConfig(
        endpoint=args.kv_events_endpoint,
        replay_endpoint=args.kv_replay_endpoint or None,
        topic=args.kv_events_topic,
        always_bind=args.kv_events_bind,
    )


def _default_name(model: str) -> str:
    return model if model == TINY_MODEL else Path(model).resolve().name
