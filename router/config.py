"""What the router is told: flags in, one checked RouterConfig out.

Flags that the reference picker has too carry its names. Reads the configuration file; opens nothing else.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from indexer import ConfigError as IndexerConfigError
from indexer import IndexerConfig
from indexer.flags import add_index_flags, index_config
from router.config_file import COMPAT, PickerConfig, parse_config, read_config
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
        tokenizers: Where each base model's tokenizer comes from, see tokenizer_sources.
        tokenize_deadline_s: How long a pick waits for its tokens.
        responses_full: Whether responses pass through ext_proc too.
        max_streams: Requests inside the gRPC doors at once, each on a thread.
        priorities: Priority by objective; below 0 requests are shed while the pods are saturated.
        session_header: Header that carries a session's id; "" for none.
        session_cookie: Cookie that does; "" for none.
        session_stay_s: How much later an answer may come so that a session stays at its pod.
        index: What the index is made of, and where events come from.
        explain_header: Whether responses say in a header why their pod was picked.
        tracing: Whether spans are sent to where the OTEL_* variables say.
        decisions_kept: Length of the ring behind /debug/decisions.
        picker: The EndpointPickerConfig; None: the cost policy picks.
        compat: See config_file.COMPAT.
        emit_endpoint_scores: Whether ext_proc's metadata tells the scores of all candidates.
        resources_file: InferenceObjectives and InferenceModelRewrites; None for none.
    """

    pods_file: Path
    watch_pods_file: bool = True
    tokenizers: tuple[tuple[str, str], ...] = ((_TINY_MODEL, str(TINY_DIRECTORY)),)
    tokenize_deadline_s: float = 0.05
    host: str = "0.0.0.0"
    grpc_port: int = 9002
    grpc_health_port: int = 9003
    metrics_port: int = 9090
    responses_full: bool = False
    fallback_endpoints: int = 0
    max_request_bytes: int = 8 << 20
    max_streams: int = 256
    index: IndexerConfig = field(default_factory=IndexerConfig)
    prefill_tokens_per_s: float = 15_000.0
    refresh_interval_s: float = 1.0
    priorities: tuple[tuple[str, int], ...] = ()
    session_header: str = ""
    session_cookie: str = ""
    session_stay_s: float = 1.0
    explain_header: bool = False
    tracing: bool = False
    request_lifetime_s: float = 600.0
    decisions_kept: int = 1000
    drain_timeout_s: float = 30.0
    sync_timeout_s: float = 10.0
    picker: PickerConfig | None = None
    compat: str = "off"
    emit_endpoint_scores: bool = False
    subset_filter: bool = True
    resources_file: Path | None = None


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
    picker = _picker(flags)
    pods_file, watch = _discovery(flags, picker)
    compat = flags.compat or (picker and (picker.compat or "answers")) or "off"
    if compat == "off" and picker is not None and picker.picks:
        raise ConfigError(
            "--compat off: our own answers do not carry what plugins set; choose answers or strict"
        )
    tokenizers = {_TINY_MODEL: str(TINY_DIRECTORY)} | dict(flags.tokenizer)
    config = RouterConfig(
        pods_file=pods_file,
        watch_pods_file=watch,
        tokenizers=tuple(tokenizers.items()),
        tokenize_deadline_s=flags.tokenize_deadline_ms / 1000,
        host=flags.host,
        grpc_port=flags.grpc_port,
        grpc_health_port=flags.grpc_health_port,
        metrics_port=flags.metrics_port,
        responses_full=(flags.responses or ("full" if picker else "skip")) == "full",
        fallback_endpoints=flags.fallback_endpoints,
        max_request_bytes=flags.max_request_bytes,
        max_streams=flags.max_streams,
        index=_index(flags),
        prefill_tokens_per_s=flags.prefill_tokens_per_s,
        refresh_interval_s=flags.refresh_metrics_interval,
        priorities=tuple(flags.objective),
        session_header=flags.session_header.lower(),
        session_cookie=flags.session_cookie,
        session_stay_s=flags.session_stay,
        explain_header=flags.explain_header,
        tracing=flags.tracing,
        request_lifetime_s=flags.request_lifetime,
        decisions_kept=flags.decisions_kept,
        drain_timeout_s=flags.drain_timeout,
        picker=picker,
        compat=compat,
        emit_endpoint_scores=flags.emit_endpoint_scores,
        subset_filter=not flags.disable_endpoint_subset_filter,
        resources_file=flags.resources_file,
    )
    return config, flags


def _index(flags: argparse.Namespace) -> IndexerConfig:
    try:
        return index_config(flags)
    except IndexerConfigError as error:
        raise ConfigError(str(error)) from error


def _picker(flags: argparse.Namespace) -> PickerConfig | None:
    if flags.config_file is not None and flags.config_text is not None:
        raise ConfigError("give either --config-file or --config-text")
    if flags.config_text is not None:
        return parse_config(flags.config_text, "--config-text", Path())
    return read_config(flags.config_file) if flags.config_file is not None else None


def _discovery(flags: argparse.Namespace, picker: PickerConfig | None) -> tuple[Path, bool]:
    discovery = picker.discovery if picker is not None else None
    if (flags.pods_file is None) == (discovery is None):
        raise ConfigError("give either --pods-file, or a --config-file that names a file-discovery plugin")
    if discovery is None:
        return flags.pods_file, True
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
    _add_compat(parser.add_argument_group("as the reference picker"))
    add_index_flags(parser.add_argument_group("index"))
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
        help="EndpointPickerConfig: plugins, profiles, flow control, maybe the pods' file",
    )
    group.add_argument("--config-text", metavar="YAML", help="the same, as text")
    group.add_argument(
        "--resources-file",
        type=Path,
        metavar="PATH",
        help="YAML documents of the kinds InferenceObjective and InferenceModelRewrite",
    )
    group.add_argument(
        "--tokenizer",
        type=_model_source,
        action="append",
        default=[],
        metavar="MODEL=SOURCE",
        help="a model's tokenizer: a directory with its tokenizer.json, hf:OWNER/NAME@REVISION, unix:PATH of "
        "a kvroute tokenizer, http://HOST:PORT of a server that renders, or pods: the model's own; may be "
        "repeated; kvroute-tiny's is built in",
    )
    group.add_argument(
        "--tokenize-deadline-ms",
        type=_positive_number,
        default=50.0,
        metavar="N",
        help="a prompt not tokenized by then is picked by load alone (default: %(default)g)",
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
        help="skip: ext_proc ends with the request, for an Envoy whose response modes are SKIP and NONE; "
        "full: responses pass through it too (default: skip; full with a --config-file)",
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

    number("--prefill-tokens-per-s", _positive_number, 15_000.0, "a pod's speed until it is learnt")
    group.add_argument(
        "--objective",
        type=_objective,
        action="append",
        default=[],
        metavar="NAME=PRIORITY",
        help="priority of the requests whose x-llm-d-inference-objective is NAME; below 0 they are answered "
        "with 429 while the pods are saturated; may be repeated",
    )
    group.add_argument(
        "--session-header", default="", metavar="NAME", help="header that carries a session's id"
    )
    group.add_argument("--session-cookie", default="", metavar="NAME", help="cookie that carries it")
    group.add_argument(
        "--session-stay",
        type=_duration,
        default="1s",
        metavar="DURATION",
        help="how much later an answer may come so that a session stays at its pod (default: %(default)s)",
    )
    group.add_argument(
        "--explain-header",
        type=_boolean,
        nargs="?",
        const=True,
        default=False,
        metavar="BOOL",
        help="responses say in x-kvroute-explain why their pod was picked (not with ext_proc and "
        "--responses skip)",
    )
    number("--decisions-kept", _positive, 1000, "decisions behind /debug/decisions")
    group.add_argument(
        "--request-lifetime",
        type=_positive_duration,
        default="10m",
        metavar="DURATION",
        help="a request not heard of again is taken for ended after this (default: %(default)s)",
    )


def _add_compat(group: argparse._ArgumentGroup) -> None:
    def switch(name: str, text: str) -> None:
        group.add_argument(
            name, type=_boolean, nargs="?", const=True, default=False, metavar="BOOL", help=text
        )

    group.add_argument(
        "--compat",
        choices=COMPAT,
        help="off: our own answers; answers: ext_proc answers in the reference's form; strict: also "
        "where it is known to be wrong (default: answers with a --config-file, else off)",
    )
    switch("--emit-endpoint-scores", "ext_proc's metadata tells the scores of all candidates")
    switch("--disable-endpoint-subset-filter", "the gateway's subset hint is not looked at")
    switch("--allow-experimental-plugins", "taken and not needed: no plugin here is held back")


def _add_process(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--drain-timeout",
        type=_duration,
        default="30s",
        metavar="DURATION",
        help="how long SIGTERM waits for the requests inside the doors (default: %(default)s)",
    )
    group.add_argument(
        "--tracing",
        type=_boolean,
        nargs="?",
        const=True,
        default=False,
        metavar="BOOL",
        help="send OpenTelemetry spans of the picks to OTEL_EXPORTER_OTLP_ENDPOINT (needs kvroute[tracing])",
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


def _objective(text: str) -> tuple[str, int]:
    name, equals, priority = text.rpartition("=")
    digits = priority.removeprefix("-")
    if not (name and equals and digits.isdecimal() and len(digits) < 10):
        raise argparse.ArgumentTypeError(f"must be NAME=PRIORITY with a whole number, not {text!r}")
    return name, int(priority)


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"must be true or false, not {text!r}")
    return text.lower() == "true"


def _model_source(text: str) -> tuple[str, str]:
    model, equals, source = text.partition("=")
    if not (model and equals and source):
        raise argparse.ArgumentTypeError(f"must be MODEL=SOURCE, not {text!r}")
    return model, source
