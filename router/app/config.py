"""Command line of the router: flags in, one validated RouterConfig out, printed with units if asked to.

Each field of RouterConfig declares its flag, default and help text. Flags that the reference picker has too
carry its names. Reads the configuration file; opens nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import yaml

from common.flags import CommandParser, add_flags, file_flag, flag, flag_values, pair, port, positive
from indexer import IndexerConfig
from indexer.config import index_config
from router.app.process import LogFlags
from router.app.tls import TLS, MetricsTlsOptions, TlsFlags, TlsOptions, tls_options
from router.config.fields import read_text
from router.config.flags import (
    add_reference_flags,
    boolean,
    duration,
    milliseconds,
    names,
    objective,
    positive_duration,
    positive_number,
    salt_header,
    size_bytes,
    switch,
)
from router.config.kube import KubeConfig, kube_config
from router.config.picker_file import Compat, PickerConfig, parse_config
from router.doors.boundary import GATEWAY_ONLY_FIELDS
from router.errors import ConfigError
from router.plugins.producer_settings import (
    apply_producer_settings,
    metrics_page_settings,
    tokenizer_sources,
)
from router.pods.pod_set import DEFAULT_METRICS_PAGE, MetricsPage
from router.prompts.tokenizer_sources import model_directories
from tokenization import TINY_DIRECTORY

_TINY_MODEL = "kvroute-tiny"
_PODS, _SERVING, _PICKING = "pods and models", "serving", "picking"
_REFERENCE, _PROCESS = "as the reference picker", "process"

_pods, _serving, _picking = partial(flag, _PODS), partial(flag, _SERVING), partial(flag, _PICKING)

_duration = partial(flag, metavar="DURATION")
_size = partial(flag, metavar="SIZE")

# Units by the suffix of a setting's name; the first match wins.
_UNITS = {
    "_tokens_per_s": "tokens/s",
    "_s": "s",
    "_bytes": "bytes",
    "_bytes_max": "bytes",
    "_bytes_per_pod": "bytes",
    "_tokens": "tokens",
    "_tokens_per_pod": "tokens",
    "_blocks": "blocks",
}
_HIDDEN = "<hidden>"


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Settings of one router process; port 0 binds a free port."""

    pods_file: Path | None = file_flag(
        _PODS,
        "--pods-file",
        "YAML with a list 'endpoints' of pods, each with name, address, port and optional labels, as in "
        "docs/configuration.md; watched for changes",
        metavar="PATH",
    )
    watch_pods_file: bool = True  # whether later changes are applied
    kube: KubeConfig | None = None  # discovery of pods in a cluster; None: by a file
    pool_name: str = "default"  # label of metrics
    resources_file: Path | None = file_flag(
        _PODS,
        "--resources-file",
        "YAML documents of kind InferenceObjective or InferenceModelRewrite",
        metavar="PATH",
    )
    tokenizers: tuple[tuple[str, str], ...] = _pods(
        "--tokenizer",
        pair(str),
        ((_TINY_MODEL, str(TINY_DIRECTORY)),),
        "tokenizer of a model: a directory with tokenizer.json, hf:OWNER/NAME@REVISION, unix:PATH of a "
        "kvroute tokenizer process, http://HOST:PORT of a server with a render API, pods: the model's own "
        "pods, also used by default where they have this API, or none; may be repeated; kvroute-tiny's is "
        "built in",
        action="append",
        metavar="MODEL=SOURCE",
    )
    tokenizers_dir: Path | None = file_flag(
        _PODS,
        "--tokenizers-dir",
        "directory with a tokenizer per model, as DIR/OWNER/NAME/tokenizer.json or as a cache of the Hub; "
        "--tokenizer and the configuration file take precedence",
        metavar="DIR",
    )
    tokenize_deadline_s: float = _pods(
        "--tokenize-deadline-ms",
        milliseconds,
        0.05,
        "time limit of tokenizing a prompt; after it the request is routed by load alone (default: 50)",
        metavar="MILLISECONDS",
    )
    refresh_interval_s: float = _duration(
        _PODS,
        "--refresh-metrics-interval",
        positive_duration,
        1.0,
        "interval between probes of a pod's health and metrics (default: 1s)",
    )
    wake_pods: bool = switch(
        _PODS,
        "--wake-pods",
        False,
        "wake a sleeping pod by POST /wake_up for a request whose candidates all sleep, one per minute",
    )
    host: str = _serving("--host", str, "0.0.0.0", "address to listen on", metavar="HOST")
    grpc_port: int = _serving(
        "--grpc-port", port, 9002, "port of ext_proc, PickEndpoint, access log, health, reflection"
    )
    grpc_health_port: int = _serving("--grpc-health-port", port, 9003, "port of gRPC health alone")
    metrics_port: int = _serving(
        "--metrics-port", port, 9090, "port of /metrics, /healthz, /ready and the pages of /debug/"
    )
    responses_full: bool = False  # whether responses pass through ext_proc too
    max_request_bytes: int = _serving(
        "--max-request-bytes", positive, 8 << 20, "larger bodies are rejected with 413"
    )
    forbidden_fields: tuple[str, ...] = _serving(
        "--forbidden-body-fields",
        names,
        GATEWAY_ONLY_FIELDS,
        "fields that a client's body must not have: ext_proc removes them, ext_authz rejects with 400; "
        "empty: none (default: " + ",".join(GATEWAY_ONLY_FIELDS) + ")",
        metavar="NAME,...",
    )
    salt_from: str | None = _serving(
        "--salt-from",
        salt_header,
        None,
        "separate the caches of tenants: set cache_salt in each request to the HMAC-SHA256 of this header, "
        "instead of the client's own; needs ext_proc with the whole body and --salt-key-file",
        metavar="header:NAME",
    )
    salt_key_file: Path | None = file_flag(
        _SERVING, "--salt-key-file", "file with the key of --salt-from, a secret of 16 bytes or more"
    )
    kv_connector: str = _serving(
        "--kv-connector",
        Literal["auto", "true", "false"],
        "auto",
        "whether engines have a KV connector (vLLM's --kv-transfer-config): a body that cannot be "
        "checked for forbidden fields is then rejected; auto: true if a pod has the label llm-d.ai/role or "
        "a plugin splits prefill and decode",
    )
    max_streams: int = _serving("--max-streams", positive, 256, "concurrent requests on the gRPC port")
    receive_bytes_max: int | None = _size(
        _SERVING,
        "--grpc-max-recv-msg-size",
        size_bytes,
        None,
        "largest gRPC message received, such as 10MiB (default: --max-request-bytes plus 1 MiB)",
    )
    send_bytes_max: int | None = _size(
        _SERVING, "--grpc-max-send-msg-size", size_bytes, None, "largest sent (default: as received)"
    )
    tls: TlsOptions | None = field(default_factory=TlsOptions)  # of the gRPC port; None: plaintext only
    metrics_tls: MetricsTlsOptions | None = None  # TLS of the metrics port; None: plaintext
    metrics_auth: bool = switch(
        TLS,
        "--metrics-endpoint-auth",
        False,
        "authorize readers of the metrics port by bearer token at the API server (the reference picker's "
        "default is true)",
    )
    prefill_tokens_per_s: float = _picking(
        "--prefill-tokens-per-s", positive_number, 15_000.0, "a pod's prefill rate until measured"
    )
    priorities: tuple[tuple[str, int], ...] = _picking(
        "--objective",
        objective,
        (),
        "priority of requests whose x-llm-d-inference-objective is NAME; below 0 they are rejected with "
        "429 while the pods are saturated; may be repeated",
        action="append",
        metavar="NAME=PRIORITY",
    )
    request_lifetime_s: float = _duration(
        _PICKING,
        "--request-lifetime",
        positive_duration,
        600.0,
        "time after which a request without a reported end counts as ended (default: 10m)",
    )
    index: IndexerConfig = field(default_factory=IndexerConfig)
    picker: PickerConfig | None = None  # plugin pipeline; None: the cost policy picks
    compat: str = "off"  # see picker_file.Compat
    emit_endpoint_scores: bool = switch(
        _REFERENCE,
        "--emit-endpoint-scores",
        False,
        "list the scores of all candidates in ext_proc's metadata",
    )
    subset_filter: bool = switch(
        _REFERENCE,
        "--disable-endpoint-subset-filter",
        True,
        "ignore the gateway's endpoint subset hint",
        type=lambda text: not boolean(text),
        const=False,
    )
    load_age_max_s: float | None = _duration(
        _REFERENCE,
        "--metrics-staleness-threshold",
        positive_duration,
        None,
        "older load metrics of a pod are ignored, and the pod counts as saturated (default: three times "
        "--refresh-metrics-interval, at least 5s without flow control)",
    )
    metrics_page: MetricsPage = DEFAULT_METRICS_PAGE  # of pods whose labels name no other
    profiling: bool = switch(
        _REFERENCE,
        "--enable-pprof",
        True,
        "serve /debug/pprof/ on the metrics port; no cost unless used (default: true)",
    )
    stream_metrics: bool = switch(
        _REFERENCE,
        "--enable-grpc-stream-metrics",
        False,
        "export metrics of ext_proc streams: open streams, duration, ends by status code",
    )
    drain_timeout_s: float = _duration(
        _PROCESS,
        "--drain-timeout",
        duration,
        30.0,
        "time that SIGTERM waits for running picks and response streams (default: 30s)",
    )
    sync_timeout_s: float = 10.0
    gpu_hour_price: float | None = _serving(
        "--gpu-hour-price", positive_number, None, "of one pod, in any currency; used by /debug/worth"
    )
    tracing: bool = switch(
        _PROCESS,
        "--tracing",
        False,
        "send OpenTelemetry spans of picks to OTEL_EXPORTER_OTLP_ENDPOINT (needs kvroute[tracing])",
    )


@dataclass(frozen=True, slots=True)
class _Sources:
    """Flags from which `parse_flags` derives settings."""

    config_file: Path | None = file_flag(
        _PODS,
        "--config-file",
        "EndpointPickerConfig: plugins, profiles, flow control, optionally the pods file",
        metavar="PATH",
    )
    config_text: str | None = _pods("--config-text", str, None, "content of a --config-file", metavar="YAML")
    responses: str | None = _serving(
        "--responses",
        Literal["skip", "full"],
        None,
        "skip: an ext_proc stream ends with the request, for an Envoy whose response modes are SKIP and "
        "NONE; full: responses pass through ext_proc too (default: skip; full with a --config-file)",
    )
    compat: str | None = flag(
        _REFERENCE,
        "--compat",
        Compat,
        None,
        "off: the router's own ext_proc responses; answers: the reference picker's (default: answers with "
        "a --config-file, else off)",
    )


def router_parser() -> argparse.ArgumentParser:
    """Return the parser of all flags; those of the reference picker keep its names."""
    parser = CommandParser(
        prog="kvroute router",
        description="Endpoint picker: picks a pod for each request of Envoy (ext_proc) or another gateway "
        "(PickEndpoint).",
    )
    parser.add_argument("--version", action="version", version=f"kvroute {version('kvroute')}")
    add_flags(parser, _Sources, RouterConfig, TlsFlags, TlsOptions, KubeConfig, LogFlags, IndexerConfig)
    add_reference_flags(parser)
    return parser


def parse_flags(argv: Sequence[str] | None) -> tuple[RouterConfig, argparse.Namespace]:
    """Parse the command line; return the configuration and the raw flags, which include those of logging.

    Raises:
        ConfigError, indexer.ConfigError: A flag or the configuration file is invalid.
    """
    flags = router_parser().parse_args(argv)
    picker = _picker(flags)
    pods_file, watch, kube = _discovery(flags, picker)
    tls, metrics_tls = tls_options(flags)
    index = index_config(flags)
    if picker is not None:
        index, kube = apply_producer_settings(picker, index, kube)
    settings = flag_values(RouterConfig, flags) | {
        "pods_file": pods_file,
        "watch_pods_file": watch,
        "kube": kube,
        "pool_name": flags.pool or "default",
        "tokenizers": _tokenizers(flags, picker),
        "responses_full": (flags.responses or ("full" if picker else "skip")) == "full",
        "index": index,
        "picker": picker,
        "compat": _compat(flags, picker),
        "tls": tls,
        "metrics_tls": metrics_tls,
        "metrics_page": metrics_page_settings(picker) if picker is not None else DEFAULT_METRICS_PAGE,
    }
    return RouterConfig(**settings), flags


def _tokenizers(flags: argparse.Namespace, picker: PickerConfig | None) -> tuple[tuple[str, str], ...]:
    """Return tokenizer sources by model; flags take precedence over the configuration file."""
    found = {_TINY_MODEL: str(TINY_DIRECTORY)}
    if flags.tokenizers_dir is not None:
        scanned = model_directories(flags.tokenizers_dir)
        if not scanned:
            raise ConfigError(f"--tokenizers-dir {flags.tokenizers_dir}: has no tokenizer.json below it")
        found |= scanned
    found |= tokenizer_sources(picker) if picker is not None else {}
    return tuple((found | dict(flags.tokenizers or ())).items())


def _compat(flags: argparse.Namespace, picker: PickerConfig | None) -> str:
    compat: str = flags.compat or (picker and (picker.compat or "answers")) or "off"
    if compat == "off" and picker is not None and picker.picks:
        raise ConfigError("--compat off: not possible with plugins that pick; use --compat answers")
    return compat


def _picker(flags: argparse.Namespace) -> PickerConfig | None:
    if flags.config_file is not None and flags.config_text is not None:
        raise ConfigError("--config-file and --config-text exclude each other: give one of them")
    if flags.config_text is not None:
        return parse_config(flags.config_text, "--config-text")
    path: Path | None = flags.config_file
    return parse_config(read_text(path), str(path)) if path is not None else None


def _discovery(
    flags: argparse.Namespace, picker: PickerConfig | None
) -> tuple[Path | None, bool, KubeConfig | None]:
    """Return the one source of pods: a file and whether to watch it, or a cluster."""
    discovery, kube = picker.discovery if picker is not None else None, kube_config(flags)
    if discovery is not None and kube is not None and kube.pool and not kube.more_pools:
        # The reference picker requires --pool-name in every mode; with a file it is a label of metrics.
        kube = None
    if [flags.pods_file, discovery, kube].count(None) != 2:
        raise ConfigError(
            "give exactly one of --pool-name, --endpoint-selector, --pods-file, and a --config-file that "
            "names a file-discovery plugin"
        )
    if kube is not None and kube.pool and flags.resources_file is not None:
        raise ConfigError("--resources-file: not with --pool-name, which reads these objects in the cluster")
    if picker is not None and discovery is not None:
        return picker.directory / discovery.path, discovery.watch_file, None
    return flags.pods_file, True, kube


def config_as_yaml(config: RouterConfig) -> str:
    """Return the effective configuration as YAML, by the names of `RouterConfig`'s fields."""
    return yaml.safe_dump(_printed_settings(config), sort_keys=False, width=100)


def _printed_settings(settings: Any) -> dict[str, Any]:
    shown = {}
    for setting in dataclasses.fields(settings):
        value = getattr(settings, setting.name)
        if not setting.repr and value is not None:
            shown[setting.name] = _HIDDEN
        else:
            units = (unit for ending, unit in _UNITS.items() if setting.name.endswith(ending))
            shown[setting.name] = _printed(value, next(units, ""))
    return shown


def _printed(value: Any, unit: str) -> Any:
    if isinstance(value, PickerConfig):
        # The parsed file, without the defaults of its fields, and all feature gates.
        return {"source": value.section.source, "feature_gates": value.gates, **value.section.value()}
    if dataclasses.is_dataclass(value):
        return _printed_settings(value)
    if isinstance(value, Mapping):
        return {str(key): _printed(item, unit) for key, item in value.items()}
    if isinstance(value, tuple | list | frozenset):
        return [_printed(item, unit) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float) and unit:
        return f"{value:g} {unit}" if isinstance(value, float) else f"{value} {unit}"
    if isinstance(value, Enum):
        return value.name
    return str(value) if isinstance(value, Path) else value
