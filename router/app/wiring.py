"""Builders of the router's parts from a RouterConfig: pods' source, admission, scheduler, listeners."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from router.app.admin import Admin
from router.app.config import RouterConfig
from router.app.debug_pages import DebugPages, DebugServer, MetricsAuth
from router.app.explain import EXPLAIN_PATH, Explainer
from router.app.profiler import profile_pages
from router.app.tls import grpc_tls, metrics_tls
from router.config.fields import Duration
from router.config.picker_file import Resources
from router.doors.health import CHECK_SERVICE, EXT_PROC_SERVICE, PICK_SERVICE, Health
from router.errors import ConfigError
from router.feedback.change_log import FOLLOWERS_MAX
from router.h2 import GrpcServer
from router.inflight.ledger import Ledger
from router.picking.cost import CostParameters
from router.picking.flow import FlowControl
from router.picking.flow_queue import (
    LOAD_AGE_INTERVALS,
    UtilizationDetector,
    fairness_id_reader,
    read_admitters,
    read_flow_settings,
)
from router.picking.route import Admission
from router.picking.scheduler import Scheduler
from router.plugins.build import build_pipeline, is_custom
from router.plugins.pipeline import Pipeline
from router.pods.pod_set import ROLE_LABEL, PodSet, PodsFile, PodSnapshot, PodsSource
from router.prompts.tokenizers import TokenizerRegistry

# Plugins for disaggregated serving, which transfers KV blocks between engines.
_DISAGGREGATING = frozenset({"disagg-profile-handler", "pd-profile-handler", "disagg-headers-handler"})

# Envoy keeps an access log stream open per worker thread, each peer router one for the change log.
_LONG_STREAMS = 64 + FOLLOWERS_MAX
# Each call may be a Watch, which occupies a thread.
_HEALTH_CALLS = 32
# Larger requests may be slow to tokenize, so they do not run on their connection's thread.
_INLINE_BYTES_MAX = 64 << 10
_INLINE = (
    f"/{EXT_PROC_SERVICE}/Process",
    f"/{CHECK_SERVICE}/Check",
    f"/{PICK_SERVICE}/PickEndpoint",
    f"/{PICK_SERVICE}/ReportOutcome",
)
# Check must not wait for a thread: Watch streams may occupy all of them.
_HEALTH = {"/grpc.health.v1.Health/Check": _INLINE_BYTES_MAX}


def open_pods_source(
    config: RouterConfig, registry: CollectorRegistry, on_resources: Callable[[str, Resources], None]
) -> PodsSource:
    """Open the source of pods: the pods file or the cluster.

    Args:
        on_resources: Called with a pool and its objectives and rewrites whenever they change.

    Raises:
        ConfigError: The pods file is invalid, or credentials for the cluster are missing.
    """
    if config.kube is None:
        assert config.pods_file is not None
        return PodsFile(config.pods_file, watch=config.watch_pods_file)
    # Imported here because the official client takes about a second to load.
    from router.pods.kube.pools import PoolSources
    from router.pods.kube.source import KubeSource

    rewrites = config.compat != "off"
    if config.kube.more_pools:
        return PoolSources(config.kube, registry, on_resources, rewrites)
    return KubeSource(config.kube, registry, partial(on_resources, ""), rewrites)


def build_admission(
    config: RouterConfig, objectives: Mapping[str, int], pods: PodSet, registry: CollectorRegistry
) -> tuple[Admission, FlowControl | None]:
    """Build admission, and flow control if configured, which then replaces shedding by priority.

    Raises:
        ConfigError: Flow control is configured wrongly.
    """
    priorities = dict(config.priorities) | dict(objectives)
    picker, ages_s = config.picker, (config.refresh_interval_s, config.load_age_max_s)
    found = read_flow_settings(picker, *ages_s) if picker is not None else None
    if picker is None or found is None:
        detector = UtilizationDetector(load_age_max_s=Duration(_load_age_max_s(config)))
        admitters = read_admitters(picker) if picker is not None else ()
        return Admission(priorities, detector, pods.load_table, admitters), None
    if len(pool_ports(config)) > 1:
        raise ConfigError(
            "--pool-port: not with flow control, which queues by the saturation of all pods; run one router "
            "per pool, or remove flowControl from featureGates"
        )
    admission = Admission(priorities, None, pods.load_table, read_admitters(picker))
    if found[0].evicts and (config.compat == "off" or not config.responses_full):
        picker.flow.section.fail(
            "enableEviction",
            "needs --responses full and --compat answers: only such ext_proc streams can end a request",
        )
    flow = FlowControl(
        *found,
        pods,
        registry,
        priority_of=admission.priority_of,
        fairness_id_of=fairness_id_reader(picker),
    )
    return admission, flow


def build_ranker(config: RouterConfig) -> Pipeline | None:
    """Build the plugin pipeline of the configuration file; None: the cost policy ranks the pods.

    Raises:
        ConfigError: A plugin is configured wrongly.
    """
    if config.picker is None or not config.picker.picks:
        return None
    return build_pipeline(
        config.picker,
        block_tokens=config.index.block_tokens,
        random=np.random.default_rng(),
    )


def build_scheduler(config: RouterConfig, pods: PodSet, ledger: Ledger, ranker: Pipeline | None) -> Scheduler:
    """Build the scheduler, with `ranker` if the configuration file has one."""
    return Scheduler(
        pods.load_table,
        ledger,
        np.random.default_rng(),
        block_tokens=config.index.block_tokens,
        cost=CostParameters(load_age_max_s=_load_age_max_s(config)),
        ranker=ranker,
    )


def kv_connector_sign(config: RouterConfig, pods: PodSnapshot) -> str | None:
    """Return the flag, plugin or label that implies a KV connector in the engines; None if none does."""
    if config.kv_connector != "auto":
        return "--kv-connector=true" if config.kv_connector == "true" else None
    for entry in config.picker.plugins.values() if config.picker is not None else ():
        if entry.type in _DISAGGREGATING:
            return f"plugin {entry.type}"
    for pod in pods.values():
        if ROLE_LABEL in pod.entry.labels:
            return f"label {ROLE_LABEL} of pod {pod.name}"
    return None


def pick_may_block(config: RouterConfig, flow: FlowControl | None, tokenizers: TokenizerRegistry) -> bool:
    """Return whether a pick may block: on flow control, a remote tokenizer, or a third-party plugin."""
    if flow is not None or tokenizers.asks_others:
        return True
    plugins = config.picker.plugins.values() if config.picker is not None else ()
    return any(is_custom(plugin.type) for plugin in plugins)


def plugin_states(ranker: Pipeline | None, flow: FlowControl | None) -> dict[str, Any]:
    """Return the state of plugins and flow control by name, for /debug/plugins/state."""
    states = dict(ranker.state()) if ranker is not None else {}
    return states if flow is None else {**states, "flow-control": {"state": flow.state()}}


def _load_age_max_s(config: RouterConfig) -> float:
    """Return the maximum age of usable load metrics, in seconds: two probes in a row may fail."""
    if config.load_age_max_s is not None:
        return config.load_age_max_s
    return max(CostParameters().load_age_max_s, LOAD_AGE_INTERVALS * config.refresh_interval_s)


def pool_ports(config: RouterConfig) -> dict[str, int]:
    """Return the gRPC port of each pool; "" stands for the pool of a router that has only one."""
    if config.kube is None or not config.kube.more_pools:
        return {"": config.grpc_port}
    return {config.kube.pool: config.grpc_port, **dict(config.kube.more_pools)}


def listen_grpc(
    config: RouterConfig, port: int, services: Sequence[Callable[[Any], object]], *, may_block: bool
) -> GrpcServer:
    """Bind a gRPC port and register `services` there.

    Args:
        may_block: Whether a pick may block; if so, picks do not run on their connection's thread.

    Raises:
        ListenError: The port is in use.
    """
    return GrpcServer(
        "--grpc-port" if port == config.grpc_port else "--pool-port",
        config.host,
        port,
        threads=config.max_streams + _LONG_STREAMS,
        # The request phase takes about a millisecond, so short queueing is better than rejecting.
        requests_max=(1 if config.responses_full else 4) * config.max_streams + _LONG_STREAMS,
        message_bytes_max=config.max_request_bytes,
        receive_bytes_max=config.receive_bytes_max or 0,
        send_bytes_max=config.send_bytes_max or 0,
        tls=grpc_tls(config.tls) if config.tls is not None else None,
        plaintext=config.tls is None or config.tls.plaintext,
        inline=_HEALTH if may_block else {**dict.fromkeys(_INLINE, _INLINE_BYTES_MAX), **_HEALTH},
        services=services,
        reflects=True,
    )


def move_picks(servers: Collection[GrpcServer]) -> None:
    """Serve picks on threads of their own from now on, because they may block."""
    for grpc in servers:
        grpc.inline = _HEALTH


def listen_health(config: RouterConfig, health: Health) -> GrpcServer:
    """Bind the gRPC health port. Raises ListenError if it is in use."""
    return GrpcServer(
        "--grpc-health-port",
        config.host,
        config.grpc_health_port,
        threads=_HEALTH_CALLS,
        requests_max=_HEALTH_CALLS,
        message_bytes_max=0,
        services=(health.add_to,),
        inline=_HEALTH,
    )


def listen_metrics(
    config: RouterConfig, registry: CollectorRegistry, pages: DebugPages, explainer: Explainer
) -> DebugServer:
    """Bind the metrics port. Raises ListenError if it is in use."""
    return DebugServer(
        config.host,
        config.metrics_port,
        registry,
        pages.pages() | (profile_pages() if config.profiling else {}),
        tls=metrics_tls(config.metrics_tls) if config.metrics_tls is not None else None,
        authorize=_metrics_auth(config) if config.metrics_auth else None,
        admin=Admin(config.index.admin_token, pages.pods, pages.source, pages.index),
        posts={EXPLAIN_PATH: explainer.answer},
        watch=pages.watch,
    )


def _metrics_auth(config: RouterConfig) -> MetricsAuth:
    # Imported here because the official client takes about a second to load.
    from router.pods.kube.client import KubeClient

    kubeconfig = config.kube.kubeconfig if config.kube is not None else None
    return MetricsAuth(KubeClient(kubeconfig))
