"""Command `kvroute indexer`: a stand-alone index with a gRPC API, for pods of a file or pods that connect."""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from common.flags import CommandParser, add_flags, file_flag, flag, pair, port
from common.page_server import BoundedExecutor, PageServer, Request, Response
from indexer.config import IndexerConfig, PodStream, index_config
from indexer.errors import ConfigError, IndexerError, ListenError
from indexer.kv_indexer import KvIndexer
from indexer.pod_entry import parse_pods
from indexer.service.grpc_server import IndexerServer, server_credentials
from indexer.streams.subscriber import raise_open_files
from tokenization import PromptTokenizer, TokenizationError

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_GRACE_S = 5.0
_READY_POLL_S = 0.1
_EXIT_FAILED = 1
_EXIT_USAGE = 2

_PODS, _SERVING = "pods and models", "serving"

_log = logging.getLogger(__name__)
_port = partial(flag, _SERVING, kind=port, metavar="PORT")


@dataclass(frozen=True, slots=True)
class _ServiceFlags:
    pods_file: Path | None = file_flag(
        _PODS,
        "--pods-file",
        "YAML: endpoints[] with name, address, port and the labels kvroute.io/model, "
        "kvroute.io/kv-events-port (5557 if missing), kvroute.io/kv-replay-port (no replay if missing), "
        "kvroute.io/kv-events (listens, or connects: to --events-bind), kvroute.io/kv-ranks (1), "
        "kvroute.io/kv-snapshot (true: it answers /kv_events/snapshot), kvroute.io/admin-port (port of "
        "snapshots; the serving port if missing), kvroute.io/kv-first-sequence (0)",
    )
    tokenizer: tuple[tuple[str, str], ...] = flag(
        _PODS,
        "--tokenizer",
        pair(str),
        (),
        "directory of a model's tokenizer, for prompts sent as text; may be repeated",
        action="append",
        metavar="MODEL=DIR",
    )
    host: str = flag(
        _SERVING, "--host", str, "0.0.0.0", "address to listen on (default: %(default)s)", metavar="HOST"
    )
    grpc_port: int = _port("--grpc-port", default=9010, text="0: any free port (default: %(default)s)")
    metrics_port: int = _port(
        "--metrics-port",
        default=9091,
        text="port of the Prometheus page /metrics; 0: any free port (default: %(default)s)",
    )
    tls_cert: Path | None = file_flag(
        _SERVING, "--tls-cert", "PEM chain; reloaded when the file changes (default: no TLS)"
    )
    tls_key: Path | None = file_flag(_SERVING, "--tls-key", "PEM key of --tls-cert")
    tls_client_ca: Path | None = file_flag(
        _SERVING, "--tls-client-ca", "PEM; clients must present a certificate signed by it"
    )
    log_level: str = flag(
        "process",
        "--log-level",
        str,
        "info",
        "default: %(default)s",
        choices=("debug", "info", "warning", "error"),
        metavar=None,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the indexer until SIGTERM or SIGINT.

    Returns:
        0 after a regular stop, 1 if it could not start, 2 for wrong settings.
    """
    args = _parser().parse_args(argv)
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        if args.pods_file is None and args.events_bind is None:
            raise ConfigError("--pods-file or --events-bind: give at least one as the source of events")
        streams = [] if args.pods_file is None else _streams(args.pods_file)
        return _serve(args, index_config(args), streams, _tokenizers(dict(args.tokenizer or ())))
    except IndexerError as error:
        print(f"kvroute indexer: error: {error}", file=sys.stderr)
        return _EXIT_USAGE if isinstance(error, ConfigError) else _EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="kvroute indexer",
        description="Follow the KV cache events of model servers and report, over gRPC "
        "(kvroute.v1.IndexerService), the length of the prompt prefix that each of them has cached.",
    )
    add_flags(parser, _ServiceFlags, IndexerConfig)
    parser.add_argument("--version", action="version", version=f"kvroute {version('kvroute')}")
    return parser


def _tokenizers(directories: Mapping[str, str]) -> Mapping[str, PromptTokenizer]:
    try:
        return {model: PromptTokenizer.from_directory(directory) for model, directory in directories.items()}
    except TokenizationError as error:
        raise ConfigError(f"--tokenizer: {error}") from error


def _streams(path: Path) -> list[PodStream]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--pods-file {path}: cannot be read: {error}") from error
    entries = parse_pods(text, str(path))
    return [stream for entry in entries if (stream := entry.stream()) is not None]


def _serve(
    args: argparse.Namespace,
    config: IndexerConfig,
    streams: Sequence[PodStream],
    tokenizers: Mapping[str, PromptTokenizer],
) -> int:
    if (args.tls_cert is None) != (args.tls_key is None) or (args.tls_client_ca and not args.tls_cert):
        raise ConfigError("--tls-cert, --tls-key: give both for TLS and for --tls-client-ca")
    credentials = args.tls_cert and server_credentials(args.tls_cert, args.tls_key, args.tls_client_ca)
    # Blocked before any thread starts, so that sigwait receives every signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    raise_open_files()
    registry = CollectorRegistry()
    indexer = KvIndexer(config, registry=registry)
    server = IndexerServer(indexer, streams, args.host, args.grpc_port, credentials, tokenizers)
    metrics = _metrics_server(args.host, args.metrics_port, registry)
    server.start()
    metrics.start()
    _log.info("listening: grpc %d, metrics %d", server.port, metrics.port)
    if indexer.bound_endpoint is not None:
        _log.info("pods may connect to %s", indexer.bound_endpoint)
    indexer.start()
    indexer.follow(streams)
    _wait(indexer, server)
    server.close(_GRACE_S)
    metrics.close()
    indexer.close()
    return 0


def _metrics_server(host: str, port: int, registry: CollectorRegistry) -> PageServer:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ListenError(f"--metrics-port {port}: cannot listen: {error.strerror}") from error
    lane = BoundedExecutor("metrics")

    async def answer(request: Request) -> Response:
        if request.path != "/metrics":
            return Response(404, b"no such page; available: /metrics\n")
        page = await lane.run(lambda: generate_latest(registry))
        return Response(200, page, CONTENT_TYPE_LATEST)

    return PageServer(listener, answer)


def _wait(indexer: KvIndexer, server: IndexerServer) -> None:
    while not indexer.ready():
        if signal.sigtimedwait(_STOP_SIGNALS, _READY_POLL_S) is not None:
            return
    server.set_ready()
    _log.info("ready")
    signal.sigwait(_STOP_SIGNALS)
