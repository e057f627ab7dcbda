"""The router's listeners: services and pages in, bound ports out. Knows nothing of how a pod is picked."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry

from router.config import RouterConfig
from router.debug_pages import DebugPages, DebugServer, MetricsAuth, profile_pages
from router.h2 import GrpcServer
from router.health import CHECK_SERVICE, EXT_PROC_SERVICE, PICK_SERVICE, Health
from router.metrics import MetricTwins
from router.replicas.journal import READERS_MAX
from router.tcp_listen import check_free

Service = Callable[[Any], object]
"""Adds a service to the listener that it is given."""

# Envoy holds one access log stream open per worker thread, and each other router follows by one.
_LONG_STREAMS = 64 + READERS_MAX
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


def check_ports(config: RouterConfig) -> None:
    """Tries the ports before anything is built for them.

    Raises:
        ListenError: One is in use.
    """
    check_free("--grpc-port", config.host, config.grpc_port)
    check_free("--grpc-health-port", config.host, config.grpc_health_port)
    check_free("--metrics-port", config.host, config.metrics_port)


def listen_grpc(config: RouterConfig, services: Mapping[str, Service], *, may_wait: bool) -> GrpcServer:
    """Bind the gRPC port.

    Args:
        services: By full name.
        may_wait: Whether a pick may wait for its turn, or for another process.

    Raises:
        ListenError: The port is in use.
    """
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
        tls=_grpc_tls(config),
        # Whoever waits for its turn, or for another process, must not hold up its neighbours.
        inline=_HEALTH if may_wait else {**dict.fromkeys(_INLINE, _INLINE_BYTES_MAX), **_HEALTH},
        services=tuple(services.values()),
        service_names=tuple(services),
    )


def listen_health(config: RouterConfig, health: Health) -> GrpcServer:
    """Bind the port of gRPC health alone.

    Raises:
        ListenError: The port is in use.
    """
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
    """Bind the metrics port.

    Raises:
        ListenError: The port is in use.
    """
    tls = None
    if config.metrics_tls is not None:
        from router.tls import metrics_tls

        tls = metrics_tls(config.metrics_tls)
    return DebugServer(
        config.host,
        config.metrics_port,
        registry if config.compat == "off" else MetricTwins(registry),
        pages.pages() | (profile_pages() if config.profiling else {}),
        tls=tls,
        authorize=_metrics_auth(config) if config.metrics_auth else None,
    )


def _grpc_tls(config: RouterConfig) -> Callable[[], ssl.SSLContext] | None:
    if config.tls is None:
        return None
    # What makes certificates takes its time to load, and most routers have none.
    from router.tls import grpc_tls

    return grpc_tls(config.tls)


def _metrics_auth(config: RouterConfig) -> MetricsAuth:
    # The official client takes a second to load, and most routers ask nobody.
    from router.kube.client import KubeClient

    kubeconfig = config.kube.kubeconfig if config.kube is not None else None
    return MetricsAuth(KubeClient(kubeconfig))
