"""What the router is told: flags in, one checked RouterConfig out.

Flags that the reference picker has too carry its names. Reads the configuration file; opens nothing else.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from router.config_file import discovery_of
from router.duration import seconds
from router.errors import ConfigError
from tokenization import TINY_DIRECTORY

_TINY_MODEL = "kvroute-tiny"


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Settings of one router process; port 0 takes a free port.

    Attributes:
        pods_file: Pods in the reference's file-discovery form.
        watch_pods_file: Whether its later changes are taken over.
        tokenizers: Tokenizer directory by base model.
        responses_full: Whether responses pass through ext_proc too.
        max_streams: Requests inside the gRPC doors at once, each on a thread.
        decisions_kept: Length of the ring behind /debug/decisions.
    """

    pods_file: Path
    watch_pods_file: bool = True
    tokenizers: tuple[tuple[str, Path], ...] = ((_TINY_MODEL, TINY_DIRECTORY),)
    host: str = "0.0.0.0"
    grpc_port: int = 9002
    grpc_health_port: int = 9003
    metrics_port: int = 9090
    responses_full: bool = False
    fallback_endpoints: int = 0
    max_request_bytes: int = 8 << 20
    max_streams: int = 256
    block_tokens: int = 16
    index_blocks: int = 1_000_000
    prefill_tokens_per_s: float = 15_000.0
    refresh_interval_s: float = 1.0
    request_lifetime_s: float = 600.0
    decisions_kept: int = 1000
    drain_timeout_s: float = 30.0
    sync_timeout_s: float = 10.0


def parse_flags(argv: Sequence[str] | None) -> tuple[RouterConfig, argparse.Namespace]:
    """Reads the command line.

    Returns:
        The configuration, and the flags that concern the process rather than the router (verbosity).

    Raises:
        ConfigError: A flag or the configuration file is wrong.
    """
    flags = _parser().parse_args(argv)
    if flags.secure_serving:
        raise ConfigError(
            "--secure-serving: this version serves without TLS only; leave it out or give =false"
        )
    pods_file, watch = _discovery(flags)
    tokenizers = {_TINY_MODEL: TINY_DIRECTORY} | dict(flags.tokenizer)
    config = RouterConfig(
        pods_file=pods_file,
        watch_pods_file=watch,
        tokenizers=tuple(tokenizers.items()),
        host=flags.host,
        grpc_port=flags.grpc_port,
        grpc_health_port=flags.grpc_health_port,
        metrics_port=flags.metrics_port,
        responses_full=flags.responses == "full",
        fallback_endpoints=flags.fallback_endpoints,
        max_request_bytes=flags.max_request_bytes,
        max_streams=flags.max_streams,
        block_tokens=flags.block_tokens,
        index_blocks=flags.index_blocks,
        prefill_tokens_per_s=flags.prefill_tokens_per_s,
        refresh_interval_s=flags.refresh_metrics_interval,
        request_lifetime_s=flags.request_lifetime,
        decisions_kept=flags.decisions_kept,
        drain_timeout_s=flags.drain_timeout,
    )
    return config, flags


def _discovery(flags: argparse.Namespace) -> tuple[Path, bool]:
    if (flags.pods_file is None) == (flags.config_file is None):
        raise ConfigError("give either --pods-file, or a --config-file that names a file-discovery plugin")
    if flags.pods_file is not None:
        return flags.pods_file, True
    discovery = discovery_of(flags.config_file)
    return discovery.path, discovery.watch


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvroute router",
        description="Endpoint picker: Envoy (ext_proc) or any gateway (PickEndpoint) asks which pod to use.",
    )
    parser.add_argument("--version", action="version", version=f"kvroute {version('kvroute')}")
    _add_pods(parser.add_argument_group("pods and models"))
    _add_serving(parser.add_argument_group("serving"))
    _add_picking(parser.add_argument_group("picking"))
    _add_process(parser.add_argument_group("process"))
    return parser


def _add_pods(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--pods-file", type=Path, metavar="PATH", help="YAML list of pods; watched for changes"
    )
    group.add_argument(
        "--config-file",
        type=Path,
        metavar="PATH",
        help="EndpointPickerConfig instead of --pods-file; so far only its file discovery is understood",
    )
    group.add_argument(
        "--tokenizer",
        type=_model_directory,
        action="append",
        default=[],
        metavar="MODEL=DIR",
        help="directory with a model's tokenizer.json; may be repeated; kvroute-tiny's is built in",
    )
    group.add_argument(
        "--refresh-metrics-interval",
        type=_positive_duration,
        default="1s",
        metavar="DURATION",
        help="between two probes of a pod's health and metrics (default: %(default)s)",
    )


def _add_serving(group: argparse._ArgumentGroup) -> None:
    def number(name: str, kind: Callable[[str], int], default: int, text: str) -> None:
        group.add_argument(name, type=kind, default=default, metavar="N", help=f"{text} (default: {default})")

    group.add_argument("--host", default="0.0.0.0", help="address to listen on (default: %(default)s)")
    number("--grpc-port", _port, 9002, "ext_proc, PickEndpoint, access log, health, reflection")
    number("--grpc-health-port", _port, 9003, "gRPC health alone")
    number("--metrics-port", _port, 9090, "/metrics, /healthz, /ready, /debug/decisions, /debug/pods")
    group.add_argument(
        "--secure-serving",
        type=_boolean,
        nargs="?",
        const=True,
        default=False,
        metavar="BOOL",
        help="TLS on the gRPC port; the reference's default is true, this version serves without only",
    )
    group.add_argument(
        "--responses",
        choices=("skip", "full"),
        default="skip",
        help="skip: ext_proc ends with the request, for an Envoy whose response modes are SKIP and NONE; "
        "full: responses pass through it too (default: %(default)s)",
    )
    number(
        "--fallback-endpoints", _count, 0, "further pods in the destination, for gateways that try several"
    )
    number("--max-request-bytes", _positive, 8 << 20, "larger bodies are answered with 413")
    number("--max-streams", _positive, 256, "requests inside the doors at once")


def _add_picking(group: argparse._ArgumentGroup) -> None:
    def number(name: str, kind: Callable[[str], float], default: float, text: str) -> None:
        group.add_argument(
            name, type=kind, default=default, metavar="N", help=f"{text} (default: {default:g})"
        )

    number("--block-tokens", _positive, 16, "tokens of one KV block")
    number("--index-blocks", _positive, 1_000_000, "blocks that the index may hold")
    number("--prefill-tokens-per-s", _positive_number, 15_000.0, "a pod's speed until it is learnt")
    number("--decisions-kept", _positive, 1000, "decisions behind /debug/decisions")
    group.add_argument(
        "--request-lifetime",
        type=_positive_duration,
        default="10m",
        metavar="DURATION",
        help="a request not heard of again is taken for ended after this (default: %(default)s)",
    )


def _add_process(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--drain-timeout",
        type=_duration,
        default="30s",
        metavar="DURATION",
        help="how long SIGTERM waits for the requests inside the doors (default: %(default)s)",
    )
    group.add_argument("-v", type=_count, default=0, metavar="LEVEL", help="1 and above: every detail")


def _port(text: str) -> int:
    return _bounded(text, 0, 65_535)


def _count(text: str) -> int:
    return _bounded(text, 0, 1_000_000_000)


def _positive(text: str) -> int:
    return _bounded(text, 1, 1 << 40)


def _bounded(text: str, least: int, most: int) -> int:
    if not text.isdecimal() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, not {text!r}")
    return int(text)


def _positive_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return number


def _duration(text: str) -> float:
    try:
        return seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive_duration(text: str) -> float:
    if not (value := _duration(text)) > 0.0:
        raise argparse.ArgumentTypeError("must be longer than 0")
    return value


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"must be true or false, not {text!r}")
    return text.lower() == "true"


def _model_directory(text: str) -> tuple[str, Path]:
    model, equals, directory = text.partition("=")
    if not (model and equals and directory):
        raise argparse.ArgumentTypeError(f"must be MODEL=DIR, not {text!r}")
    return model, Path(directory)
