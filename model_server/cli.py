"""The `kvroute model-server` command. Loads torch only after the flags are checked: `--help` is instant."""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn

from common.flags import CommandParser, add_flags, admin_token, flag, flag_values, positive
from model_server.config import (
    API_KEY_VARIABLE,
    EVENTS_GROUP,
    REPLAY_ENDPOINT,
    TINY_MODEL,
    EngineConfig,
    KVEventsConfig,
    ServeOptions,
)
from model_server.errors import ConfigError, ModelServerError

_EXIT_FAILED = 1
_DEMO = "demo-offload"
# Packages of the extra `model-server`. The user has to install them; any other missing module is a bug.
_EXTRA = frozenset(
    {"torch", "numpy", "safetensors", "starlette", "uvicorn", "uvloop", "httptools", "llguidance"}
)

LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class _ProcessFlags:
    log_level: LogLevel = flag("server", "--log-level", LogLevel, "info", "minimum level of log lines")
    no_kv_events: bool = flag(EVENTS_GROUP, "--no-kv-events", bool, False, "publish no events")
    vllm_kv_events: str | None = flag(
        EVENTS_GROUP,
        "--kv-events-config",
        str,
        None,
        "all settings of the events as vLLM's JSON object, instead of the other flags of this group",
        metavar="JSON",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a model server until it is stopped; return the exit status.

    It is 0 after a regular stop, 1 if the server could not start or died, and 2 for wrong flags.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == [_DEMO]:
        return _demo_offload(arguments[1:])
    parser = command_parser()
    args = parser.parse_args(arguments)
    try:
        engine, events = EngineConfig(**flag_values(EngineConfig, args)), _events_config(args)
        token = _admin_token(args)
    except (ConfigError, ValueError) as error:
        parser.error(str(error))
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # uvicorn's warnings are about clients that send no valid HTTP. Any client could fill the log with them.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, _exit_at_once)
    try:
        from model_server.openai import api_server
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        return _fail(f"{error.name} is not installed; install kvroute[model-server]")
    default_name = engine.model if engine.model == TINY_MODEL else Path(engine.model).resolve().name
    args.served_names = args.served_names or (default_name,)
    served = flag_values(ServeOptions, args) | {"admin_token": token}
    options = ServeOptions(engine, events=events, **served)
    try:
        api_server.run(options)
    except ConfigError as error:
        parser.error(str(error))
    except ModelServerError as error:
        return _fail(str(error))
    return 0


def _demo_offload(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        prog=f"kvroute model-server {_DEMO}",
        description="Measure one prompt three times: uncached, cached on the device, and cached on the host.",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=positive,
        default=2048,
        metavar="N",
        help="length of the prompt (default: %(default)s)",
    )
    sizes = {"gpu_blocks": "those of the prompt", "cpu_blocks": "four times --num-gpu-blocks"}
    add_flags(parser, EngineConfig, computed=sizes)
    args = parser.parse_args(arguments)
    try:
        from model_server.engine.demo_offload import demonstrate

        if args.gpu_blocks is None:  # Any other prompt evicts this one.
            args.gpu_blocks = -(-(args.prompt_tokens + 1) // max(1, args.block_tokens))
        if args.cpu_blocks is None:  # Enough for this prompt and the others.
            args.cpu_blocks = 4 * args.gpu_blocks if args.cpu_gib is None else 0
        for line in demonstrate(EngineConfig(**flag_values(EngineConfig, args)), args.prompt_tokens):
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
    # Handles signals until the server does: torch may swallow an exception that is raised while it is
    # imported, and there is nothing to clean up yet.
    os._exit(0)


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    parser = CommandParser(
        prog="kvroute model-server",
        description="Serve one model over an OpenAI-compatible API and publish the events of its KV cache.",
    )
    parser.add_argument("--version", action="version", version=f"kvroute {version('kvroute')}")
    add_flags(parser, ServeOptions, _ProcessFlags, EngineConfig, KVEventsConfig)
    parser.set_defaults(api_key=os.environ.get(API_KEY_VARIABLE) or None, replay_endpoint=REPLAY_ENDPOINT)
    return parser


def _events_config(args: argparse.Namespace) -> KVEventsConfig | None:
    flags = KVEventsConfig(
        **{**flag_values(KVEventsConfig, args), "replay_endpoint": args.replay_endpoint or None}
    )
    if args.vllm_kv_events is None:
        return None if args.no_kv_events else flags
    if args.no_kv_events or flags != KVEventsConfig(replay_endpoint=REPLAY_ENDPOINT):
        raise ConfigError("--kv-events-config: replaces the other flags of KV events; remove them")
    return KVEventsConfig.of_vllm(args.vllm_kv_events)


def _admin_token(args: argparse.Namespace) -> str | None:
    """Return the bearer token of the administration port, if there is one."""
    if args.admin_port and args.admin_port == args.port:
        raise ConfigError(f"--admin-port {args.admin_port}: is the serving port; choose another one")
    if args.admin_token is not None and args.admin_port is None:
        raise ConfigError("--admin-token-file: needs --admin-port")
    return admin_token(args.admin_token)
