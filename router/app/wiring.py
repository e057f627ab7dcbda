"""From a RouterConfig to its parts: where pods come from, who lets requests in and orders pods, listeners."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from router.app.config import RouterConfig
from router.app.debug_pages import DebugPages, DebugServer, MetricsAuth, profile_pages
from router.app.tls import grpc_tls, metrics_tls
from router.config.fields import Duration
from router.config.resources import Resources
from router.doors.health import CHECK_SERVICE, EXT_PROC_SERVICE, PICK_SERVICE, Health
from router.feedback.change_log import FOLLOWERS_MAX
from router.h2 import GrpcServer
from router.inflight.ledger import Ledger
from router.picking.admission import Admission, UtilizationDetector
from router.picking.cost import CostParameters
from router.picking.flow import FlowControl
from router.picking.flow_config import LOAD_AGES, fairness_of, flow_of
from router.picking.scheduler import Scheduler
from router.plugins.build import build_pipeline, is_own
from router.plugins.pipeline import Pipeline
from router.pods.pod_set import ROLE_LABEL, PodSet, PodsFile, PodSnapshot, PodsSource
from router.prompts.tokenizers import TokenizerRegistry

# Plugins that split a request over engines, which hand its blocks on.
_HANDLERS = frozenset({"disagg-profile-handler", "pd-profile-handler", "disagg-headers-handler"})

# Envoy holds one access log stream open per worker thread, and each other router follows by one.
_LONG_STREAMS = 64 + FOLLOWERS_MAX
# Each may be a watch, which keeps a thread.
_HEALTH_CALLS = 32
# Larger requests may take long to tokenize; meanwhile others on the same connection are served.
_INLINE_BYTES_MAX = 64 << 10
_INLINE = (
    f"/{EXT_PROC_SERVICE}/Process",
    f"/{CHECK_SERVICE}/Check",
    f"/{PICK_SERVICE}/PickEndpoint",
    f"/{PICK_SERVICE}/ReportOutcome",
)
# Never waits, nor must it: streams of Watch take all threads that they can get.
_HEALTH = {"/grpc.health.v1.Health/Check": _INLINE_BYTES_MAX}


def open_source(
    config: RouterConfig, registry: CollectorRegistry, take: Callable[[Resources], None]
) -> PodsSource:
    """Open where the pods come from, and objectives and rewrites where it tells them too.

    Raises:
        ConfigError: The pods file is wrong, or there are no credentials for a cluster.
    """
    if config.kube is None:
        assert config.pods_file is not None
        return PodsFile(config.pods_file, watch=config.watch_pods_file)
    # Only here: the official client takes about a second to import.
    from router.pods.kube.source import KubeSource

    return KubeSource(config.kube, registry, take, rewrites=config.compat != "off")


def entrance(
    config: RouterConfig, objectives: Mapping[str, int], pods: PodSet, registry: CollectorRegistry
) -> tuple[Admission, FlowControl | None]:
    """Who sheds requests: admission by priority, or flow control, which then does it alone.

    Raises:
        ConfigError: Flow control is configured wrongly.
    """
    priorities = dict(config.priorities) | dict(objectives)
    picker = config.picker
    found = None
    if picker is not None:
        found = flow_of(picker, config.refresh_interval_s, config.load_age_max_s)
    if picker is None or found is None:
        detector = UtilizationDetector(load_age_max_s=Duration(_load_age_max_s(config)))
        return Admission(priorities, detector, pods.board), None
    admission = Admission(priorities, None, pods.board)
    if found[0].evicts and (config.compat == "off" or not config.responses_full):
        picker.flow.section.fail(
            "enableEviction",
            "needs --responses full and --compat answers: else no door can end a request",
        )
    flow = FlowControl(
        *found,
        pods,
        registry,
        priority_of=admission.priority_of,
        fairness_of=fairness_of(picker),
    )
    return admission, flow


def ranker(config: RouterConfig) -> Pipeline | None:
    """The configuration file's pipeline; None: the cost policy orders the pods.

    Raises:
        ConfigError: A plugin is wrong.
    """
    if config.picker is None or not config.picker.picks:
        return None
    return build_pipeline(
        config.picker,
        block_tokens=config.index.block_tokens,
        random=np.random.default_rng(),
    )


def scheduler(config: RouterConfig, pods: PodSet, ledger: Ledger, ranker: Pipeline | None) -> Scheduler:
    """Make the scheduler."""
    return Scheduler(
        pods.board,
        ledger,
        np.random.default_rng(),
        block_tokens=config.index.block_tokens,
        cost=CostParameters(load_age_max_s=_load_age_max_s(config)),
        ranker=ranker,
    )


def connector_sign(config: RouterConfig, pods: PodSnapshot) -> str | None:
    """Return why engines are taken to have a KV connector; None: nothing says that they have one."""
    if config.kv_connector != "auto":
        return "--kv-connector=true" if config.kv_connector == "true" else None
    for entry in config.picker.plugins.values() if config.picker is not None else ():
        if entry.type in _HANDLERS:
            return f"plugin {entry.type}"
    for pod in pods.values():
        if ROLE_LABEL in pod.entry.labels:
            return f"label {ROLE_LABEL} of pod {pod.name}"
    return None


def may_wait(config: RouterConfig, flow: FlowControl | None, tokenizers: TokenizerRegistry) -> bool:
    """Whether a pick may wait: for its turn, for another process, or for a plugin of the user's own."""
    if flow is not None or tokenizers.asks_others:
        return True
    plugins = config.picker.plugins.values() if config.picker is not None else ()
    return any(is_own(plugin.type) for plugin in plugins)


def plugin_states(ranker: Pipeline | None, flow: FlowControl | None) -> dict[str, Any]:
    """What plugins and flow control remember, for people."""
    states = dict(ranker.state()) if ranker is not None else {}
    return states if flow is None else {**states, "flow-control": {"state": flow.state()}}


def _load_age_max_s(config: RouterConfig) -> float:
    """How old an engine's account of its load may be and still count: two probes in a row may fail."""
    if config.load_age_max_s is not None:
        return config.load_age_max_s
    return max(CostParameters().load_age_max_s, LOAD_AGES * config.refresh_interval_s)


def listen_grpc(
    config: RouterConfig, services: Sequence[Callable[[Any], object]], *, may_wait: bool
) -> GrpcServer:
    """Bind the gRPC port for these services (a ListenError: it is in use); `may_wait`: whether a pick may."""
    return GrpcServer(
        "--grpc-port",
        config.host,
        config.grpc_port,
        threads=config.max_streams + _LONG_STREAMS,
        # A request phase is over in a millisecond, so a short queue is better than a refusal.
        requests_max=(1 if config.responses_full else 4) * config.max_streams + _LONG_STREAMS,
        message_bytes_max=config.max_request_bytes,
        receive_bytes_max=config.receive_bytes_max,
        send_bytes_max=config.send_bytes_max,
        tls=grpc_tls(config.tls) if config.tls is not None else None,
        # Whoever waits for its turn, or for another process, must not hold up its neighbours.
        inline=_HEALTH if may_wait else {**dict.fromkeys(_INLINE, _INLINE_BYTES_MAX), **_HEALTH},
        services=services,
        reflects=True,
    )


def listen_health(config: RouterConfig, health: Health) -> GrpcServer:
    """Bind the port of gRPC health alone; a ListenError if it is in use."""
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


def listen_metrics(config: RouterConfig, registry: CollectorRegistry, pages: DebugPages) -> DebugServer:
    """Bind the metrics port; a ListenError if it is in use."""
    return DebugServer(
        config.host,
        config.metrics_port,
        registry,
        pages.pages() | (profile_pages() if config.profiling else {}),
        tls=metrics_tls(config.metrics_tls) if config.metrics_tls is not None else None,
        authorize=_metrics_auth(config) if config.metrics_auth else None,
    )


def _metrics_auth(config: RouterConfig) -> MetricsAuth:
    # The official client takes a second to load, and most routers ask nobody.
    from router.pods.kube.client import KubeClient

    kubeconfig = config.kube.kubeconfig if config.kube is not None else None
    return MetricsAuth(KubeClient(kubeconfig))
