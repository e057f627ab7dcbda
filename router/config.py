"""What the router is told: flags in, one checked RouterConfig out.

Flags that the reference picker has too carry its names. Reads the configuration file; opens nothing else.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from indexer import ConfigError as IndexerConfigError
from indexer import IndexerConfig
from indexer.flags import index_config
from router.config_file import PickerConfig, parse_config, read_config
from router.errors import ConfigError
from router.flags import router_parser
from router.flags.kube import kube_config
from router.gateway_only import GATEWAY_ONLY_FIELDS
from router.kube.config import KubeConfig
from router.metrics_page import DEFAULT_PATH
from router.producer_settings import metrics_path_of, tokenizers_of, with_producers
from router.tls_options import MetricsTlsOptions, TlsOptions, metrics_tls_options, tls_options
from tokenization import TINY_DIRECTORY
from tokenization.tokenizer import CONVERSATIONS_BYTES

_TINY_MODEL = "kvroute-tiny"


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Settings of one router process; port 0 takes a free port.

    Attributes:
        pods_file: Pods in the reference's file-discovery form; None where `kube` says where they are.
        watch_pods_file: Whether its later changes are taken over.
        kube: Where in Kubernetes the pods are; None where there is a file.
        pool_name: Name of the pool in metrics.
        tokenizers: Where each base model's tokenizer comes from, see tokenizer_sources.
        tokenize_deadline_s: How long a pick waits for its tokens.
        conversations_bytes: Most memory of each chat template for what is known of its conversations.
        check_port: Of ext_authz in its HTTP form; None: there is none.
        grpc_transport: "native" or "grpcio": who serves plaintext gRPC.
        responses_full: Whether responses pass through ext_proc too.
        forbidden_fields: Body fields that clients must not send, see body_guard.
        kv_connector: Whether engines have a KV connector: "auto" (see kv_connector), "true" or "false".
        max_streams: Requests inside the gRPC doors at once, each on a thread.
        priorities: Priority by objective; below 0 requests are shed while the pods are saturated.
        session_header: Header that carries a session's id; "" for none.
        session_cookie: Cookie that does; "" for none.
        session_stay_s: How much later an answer may come so that a session stays at its pod.
        index: What the index is made of, and where events come from.
        tracing: Whether spans are sent to where the OTEL_* variables say.
        decisions_kept: Length of the ring behind /debug/decisions.
        picker: The EndpointPickerConfig; None: the cost policy picks.
        compat: See config_file.COMPAT.
        emit_endpoint_scores: Whether ext_proc's metadata tells the scores of all candidates.
        resources_file: InferenceObjectives and InferenceModelRewrites; None for none.
        tls: Of the gRPC port; None: plaintext.
        metrics_tls: Of the metrics port; None: plaintext.
        metrics_auth: Whether readers of the metrics port must show the cluster's tokens.
        receive_bytes_max: Largest gRPC message that is taken; None: from max_request_bytes.
        send_bytes_max: Largest that is sent; None: the same.
        load_age_max_s: A pod's account of its load that is older does not count, and the pod is taken for
            saturated; None: from `refresh_interval_s`.
        metrics_path: Where pods tell their load, unless their labels say so.
        profiling: Whether /debug/pprof/ answers.
        stream_metrics: Whether ext_proc streams have metrics of their own.
    """

    pods_file: Path | None = None
    watch_pods_file: bool = True
    kube: KubeConfig | None = None
    pool_name: str = "default"
    tokenizers: tuple[tuple[str, str], ...] = ((_TINY_MODEL, str(TINY_DIRECTORY)),)
    tokenize_deadline_s: float = 0.05
    conversations_bytes: int = CONVERSATIONS_BYTES
    host: str = "0.0.0.0"
    grpc_port: int = 9002
    grpc_health_port: int = 9003
    metrics_port: int = 9090
    check_port: int | None = 9004
    grpc_transport: str = "native"
    responses_full: bool = False
    fallback_endpoints: int = 0
    max_request_bytes: int = 8 << 20
    forbidden_fields: tuple[str, ...] = GATEWAY_ONLY_FIELDS
    kv_connector: str = "auto"
    max_streams: int = 256
    index: IndexerConfig = field(default_factory=IndexerConfig)
    prefill_tokens_per_s: float = 15_000.0
    refresh_interval_s: float = 1.0
    priorities: tuple[tuple[str, int], ...] = ()
    session_header: str = ""
    session_cookie: str = ""
    session_stay_s: float = 1.0
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
    tls: TlsOptions | None = None
    metrics_tls: MetricsTlsOptions | None = None
    metrics_auth: bool = False
    receive_bytes_max: int | None = None
    send_bytes_max: int | None = None
    load_age_max_s: float | None = None
    metrics_path: str = DEFAULT_PATH
    profiling: bool = True
    stream_metrics: bool = False


def parse_flags(argv: Sequence[str] | None) -> tuple[RouterConfig, argparse.Namespace]:
    """Reads the command line.

    Returns:
        The configuration, and the flags that concern the process rather than the router (logs).

    Raises:
        ConfigError: A flag or the configuration file is wrong.
    """
    flags = router_parser().parse_args(argv)
    picker = _picker(flags)
    pods_file, watch, kube = _discovery(flags, picker)
    index = _index(flags)
    if picker is not None:
        index, kube = with_producers(picker, index, kube)
    config = RouterConfig(
        pods_file=pods_file,
        watch_pods_file=watch,
        kube=kube,
        pool_name=flags.pool_name or "default",
        tokenizers=_tokenizers(flags, picker),
        tokenize_deadline_s=flags.tokenize_deadline_ms / 1000,
        conversations_bytes=flags.conversation_memory,
        host=flags.host,
        grpc_port=flags.grpc_port,
        grpc_health_port=flags.grpc_health_port,
        metrics_port=flags.metrics_port,
        check_port=flags.check_port or None,
        grpc_transport=flags.grpc_transport,
        responses_full=(flags.responses or ("full" if picker else "skip")) == "full",
        fallback_endpoints=flags.fallback_endpoints,
        max_request_bytes=flags.max_request_bytes,
        forbidden_fields=flags.forbidden_body_fields,
        kv_connector=flags.kv_connector,
        max_streams=flags.max_streams,
        index=index,
        prefill_tokens_per_s=flags.prefill_tokens_per_s,
        refresh_interval_s=flags.refresh_metrics_interval,
        priorities=tuple(flags.objective),
        session_header=flags.session_header.lower(),
        session_cookie=flags.session_cookie,
        session_stay_s=flags.session_stay,
        tracing=flags.tracing,
        request_lifetime_s=flags.request_lifetime,
        decisions_kept=flags.decisions_kept,
        drain_timeout_s=flags.drain_timeout,
        picker=picker,
        compat=_compat(flags, picker),
        emit_endpoint_scores=flags.emit_endpoint_scores,
        subset_filter=not flags.disable_endpoint_subset_filter,
        resources_file=flags.resources_file,
        tls=tls_options(flags),
        metrics_tls=metrics_tls_options(flags),
        metrics_auth=flags.metrics_endpoint_auth,
        receive_bytes_max=flags.grpc_max_recv_msg_size,
        send_bytes_max=flags.grpc_max_send_msg_size,
        load_age_max_s=flags.metrics_staleness_threshold,
        metrics_path=metrics_path_of(picker) if picker is not None else DEFAULT_PATH,
        profiling=flags.enable_pprof,
        stream_metrics=flags.enable_grpc_stream_metrics,
    )
    return config, flags


def _tokenizers(flags: argparse.Namespace, picker: PickerConfig | None) -> tuple[tuple[str, str], ...]:
    """Where tokenizers are by model; what a flag says goes before the configuration file."""
    named = tokenizers_of(picker) if picker is not None else {}
    return tuple({_TINY_MODEL: str(TINY_DIRECTORY), **named, **dict(flags.tokenizer)}.items())


def _compat(flags: argparse.Namespace, picker: PickerConfig | None) -> str:
    compat: str = flags.compat or (picker and (picker.compat or "answers")) or "off"
    if compat == "off" and picker is not None and picker.picks:
        raise ConfigError("--compat off: our own answers do not carry what plugins set; choose answers")
    return compat


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


def _discovery(
    flags: argparse.Namespace, picker: PickerConfig | None
) -> tuple[Path | None, bool, KubeConfig | None]:
    """The one place that says where pods are."""
    discovery, kube = picker.discovery if picker is not None else None, kube_config(flags)
    if discovery is not None and kube is not None and kube.pool:
        # The reference demands --pool-name in every mode; beside a file it is a name in metrics.
        kube = None
    if [flags.pods_file, discovery, kube].count(None) != 2:
        raise ConfigError(
            "give exactly one of --pool-name, --endpoint-selector, --pods-file, and a --config-file that "
            "names a file-discovery plugin"
        )
    if kube is not None and kube.pool and flags.resources_file is not None:
        raise ConfigError("--resources-file: with --pool-name objectives and rewrites come from the cluster")
    if picker is not None and discovery is not None:
        return picker.directory / discovery.path, discovery.watch_file, None
    return flags.pods_file, True, kube
