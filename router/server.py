"""The router process: a RouterConfig in, a running endpoint picker out; wires the parts, owns their lives."""

from __future__ import annotations

import gc
import logging
import math
import sys
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from prometheus_client import CollectorRegistry

from indexer import KvIndexer, PodStream
from indexer.open_files import raise_open_files
from indexer.reconcile import EngineReading
from router._pb import endpoint_picker_pb2_grpc
from router.access_log import AccessLogDoor
from router.admission import Admission, AdmissionParameters
from router.check import CheckDoor
from router.config import RouterConfig, parse_flags
from router.debug_http import DebugServer
from router.debug_pages import DebugPages
from router.engine_watch import EngineWatch
from router.errors import ConfigError, ListenError
from router.explain import Explain
from router.explain_service import ExplainDoor
from router.ext_proc import ExtProcDoor, ExtProcOptions
from router.flow import FlowControl
from router.flow_config import fairness_of, flow_of
from router.flow_metrics import FlowMetrics
from router.gateway_pick import GatewayPick
from router.grpc_listen import check_free, listen
from router.health import (
    ACCESS_LOG_SERVICE,
    CHECK_SERVICE,
    EXPLAIN_SERVICE,
    EXT_PROC_SERVICE,
    PICK_SERVICE,
    Health,
)
from router.ledger import Ledger, LedgerParameters
from router.metric_twins import MetricTwins
from router.metrics import RouterMetrics, StateCollector
from router.outcomes import Outcomes
from router.pick_service import PickDoor
from router.plugins.build import build_pipeline
from router.pod_watch import PodWatch
from router.pods import PodSet
from router.pods_source import PodsSource
from router.probe import Prober
from router.rates import PrefillRates, RateParameters
from router.reconcile import Reconciler
from router.reference_wiring import reference_door
from router.resources import Resources, read_resources
from router.route import Router
from router.schedule import Scheduler
from router.sessions import SessionParameters, Sessions
from router.stop_signals import StopSignals
from router.tokens import TokenizeOptions, TokenizerRegistry
from router.traces import Traces

_log = logging.getLogger(__name__)

_HOUSEKEEPING_S = 0.05
_PROBE_TIMEOUT_S = 1.0
_PARITY_EVERY_S = 5.0
# Envoy holds one access log stream open per worker thread.
_ACCESS_LOG_STREAMS = 64
_STOP_S = 2.0
_HEALTH_THREADS = 8
_COLLECT_AFTER = (20_000, 20, 20)


class RouterServer:
    """One router with all its doors.

    Raises:
        ConfigError: The pods file or a tokenizer is wrong.
        ListenError: A port is in use.
    """

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        check_free("--grpc-port", config.host, config.grpc_port)
        check_free("--grpc-health-port", config.host, config.grpc_health_port)
        check_free("--metrics-port", config.host, config.metrics_port)
        self._source = PodsSource(config.pods_file, watch=config.watch_pods_file)
        self._entries = self._source.read()
        self._resources = read_resources(config.resources_file) if config.resources_file else Resources()
        self._tokenizers = TokenizerRegistry.load(
            dict(config.tokenizers), TokenizeOptions(deadline_s=config.tokenize_deadline_s)
        )
        self._traces = Traces.to_collector() if config.tracing else None
        registry = CollectorRegistry()
        self.pods = PodSet()
        self._ledger = Ledger(LedgerParameters(lifetime_s=config.request_lifetime_s), self.pods.board)
        self._rates = PrefillRates(
            RateParameters(prior_tokens_per_s=config.prefill_tokens_per_s), self.pods.board
        )
        self._metrics = RouterMetrics(registry)
        registry.register(StateCollector(self.pods, self._ledger, self._rates, time.monotonic))
        if config.compat != "off":
            registry.register(MetricTwins(registry))
        self.explain = Explain(config.decisions_kept, self._pod_name)
        self._outcomes = Outcomes(
            self._ledger, self._rates, self.explain, self._metrics, self._settle, self._drop
        )
        prober = Prober(timeout_s=_PROBE_TIMEOUT_S)
        self.watch = PodWatch(
            self._source,
            self.pods,
            prober,
            self._follow,
            interval_s=config.refresh_interval_s,
            engines=EngineWatch(self._outcomes.promises, self._observe),
            declared=self._forget_others,
        )
        self.index = KvIndexer(
            config.index,
            registry=registry,
            on_stored=self._outcomes.stored,
            on_link=self.watch.link,
        )
        admission, self._flow = self._entrance(registry)
        self.router = Router(
            pods=self.pods,
            tokenizers=self._tokenizers,
            index=self.index,
            admission=admission,
            scheduler=self._scheduler(),
            sink=self._outcomes,
            flow=self._flow,
            traces=self._traces,
        )
        self.health = Health()
        pages = DebugPages(self.pods, self.index, self._ledger, self._rates, self.explain, self.health)
        self._listen(registry, pages)
        self._stopping = threading.Event()
        self._reconciler = Reconciler(self._outcomes)
        self._parity_due_s = 0.0
        self._housekeeper = threading.Thread(target=self._keep_house, name="housekeeping", daemon=True)

    @property
    def ports(self) -> dict[str, int]:
        """The bound ports by flag."""
        return {
            "grpc": self._grpc_port,
            "grpc-health": self._health_port,
            "metrics": self._debug.port,
        }

    @property
    def requests_in_flight(self) -> int:
        """Requests dispatched and not heard to have ended."""
        return len(self._ledger)

    def start(self) -> None:
        """Begins to follow pods and to serve."""
        self._started_s = time.monotonic()
        self.index.start()
        self.watch.start(self._entries)
        self._housekeeper.start()
        if self._flow is not None:
            self._flow.start()
        self._grpc.start()
        self._grpc_health.start()
        self._debug.start()
        _log.info("listening: %s", ", ".join(f"{name} {port}" for name, port in self.ports.items()))

    def drain(self) -> None:
        """Tells gateways to go elsewhere and waits, with a limit, for the requests inside the doors."""
        self._stop_housekeeping()
        deadline_s = time.monotonic() + self._config.drain_timeout_s
        while self._metrics.requests_inside and time.monotonic() < deadline_s:
            time.sleep(_HOUSEKEEPING_S)

    def close(self) -> None:
        """Ends everything; idempotent."""
        self._stop_housekeeping()
        if self._flow is not None:
            self._flow.close()
        for server in (self._grpc, self._grpc_health):
            # gRPC never ends a call whose message it could not read, and would wait for it for ever.
            server.stop(grace=0).wait(_STOP_S)
        self._debug.close()
        self.watch.close()
        self.index.close()
        self._tokenizers.close()
        if self._traces is not None:
            self._traces.close()

    def _entrance(self, registry: CollectorRegistry) -> tuple[Admission, FlowControl | None]:
        """Who sheds requests: admission by priority, or flow control, which then does it alone."""
        config, board = self._config, self.pods.board
        priorities = dict(config.priorities) | dict(self._resources.priorities)
        picker = config.picker
        found = flow_of(picker, config.refresh_interval_s) if picker is not None else None
        if picker is None or found is None:
            return Admission(AdmissionParameters(priorities=priorities), board), None
        admission = Admission(AdmissionParameters(priorities, math.inf, math.inf, math.inf), board)
        metrics = FlowMetrics(registry)
        flow = FlowControl(
            *found,
            self.pods,
            metrics,
            priority_of=admission.priority_of,
            fairness_of=fairness_of(picker),
        )
        metrics.watch(lambda: len(flow), lambda: flow.size_bytes, flow.saturation)
        return admission, flow

    def _scheduler(self) -> Scheduler:
        config, sessions = self._config, None
        if config.session_header or config.session_cookie:
            parameters = SessionParameters(
                config.session_header, config.session_cookie, stay_s=config.session_stay_s
            )
            sessions = Sessions(parameters)
        random, ranker = np.random.default_rng(), None
        if config.picker is not None and config.picker.picks:
            ranker = build_pipeline(
                config.picker,
                block_tokens=config.index.block_tokens,
                strict=config.compat == "strict",
                random=random,
            )
        return Scheduler(
            self.pods.board,
            self._ledger,
            random,
            block_tokens=config.index.block_tokens,
            sessions=sessions,
            ranker=ranker,
        )

    def _stop_housekeeping(self) -> None:
        self._stopping.set()
        # Only then can a late sync no longer make us ready again.
        if self._housekeeper.is_alive():
            self._housekeeper.join()
        self.health.set_ready(False)

    def _listen(self, registry: CollectorRegistry, pages: DebugPages) -> None:
        config = self._config
        gateway = GatewayPick(
            self.router, self._metrics, config.fallback_endpoints, explains=config.explain_header
        )
        if config.compat == "off":
            options = ExtProcOptions(config.max_request_bytes, config.responses_full)
            ext_proc: Any = ExtProcDoor(gateway, self._outcomes, self._metrics, options)
        else:
            ext_proc = reference_door(
                config, self._resources.rules, gateway, self._outcomes, self._metrics, self.pods
            )
        check = CheckDoor(gateway, self._metrics, config.max_request_bytes)
        picks = PickDoor(self.router, self._outcomes, self._metrics, self.pods)
        # The generated function has no types.
        add_picker: Any = endpoint_picker_pb2_grpc.add_EndpointPickerServicer_to_server
        add_explain: Any = endpoint_picker_pb2_grpc.add_DecisionLogServicer_to_server
        explain = ExplainDoor(self.explain)
        access_log = AccessLogDoor(self._outcomes, self._metrics, self.watch.distrust)
        self._grpc, self._grpc_port = listen(
            "--grpc-port",
            config.host,
            config.grpc_port,
            threads=config.max_streams + _ACCESS_LOG_STREAMS,
            # A request phase is over in a millisecond, so a short queue is better than a refusal.
            requests_max=(1 if config.responses_full else 4) * config.max_streams + _ACCESS_LOG_STREAMS,
            message_bytes_max=config.max_request_bytes,
            services=(
                lambda server: external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(
                    ext_proc, server
                ),
                check.add_to,
                lambda server: add_picker(picks, server),
                lambda server: add_explain(explain, server),
                access_log.add_to,
                self.health.add_to,
            ),
            service_names=(
                EXT_PROC_SERVICE,
                CHECK_SERVICE,
                PICK_SERVICE,
                EXPLAIN_SERVICE,
                ACCESS_LOG_SERVICE,
                "grpc.health.v1.Health",
            ),
        )
        self._grpc_health, self._health_port = listen(
            "--grpc-health-port",
            config.host,
            config.grpc_health_port,
            threads=_HEALTH_THREADS,
            requests_max=4 * _HEALTH_THREADS,
            message_bytes_max=0,
            services=(self.health.add_to,),
        )
        self._debug = DebugServer(config.host, config.metrics_port, registry, pages.pages())

    def _keep_house(self) -> None:
        while not self._stopping.wait(_HOUSEKEEPING_S):
            try:
                self._tidy(time.monotonic())
            except Exception:
                # Without housekeeping nothing would expire, and the router never be ready.
                _log.exception("housekeeping failed; it goes on")

    def _tidy(self, now_s: float) -> None:
        self._outcomes.expire(now_s)
        self._reconciler.look(self.pods.snapshot(), now_s)
        if now_s >= self._parity_due_s:
            self._parity_due_s = now_s + _PARITY_EVERY_S
            self.index.check_parity()
        if not self.health.ready and self._synced():
            self.health.set_ready(True)
            _log.info("ready")

    def _synced(self) -> bool:
        """Whether every pod was asked, and the view of each that may be picked was built; or had its time."""
        late = time.monotonic() - self._started_s > self._config.sync_timeout_s
        if not (self.watch.synced or late):
            return False
        pods = self.pods.snapshot()
        return not any(pod in pods and pods[pod].ready for pod in self.index.pending())

    def _pod_name(self, address: str) -> str:
        pod = self.pods.snapshot().get(address)
        return pod.name if pod is not None else ""

    # The index is made after those who call it: it calls them, too.
    def _settle(self, request_id: str, now_s: float) -> None:
        self.index.settle(request_id, now_s)

    def _drop(self, request_id: str) -> None:
        self.index.dropped(request_id)

    def _observe(self, pod: str, reading: EngineReading) -> None:
        self.index.observe(pod, reading)

    def _follow(self, streams: Iterable[PodStream]) -> None:
        self.index.follow(streams)

    def _forget_others(self, pods: Collection[str]) -> None:
        self._rates.keep(pods)
        self._metrics.keep(pods)
        self._outcomes.promises.keep(pods)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a router until SIGTERM or SIGINT; returns the exit status."""
    try:
        config, flags = parse_flags(argv)
        logging.basicConfig(
            level=logging.DEBUG if flags.v > 0 else logging.INFO,
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        )
        stop = StopSignals()
        raise_open_files()
        return _serve(RouterServer(config), stop)
    except ConfigError as error:
        print(f"kvroute router: error: {error}", file=sys.stderr)
        return 2
    except ListenError as error:
        print(f"kvroute router: error: {error}", file=sys.stderr)
        return 1


def _serve(server: RouterServer, stop: StopSignals) -> int:
    server.start()
    _calm_collector()
    stop.wait()
    _log.info("draining")
    server.drain()
    server.close()
    _log.info("ended")
    return 0


def _calm_collector() -> None:
    """Lets Python's cycle collector look less often, and never at what lives as long as the process."""
    # Requests leave no cycles behind; what is looked for is only what went wrong.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)
