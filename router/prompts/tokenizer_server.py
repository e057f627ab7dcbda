"""`kvroute tokenizer`: gRPC server on a Unix socket that tokenizes for routers on the same machine."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import stat
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from common.flags import CommandParser, bounded, pair
from router._pb import tokenizer_pb2
from router.errors import ConfigError, ListenError, RequestError
from router.prompts.remote_tokenizers import APIS, SERVICE
from router.prompts.request import PromptMedia, RouteRequest, read_fields
from router.prompts.tokenizer_sources import open_tokenizers
from router.prompts.tokenizers import TokenizeOptions, TokenizerRegistry

_log = logging.getLogger(__name__)

_KINDS = {api: kind for kind, api in APIS.items()}
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_BODY_BYTES_MAX = 64 << 20
# Longer than any caller's deadline; ends work that no caller waits for.
_DEADLINE_S = 60.0
_STOP_S = 2.0


class TokenizerServer:
    """gRPC server of tokenizers on a Unix socket.

    Args:
        path: Path of the socket; a stale socket of a dead process is replaced.
        sources: Source of the tokenizer by base model, see `router.prompts.tokenizers`.
        threads: Concurrent calls; four times as many are queued, further ones rejected.

    Raises:
        ConfigError: A tokenizer cannot be loaded, or its source is another process.
        ListenError: The path is in use, or the socket cannot be created.
    """

    def __init__(self, path: Path, sources: dict[str, str], threads: int) -> None:
        _check_free(path)
        self._models = frozenset(sources)
        self._registry = TokenizerRegistry(open_tokenizers(sources), TokenizeOptions(_DEADLINE_S))
        if self._registry.asks_others:
            self._registry.close()
            raise ConfigError("--model NAME=SOURCE: must be a directory or hf:OWNER/NAME@REVISION")
        self._server = grpc.server(
            ThreadPoolExecutor(threads, "tokenize"),
            options=[
                ("grpc.max_receive_message_length", _BODY_BYTES_MAX),
                ("grpc.max_send_message_length", -1),
            ],
            maximum_concurrent_rpcs=5 * threads,
        )
        self._health = health.HealthServicer()
        tokenize: Any = grpc.unary_unary_rpc_method_handler(
            self.tokenize,
            tokenizer_pb2.TokenizeRequest.FromString,
            tokenizer_pb2.TokenizeResponse.SerializeToString,
        )
        self._server.add_registered_method_handlers(SERVICE, {"Tokenize": tokenize})
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        try:
            self._server.add_insecure_port(f"unix:{path}")
        except RuntimeError as error:
            raise ListenError(f"--socket {path}: cannot listen: {error}") from error

    def start(self) -> None:
        self._server.start()
        for service in ("", SERVICE):
            self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        """Stop the server; calls in progress have two seconds to finish."""
        self._health.enter_graceful_shutdown()
        self._server.stop(grace=_STOP_S).wait()
        self._registry.close()

    def tokenize(
        self, message: tokenizer_pb2.TokenizeRequest, context: grpc.ServicerContext
    ) -> tokenizer_pb2.TokenizeResponse:
        if message.model not in self._models:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no tokenizer for model {message.model!r}")
        if message.api not in _KINDS:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"api: unknown value {message.api}")
        try:
            body = read_fields(_KINDS[message.api], message.body)
        except (ValueError, RecursionError) as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"body: not a JSON object: {error}")
        request = RouteRequest("", _KINDS[message.api], message.model, body, len(message.body))
        try:
            tokens = self._registry.prompt_tokens(request, message.model, message.context_tokens or None)
        except RequestError as error:
            refusal = tokenizer_pb2.Refusal(message=str(error), param=error.param or "")
            return tokenizer_pb2.TokenizeResponse(refusal=refusal)
        if not message.reads_media:
            # Without media, a caller could not distinguish two images, whose token ids are equal.
            tokens = tokens.without_media()
        return tokenizer_pb2.TokenizeResponse(
            prompts=[ids.astype("<u4", copy=False).tobytes() for ids in tokens.prompts],
            total=tokens.total,
            degraded=tokens.degraded or "",
            partial=tokens.partial or "",
            media=[_media(items) for items in tokens.media],
        )


def _media(items: PromptMedia) -> tokenizer_pb2.PromptMedia:
    # MediaItem has the fields of MultimodalItem.
    return tokenizer_pb2.PromptMedia(items=[tokenizer_pb2.MediaItem(**asdict(item)) for item in items])


def main(argv: Sequence[str] | None = None) -> int:
    """Run `kvroute tokenizer` until SIGTERM or SIGINT; return the exit status."""
    flags = command_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Block the signals before any thread starts, so that only sigwait receives them.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        server = TokenizerServer(flags.socket, dict(flags.model), flags.threads)
    except (ConfigError, ListenError) as error:
        print(f"kvroute tokenizer: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    server.start()
    _log.info(
        "tokenizer listening: socket=%s models=%s", flags.socket, ",".join(model for model, _ in flags.model)
    )
    signal.sigwait(_STOP_SIGNALS)
    server.close()
    _log.info("tokenizer stopped")
    return 0


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    parser = CommandParser(
        prog="kvroute tokenizer", description="Tokenizer service for routers on the same machine."
    )
    parser.add_argument("--socket", type=Path, required=True, metavar="PATH", help="Unix socket to listen on")
    parser.add_argument(
        "--model",
        type=pair(str),
        action="append",
        required=True,
        metavar="NAME=SOURCE",
        help="a directory with the model's tokenizer.json, or hf:OWNER/NAME@REVISION; may be repeated",
    )
    parser.add_argument(
        "--threads",
        type=partial(bounded, least=1, most=256),
        default=os.cpu_count() or 1,
        metavar="N",
        help="requests tokenized at once (default: one per processor)",
    )
    return parser


def _check_free(path: Path) -> None:
    """Remove the stale socket of a dead process; raise ListenError if the path is otherwise in use."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise ListenError(f"--socket {path}: no directory {path.parent}") from None
        return
    if not stat.S_ISSOCK(mode):
        raise ListenError(f"--socket {path}: the file exists and is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise ListenError(f"--socket {path}: another process listens on it")
