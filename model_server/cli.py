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
from typing import NoReturn

from model_server.config import TINY_MODEL, EngineConfig, KVEventsConfig, ServeOptions
from model_server.errors import ConfigError, ModelServerError
from model_server.flags import OneLineParser, add_flags, given, positive

_API_KEY_VARIABLE = "KVROUTE_API_KEY"
_REPLAY_ENDPOINT = "tcp://*:5558"
_EXIT_FAILED = 1
_DEMO = "demo-offload"
# Packages of the extra `model-server`, whose absence is the user's to mend rather than a bug.
_EXTRA = frozenset(
    {"torch", "numpy", "safetensors", "starlette", "uvicorn", "uvloop", "httptools", "llguidance"}
)
ADMIN_TOKEN_VARIABLE = "KVROUTE_ADMIN_TOKEN"
_ADMIN_TOKEN_CHARS_MAX = 4096


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
    parser = command_parser()
    args = parser.parse_args(arguments)
    try:
        engine, events = EngineConfig(**given(args, EngineConfig)), _events_config(args)
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
    fields = given(args, ServeOptions)
    default_name = engine.model if engine.model == TINY_MODEL else Path(engine.model).resolve().name
    fields["served_names"] = tuple(args.served_names or [default_name])
    options = ServeOptions(engine, events=events, admin_token=token, **fields)
    try:
        serve.run(options)
    except ConfigError as error:
        parser.error(str(error))
    except ModelServerError as error:
        return _fail(str(error))
    return 0


def _demo_offload(arguments: Sequence[str]) -> int:
    parser = OneLineParser(
        prog=f"kvroute model-server {_DEMO}",
        description="Show what the host tier saves: one prompt cold, from the device, and from the host.",
    )
    parser.add_argument(
        "--prompt-tokens", type=positive, default=2048, metavar="N", help="its length (default: %(default)s)"
    )
    fitted = {"gpu_blocks": (None, "just the prompt's"), "cpu_blocks": (None, "four times the pool's")}
    add_flags(parser.add_argument_group("engine"), EngineConfig, fitted)
    args = parser.parse_args(arguments)
    try:
        from model_server.engine.demo_offload import demonstrate

        if args.gpu_blocks is None:  # one other prompt pushes this one out
            args.gpu_blocks = -(-(args.prompt_tokens + 1) // max(1, args.block_tokens))
        if args.cpu_blocks is None:  # room for the prompt beside the others
            args.cpu_blocks = 4 * args.gpu_blocks if args.cpu_gib is None else 0
        for line in demonstrate(EngineConfig(**given(args, EngineConfig)), args.prompt_tokens):
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


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    parser = OneLineParser(
        prog="kvroute model-server",
        description="Serve one model over an OpenAI-compatible API and publish what its KV cache holds.",
    )
    parser.add_argument("--version", action="version", version=f"kvroute {version('kvroute')}")
    server = parser.add_argument_group("server")
    api_key = os.environ.get(_API_KEY_VARIABLE) or None
    add_flags(
        server,
        ServeOptions,
        {"api_key": (api_key, f"${_API_KEY_VARIABLE}, which other users cannot read")},
    )
    server.add_argument(
        "--admin-token-file",
        type=Path,
        metavar="FILE",
        help="file with the secret that requests to --admin-port must carry as Authorization: Bearer SECRET "
        f"(default: ${ADMIN_TOKEN_VARIABLE}; without either everybody is let in who reaches the port)",
    )
    server.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="how much to log (default: %(default)s)",
    )
    add_flags(parser.add_argument_group("engine"), EngineConfig)
    events = parser.add_argument_group("KV cache events (ZMQ, as vLLM's)")
    events.add_argument("--no-kv-events", action="store_true", help="publish no events")
    add_flags(events, KVEventsConfig, {"replay_endpoint": (_REPLAY_ENDPOINT, _REPLAY_ENDPOINT)})
    return parser


def _events_config(args: argparse.Namespace) -> KVEventsConfig | None:
    if args.no_kv_events:
        return None
    fields = given(args, KVEventsConfig)
    return KVEventsConfig(**{**fields, "replay_endpoint": args.replay_endpoint or None})


def admin_token(args: argparse.Namespace) -> str | None:
    """Return the administration port's secret, if there is one; a ConfigError where it cannot be used."""
    if args.admin_port and args.admin_port == args.port:
        raise ConfigError(f"--admin-port {args.admin_port}: is the serving port; choose another one")
    path: Path | None = args.admin_token_file
    if path is not None and args.admin_port is None:
        raise ConfigError("--admin-token-file: needs --admin-port")
    source = f"${ADMIN_TOKEN_VARIABLE}" if path is None else f"--admin-token-file {path}"
    try:
        text = os.environ.get(ADMIN_TOKEN_VARIABLE, "") if path is None else path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: cannot be read: {error}") from error
    token = text.strip()
    if not token and path is None:
        return None
    if not (token.isascii() and token.isprintable() and 0 < len(token) <= _ADMIN_TOKEN_CHARS_MAX):
        raise ConfigError(
            f"{source}: must hold one line of 1 to {_ADMIN_TOKEN_CHARS_MAX} printable ASCII characters"
        )
    return token
