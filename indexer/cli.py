"""`kvroute indexer`: the index on its own, fed by the pods of a static file and asked over gRPC."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server

from indexer.config import IndexerConfig, PodStream
from indexer.errors import ConfigError, IndexerError, ListenError
from indexer.kv_indexer import KvIndexer
from indexer.pods_file import parse_pods
from indexer.service import IndexerDoor, IndexerServer

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_GRACE_S = 5.0
_EXIT_FAILED = 1
_EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the indexer until SIGTERM or SIGINT.

    Args:
        argv: The arguments after the command's name; None takes the process's own.

    Returns:
        0 after a regular stop, 1 if it could not start, 2 for wrong settings.
    """
    args = _parser().parse_args(argv)
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        config = IndexerConfig(
            block_tokens=args.block_tokens, capacity_blocks=args.capacity_blocks, hash_seed=args.hash_seed
        )
        return _serve(args, config, _streams(args.pods_file))
    except IndexerError as error:
        print(f"kvroute indexer: {error}", file=sys.stderr)
        return _EXIT_USAGE if isinstance(error, ConfigError) else _EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvroute indexer",
        description="Follows the KV cache events of model servers and tells, over gRPC "
        "(kvroute.v1.IndexerService), how much of a prompt each of them holds.",
    )
    parser.add_argument(
        "--pods-file",
        type=Path,
        required=True,
        metavar="FILE",
        help="YAML: endpoints[] with name, address, port and the labels kvroute.io/model, "
        "kvroute.io/kv-events-port (5557 if missing), kvroute.io/kv-replay-port (no replay if missing)",
    )
    shown = "default: %(default)s"
    parser.add_argument("--host", default="0.0.0.0", help=f"address to listen on ({shown})")
    parser.add_argument(
        "--grpc-port", type=_port, default=9010, metavar="PORT", help=f"0: any free port ({shown})"
    )
    parser.add_argument(
        "--metrics-port",
        type=_port,
        default=9091,
        metavar="PORT",
        help=f"of the Prometheus page /metrics; 0: any free port ({shown})",
    )
    parser.add_argument(
        "--block-tokens", type=int, default=16, metavar="N", help=f"tokens of a block of the index ({shown})"
    )
    parser.add_argument(
        "--capacity-blocks",
        type=int,
        default=1_000_000,
        metavar="N",
        help=f"most unique blocks in the index ({shown})",
    )
    parser.add_argument(
        "--hash-seed", type=int, metavar="N", help="seed of the block keys (default: random at each start)"
    )
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help=shown
    )
    parser.add_argument("--version", action="version", version=f"kvroute {version('kvroute')}")
    return parser


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port < 65_536:
        raise ValueError
    return port


def _streams(path: Path) -> list[PodStream]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--pods-file {path}: cannot be read: {error}") from error
    entries = parse_pods(text, str(path))
    return [stream for entry in entries if (stream := entry.stream()) is not None]


def _serve(args: argparse.Namespace, config: IndexerConfig, streams: Sequence[PodStream]) -> int:
    # Blocked before any thread begins, so that the signals wait for sigwait, which misses none.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    registry = CollectorRegistry()
    indexer = KvIndexer(config, registry=registry)
    server = IndexerServer(IndexerDoor(indexer, streams), args.host, args.grpc_port)
    try:
        metrics, _ = start_http_server(args.metrics_port, args.host, registry)
    except OSError as error:
        raise ListenError(f"--metrics-port {args.metrics_port}: cannot listen: {error.strerror}") from error
    server.start()
    logging.getLogger(__name__).info("listening: grpc %d, metrics %d", server.port, metrics.server_port)
    indexer.start()
    indexer.follow(streams)
    signal.sigwait(_STOP_SIGNALS)
    server.close(_GRACE_S)
    metrics.shutdown()
    metrics.server_close()
    indexer.close()
    return 0
