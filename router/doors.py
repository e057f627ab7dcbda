"""The router's listeners: what answers requests in, bound ports with every door behind them out.

Knows which service is served where; knows nothing of how a pod is picked.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from indexer.peer_service import PEER_SERVICE, PeerDoor
from router.access_log import AccessLogDoor
from router.body_guard import BodyGuard
from router.check import CheckDoor
from router.config import RouterConfig
from router.debug_http import DebugServer
from router.debug_pages import DebugPages, Profiling
from router.ext_proc import ExtProcDoor, ExtProcOptions
from router.ext_proc_bytes import add_ext_proc
from router.flow import Evictions
from router.gateway_pick import GatewayPick
from router.grpc_listen import listen
from router.h2 import GrpcServer
from router.health import (
    ACCESS_LOG_SERVICE,
    CHECK_SERVICE,
    EXT_PROC_SERVICE,
    PICK_SERVICE,
    Health,
)
from router.kv_connector import connector_sign
from router.metrics import RouterMetrics
from router.outcomes import Outcomes
from router.pick_service import PickDoor
from router.pods import PodSet
from router.reference_wiring import reference_door
from router.replicas.door import LEDGER_SERVICE, LedgerDoor
from router.replicas.journal import READERS_MAX
from router.rewrite import RewriteRules
from router.route import Router
from router.stream_metrics import StreamMetrics
from router.tcp_listen import check_free

if TYPE_CHECKING:
    from router.kube.metrics_auth import MetricsAuth

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


@dataclass(frozen=True, slots=True)
class DoorParts:
    """What the doors are made of.

    Attributes:
        distrust: Told of a pod that did not answer, and why.
        may_wait: Whether a pick may wait for its turn, or for another process.
    """

    router: Router
    outcomes: Outcomes
    metrics: RouterMetrics
    pods: PodSet
    health: Health
    rewrites: RewriteRules
    distrust: Callable[[str, str], None]
    registry: CollectorRegistry
    pages: DebugPages
    peers: PeerDoor
    ledger: LedgerDoor
    may_wait: bool
    evictions: Evictions | None = None


def check_ports(config: RouterConfig) -> None:
    """Tries the ports before anything is built for them.

    Raises:
        ListenError: One is in use.
    """
    check_free("--grpc-port", config.host, config.grpc_port)
    check_free("--grpc-health-port", config.host, config.grpc_health_port)
    check_free("--metrics-port", config.host, config.metrics_port)


class Doors:
    """All listeners of one router: bound when made, serving from `start` on.

    Raises:
        ListenError: A port is in use.
        ConfigError: A parser or a reporter of the configuration file is wrong.
    """

    def __init__(self, config: RouterConfig, parts: DoorParts) -> None:
        self._config = config
        self._gateway = GatewayPick(
            parts.router,
            parts.metrics,
            guard=BodyGuard(
                config.forbidden_fields,
                lambda: connector_sign(config, parts.pods.snapshot()) is not None,
            ),
        )
        # Closed in the other order: by `close`, or at once if one of them cannot be had.
        with ExitStack() as opened:
            self._debug = self._listen_debug(parts)
            opened.callback(self._debug.close)
            self._grpc_health = self._listen_health(parts.health)
            opened.callback(self._grpc_health.close)
            self._grpc = self._listen(parts)
            opened.callback(self._grpc.close)
            self._opened = opened.pop_all()

    @property
    def ports(self) -> dict[str, int]:
        """The bound ports by flag."""
        return {"grpc": self._grpc.port, "grpc-health": self._grpc_health.port, "metrics": self._debug.port}

    def start(self) -> None:
        """Begins to serve."""
        self._grpc.start()
        self._grpc_health.start()
        self._debug.start()

    def drain(self) -> None:
        """Has gateways connect anew, and so elsewhere, where they keep connections for many requests."""
        self._grpc.drain()

    def close(self) -> None:
        """Ends serving; idempotent."""
        self._opened.close()

    def _listen(self, parts: DoorParts) -> GrpcServer:
        config = self._config
        ext_proc, check = self._gateway_doors(parts)
        picks = PickDoor(self._gateway, parts.outcomes, parts.metrics, parts.pods)
        cut = partial(parts.metrics.dropped, "ext_proc", "slow_request")
        opened = StreamMetrics(parts.registry).opened if config.stream_metrics else None
        access_log = AccessLogDoor(parts.outcomes, parts.metrics, parts.distrust)
        return listen(
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
            inline=self._inline(parts.may_wait),
            services=(
                lambda server: add_ext_proc(ext_proc, server, cut, opened),
                check.add_to,
                picks.add_to,
                access_log.add_to,
                parts.peers.add_to,
                parts.ledger.add_to,
                parts.health.add_to,
            ),
            service_names=(
                EXT_PROC_SERVICE,
                CHECK_SERVICE,
                PICK_SERVICE,
                ACCESS_LOG_SERVICE,
                PEER_SERVICE,
                LEDGER_SERVICE,
                "grpc.health.v1.Health",
            ),
        )

    @staticmethod
    def _inline(may_wait: bool) -> dict[str, int]:
        # Whoever waits for its turn, or for another process, must not hold up its neighbours.
        return _HEALTH if may_wait else {**dict.fromkeys(_INLINE, _INLINE_BYTES_MAX), **_HEALTH}

    def _listen_debug(self, parts: DoorParts) -> DebugServer:
        config = self._config
        pages = parts.pages.pages() | (dict(Profiling().pages()) if config.profiling else {})
        tls = None
        if config.metrics_tls is not None:
            from router.tls import metrics_tls

            tls = metrics_tls(config.metrics_tls)
        return DebugServer(
            config.host,
            config.metrics_port,
            parts.registry,
            pages,
            tls=tls,
            authorize=_metrics_auth(config) if config.metrics_auth else None,
        )

    def _listen_health(self, health: Health) -> GrpcServer:
        config = self._config
        return listen(
            "--grpc-health-port",
            config.host,
            config.grpc_health_port,
            threads=_HEALTH_CALLS,
            requests_max=_HEALTH_CALLS,
            message_bytes_max=0,
            services=(health.add_to,),
            inline=_HEALTH,
        )

    def _gateway_doors(self, parts: DoorParts) -> tuple[Any, CheckDoor]:
        config, outcomes, metrics = self._config, parts.outcomes, parts.metrics
        gateway = self._gateway
        check = CheckDoor(gateway, metrics, config.max_request_bytes)
        if config.compat == "off":
            options = ExtProcOptions(config.max_request_bytes, config.responses_full)
            return ExtProcDoor(gateway, outcomes, metrics, options), check
        reference = reference_door(
            config, parts.rewrites, gateway, outcomes, metrics, parts.pods, parts.evictions
        )
        return reference, check


def _grpc_tls(config: RouterConfig) -> Callable[[], ssl.SSLContext] | None:
    if config.tls is None:
        return None
    # What makes certificates takes its time to load, and most routers have none.
    from router.tls import grpc_tls

    return grpc_tls(config.tls)


def _metrics_auth(config: RouterConfig) -> MetricsAuth:
    # The official client takes a second to load, and most routers ask nobody.
    from router.kube.client import KubeClient
    from router.kube.metrics_auth import MetricsAuth

    kubeconfig = config.kube.kubeconfig if config.kube is not None else None
    return MetricsAuth(KubeClient(kubeconfig))
