"""The router process: builds, starts and closes the parts that a RouterConfig describes."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from indexer import ConfigError as IndexerConfigError
from indexer import KvIndexer, raise_open_files
from router.analysis.feed import Analysis
from router.app.config import RouterConfig, config_as_yaml, parse_flags
from router.app.debug_pages import DebugPages
from router.app.explain import Explainer
from router.app.process import StopSignals, set_up_logs, trim_heap, tune_gc, use_single_arena
from router.app.wiring import (
    build_admission,
    build_ranker,
    build_scheduler,
    kv_connector_sign,
    listen_grpc,
    listen_health,
    listen_metrics,
    move_picks,
    open_pods_source,
    pick_may_block,
    plugin_states,
    pool_ports,
)
from router.config.flags import ignored_flags
from router.config.picker_file import Resources, RewriteRules, read_resources
from router.doors.access_log import AccessLogService
from router.doors.boundary import SALT_FIELDS, BodyGuard, TenantSalt
from router.doors.ext_authz import ExtAuthzService
from router.doors.ext_proc import ExtProcOptions, ExtProcService
from router.doors.ext_proc_dialects import LlmdDialect, NativeDialect, configured_parts
from router.doors.health import Health
from router.doors.pick import EndpointPickerService
from router.errors import ConfigError, ListenError
from router.feedback.fleet import Fleet
from router.feedback.lifecycle import Lifecycle, LostEndDetector
from router.h2 import GrpcServer
from router.inflight.failures import PodFailures
from router.inflight.ledger import Ledger, LedgerParameters
from router.inflight.rates import PrefillRates, RateParameters
from router.observe.decision_log import DecisionLog
from router.observe.metrics import (
    MetricAliases,
    RouterMetrics,
    StateCollector,
    StreamMetrics,
    TokenizerCollector,
)
from router.observe.requests import ObservedRouter
from router.observe.tracing import Traces
from router.picking.candidates import StatePods
from router.picking.route import Router
from router.plugins.build import ignored_parameters
from router.pods.pod_set import Pod, PodSet
from router.pods.probe import Prober
from router.pods.watch import EngineCheck, PodWatch
from router.prompts.tokenizer_sources import open_tokenizers
from router.prompts.tokenizers import TokenizeOptions, TokenizerRegistry

_log = logging.getLogger(__name__)

_DECISIONS_KEPT = 1000
_HOUSEKEEPING_S = 0.05
_PROBE_TIMEOUT_S = 1.0
_REVIEW_EVERY_S = 5.0
_LOOK_EVERY_S = 1.0
_GIVE_BACK_EVERY_S = 60.0


class RouterServer:
    """One router with all its listeners.

    Raises:
        ConfigError: The pods file or a tokenizer is invalid, or credentials for the cluster are missing.
        ListenError: A port is in use.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        # Parts that validate the configuration are built before those that open sockets.
        self._ranker = build_ranker(config)
        self._salt = TenantSalt.load(config.salt_from, config.salt_key_file)
        if self._salt is not None:
            _log.info(
                "tenant salts on, rejecting bodies by ext_authz and PickEndpoint: header=%s", config.salt_from
            )
        registry = CollectorRegistry()
        resources = read_resources(config.resources_file) if config.resources_file else Resources()
        self._rewrites = {
            pool: RewriteRules(resources.rules, np.random.default_rng()) for pool in pool_ports(config)
        }
        self._priorities: dict[str, Mapping[str, int]] = {}
        self._resources = threading.Lock()  # pools' objectives change on threads of their own
        self.pods = PodSet()
        self._admission, self._flow = build_admission(config, resources.priorities, self.pods, registry)
        self._ledger = Ledger(LedgerParameters(lifetime_s=config.request_lifetime_s), self.pods.load_table)
        self.rates = PrefillRates(
            RateParameters(prior_tokens_per_s=config.prefill_tokens_per_s), self.pods.load_table
        )
        self._metrics = RouterMetrics(registry)
        scheduler = self._scheduler = build_scheduler(config, self.pods, self._ledger, self._ranker)
        state = StateCollector(self.pods, self._ledger, time.monotonic, scheduler.queued_s, config.pool_name)
        registry.register(state)
        if config.compat != "off":
            registry.register(MetricAliases((*self._metrics.collectors, state)))
        self.decision_log = DecisionLog(_DECISIONS_KEPT, self._pod_name, self._metrics)
        # Lambdas, because the index is built later: it calls `lifecycle` too.
        self.lifecycle = Lifecycle(
            self._ledger,
            self.rates,
            self.decision_log,
            lambda request, now_s: self.index.settle(request, now_s),
            lambda request: self.index.cancel_expectation(request),
            PodFailures(self.pods.load_table, lambda pod, why: self.watch.mark_failing(pod, why)),
            StatePods(self.pods, lambda outcome: self._metrics.count("stateful_requests", outcome)),
        )
        self._lost_ends = LostEndDetector(self.lifecycle)
        self.health = Health()
        self._stopping = threading.Event()
        self._review_due_s = 0.0
        self._looked_s = 0.0
        self._give_back_due_s = 0.0
        self._listed_s: float | None = None
        self._housekeeper = threading.Thread(target=self._run_housekeeping, name="housekeeping", daemon=True)
        # Closed in reverse order: by `close`, or here if one of them cannot be opened.
        with ExitStack() as opened:
            self._open(registry, opened)
            self._opened = opened.pop_all()

    @property
    def ports(self) -> dict[str, int]:
        """Bound ports by listener: `grpc`, `grpc-health`, `metrics`."""
        more = {f"grpc-{pool}": grpc.port for pool, grpc in self._grpc.items()}
        first = more.pop(next(iter(more)))
        return {"grpc": first, **more, "grpc-health": self._grpc_health.port, "metrics": self._debug.port}

    def start(self) -> None:
        self.index.start()
        self.watch.start()
        self._source.start(self.watch.look)
        self._housekeeper.start()
        if self._flow is not None:
            self._flow.start()
        for grpc in (*self._grpc.values(), self._grpc_health):
            grpc.start()
        self._analysis.start()
        self._debug.start()
        self._fleet.start()
        _log.info("listening: %s", ", ".join(f"{name} {port}" for name, port in self.ports.items()))

    def drain(self) -> None:
        """Report NOT_SERVING, then wait up to the drain timeout for picks and streams in progress."""
        self._stop_housekeeping()
        for grpc in self._grpc.values():
            grpc.drain()
        deadline_s = time.monotonic() + self.config.drain_timeout_s
        while self._metrics.requests_inside and time.monotonic() < deadline_s:
            time.sleep(_HOUSEKEEPING_S)

    def close(self) -> None:
        """Close all parts and listeners. Idempotent."""
        self._stop_housekeeping()
        self._opened.close()

    def _open(self, registry: CollectorRegistry, opened: ExitStack) -> None:
        """Open the parts with sockets, threads and processes; each is closed before the parts it calls."""
        config = self.config
        self._source = opened.enter_context(closing(open_pods_source(config, registry, self._set_resources)))
        tokenize = TokenizeOptions(config.tokenize_deadline_s)
        observe = partial(self._metrics.observe, "render_seconds")
        self._tokenizers = TokenizerRegistry(open_tokenizers(dict(config.tokenizers)), tokenize, observe)
        opened.callback(self._tokenizers.close)
        registry.register(TokenizerCollector(self._tokenizers.local, self._tokenizers.renderings))
        self._traces = Traces() if config.tracing else None
        if self._traces is not None:
            opened.callback(self._traces.close)
        self.index = KvIndexer(
            config.index,
            registry=registry,
            on_stored=self.lifecycle.stored,
            # A lambda, because the pod watch is built later.
            on_link=lambda pod, up: self.watch.link(pod, up),
        )
        opened.callback(self.index.close)
        self._fleet = Fleet(
            config.index, self.index.exports.identity, self._ledger, self.pods, self.index, self.lifecycle
        )
        opened.callback(self._fleet.close)
        registry.register(self._fleet)
        self.watch = opened.enter_context(closing(self._pod_watch()))
        price, names_tenants = config.gpu_hour_price, config.salt_from is not None
        analysis = Analysis(self.pods, self.index, self.decision_log, price, names_tenants=names_tenants)
        self._analysis = opened.enter_context(closing(analysis))
        routed = Router(
            pods=self.pods,
            tokenizers=self._tokenizers,
            index=self.index,
            admission=self._admission,
            scheduler=self._scheduler,
            dispatched=self.lifecycle.decided,
            failures=self.lifecycle.failures,
            wake=self.watch.wake if config.wake_pods else None,
            flow=self._flow,
            picked=self._analysis.queue.picked,
        )
        routers = [
            ObservedRouter(routed, self._metrics, self._traces, self.lifecycle.states, pool)
            for pool in pool_ports(config)
        ]
        self.router = routers[0]
        self._listen(routers, registry, opened)

    def _listen(
        self, routers: Sequence[ObservedRouter], registry: CollectorRegistry, opened: ExitStack
    ) -> None:
        """Open the listeners: metrics, gRPC health, and a gRPC port for each of the routers."""
        config, explainer = self.config, Explainer(self.decision_log)
        self._debug = opened.enter_context(
            closing(listen_metrics(config, registry, self._pages(), explainer))
        )
        self._grpc_health = opened.enter_context(closing(listen_health(config, self.health)))
        may_block = pick_may_block(config, self._flow, self._tokenizers)
        streams = StreamMetrics(registry).opened if config.stream_metrics else None
        self._grpc: dict[str, GrpcServer] = {}
        for router, port in zip(routers, pool_ports(config).values(), strict=True):
            grpc = listen_grpc(config, port, self._services(router, streams, explainer), may_block=may_block)
            self._grpc[router.pool] = opened.enter_context(closing(grpc))
        self._tokenizers.waits = partial(move_picks, self._grpc.values())
        if self._flow is not None:
            # Closed before the listeners: requests queued in flow control occupy their threads.
            opened.callback(self._flow.close)

    def _pod_watch(self) -> PodWatch:
        config = self.config
        return PodWatch(
            self._source,
            self.pods,
            Prober(
                timeout_s=_PROBE_TIMEOUT_S,
                admin_token=config.index.admin_token,
                metrics_page=config.metrics_page,
            ),
            self.index.follow,
            interval_s=config.refresh_interval_s,
            engines=EngineCheck(
                self._ledger.answered_hit_tokens,
                self._ledger.predicted_hit_tokens,
                self.index.observe,
                self.index.faults,
            ),
            declared=self._forget_others,
        )

    def _pages(self) -> DebugPages:
        return DebugPages(
            source=self._source,
            pods=self.pods,
            index=self.index,
            decision_log=self.decision_log,
            health=self.health,
            plugins=lambda: plugin_states(self._ranker, self._flow),
            routers=self._fleet.status,
            picks_ignored=lambda: self.lifecycle.outcomes.picks_ignored,
            renderings=self._tokenizers.renderings,
            more=self._analysis.pages(),
            queued_s=self._scheduler.queued_s,
        )

    def _services(
        self,
        router: ObservedRouter,
        streams: Callable[[], Callable[[str], object]] | None,
        explainer: Explainer,
    ) -> list[Callable[[Any], object]]:
        """Return functions that register the services of a gRPC port with a server."""
        config, lifecycle, metrics = self.config, self.lifecycle, self._metrics
        salt, fields = self._salt, config.forbidden_fields
        # With salts, a body that cannot be read is rejected, too: it cannot be salted.
        guard = BodyGuard(
            fields if salt is None else fields + SALT_FIELDS,
            lambda: salt is not None or kv_connector_sign(config, self.pods.current) is not None,
        )
        ext_proc = self._ext_proc(router, guard)
        explainer.add(router.pool, ext_proc.dialect)
        return [
            lambda server: ext_proc.add_to(server, streams),
            ExtAuthzService(router, guard, metrics, config.max_request_bytes, salt).add_to,
            EndpointPickerService(router, lifecycle, metrics, self.pods, salt).add_to,
            AccessLogService(lifecycle, metrics, self.watch.mark_not_ready).add_to,
            self.index.exports.add_to,
            self._fleet.service.add_to,
            self.health.add_to,
        ]

    def _ext_proc(self, router: ObservedRouter, guard: BodyGuard) -> ExtProcService:
        config = self.config
        parts: dict[str, Any] = {
            "router": router,
            "guard": guard,
            "metrics": self._metrics,
            "salt": self._salt,
        }
        options = ExtProcOptions(config.max_request_bytes, config.responses_full, config.subset_filter)
        if config.compat == "off":
            return ExtProcService(NativeDialect(**parts), self.lifecycle, options)
        if config.picker is not None:
            parts |= configured_parts(config.picker)
        dialect = LlmdDialect(
            **parts,
            buffered_bytes_max=config.max_request_bytes,
            emits_scores=config.emit_endpoint_scores,
            pods=self.pods,
            rewrites=self._rewrites[router.pool],
        )
        evictable = self._flow.evictable if self._flow is not None else None
        return ExtProcService(dialect, self.lifecycle, options, evictable)

    def _stop_housekeeping(self) -> None:
        self._stopping.set()
        # Joined first: a running housekeeping pass could set the router ready again.
        if self._housekeeper.is_alive():
            self._housekeeper.join()
        self.health.set_ready(False)

    def _run_housekeeping(self) -> None:
        while not self._stopping.wait(_HOUSEKEEPING_S):
            try:
                self._housekeep(time.monotonic())
            except Exception:
                # The thread must survive: without it nothing expires and the router never becomes ready.
                _log.exception("housekeeping failed, will retry")

    def _housekeep(self, now_s: float) -> None:
        self.lifecycle.expire(now_s)
        self._lost_ends.check(self.pods.current, now_s)
        if now_s >= self._review_due_s:
            self._review_due_s = now_s + _REVIEW_EVERY_S
            self.index.check_mismatches()
            self.rates.expire(now_s)
        if now_s >= self._give_back_due_s:
            self._give_back_due_s = now_s + _GIVE_BACK_EVERY_S
            trim_heap()
        if now_s - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = now_s
            engines = self.index.engine_registry.engines.values()
            self._source.check(self.pods.current.values(), tuple(engines), now_s)
        if not self.health.ready and self._synced(now_s):
            sign = kv_connector_sign(self.config, self.pods.current)
            if sign is not None and self.config.forbidden_fields:
                _log.warning(
                    "KV connector detected, rejecting requests whose body cannot be checked: sign=%s; set "
                    "failure_mode_allow: false in the gateway",
                    sign,
                )
            self.health.set_ready(True)
            _log.info("ready")

    def _synced(self, now_s: float) -> bool:
        """Return whether all pods are listed, probed and their views built, or the time limit has passed."""
        if not self.watch.listed:
            return False
        if self._listed_s is None:
            self._listed_s = now_s
        late = now_s - self._listed_s > self.config.sync_timeout_s
        if not (self.watch.synced or late):
            return False
        pods = self.pods.current
        # All Ready pods are unreachable: probably a network policy does not yet admit this router.
        if self.config.kube is not None and not late and _all_unreachable(pods.values()):
            return False
        return not any(pod in pods and pods[pod].ready for pod in self.index.pending())

    def _pod_name(self, address: str) -> str:
        pod = self.pods.current.get(address)
        return pod.name if pod is not None else ""

    def _set_resources(self, pool: str, resources: Resources) -> None:
        """Apply changed objectives and rewrites of a pool; one name has the priority of the first pool."""
        with self._resources:
            self._priorities[pool] = resources.priorities
            priorities = dict(self.config.priorities)
            for each in reversed(self._rewrites):
                priorities |= self._priorities.get(each, {})
            self._admission.priorities = priorities
        self._rewrites[pool].replace(resources.rules)

    def _forget_others(self, pods: Collection[str], restarted: Collection[str]) -> None:
        # A restarted pod may run on another machine, so its learned rate is dropped.
        self.rates.keep(set(pods).difference(restarted))
        self._metrics.keep(pods)
        self._ledger.keep(pods)


def _all_unreachable(pods: Collection[Pod]) -> bool:
    """Return whether pods are declared ready and all of them fail their probes."""
    declared = [pod for pod in pods if pod.entry.ready]
    return bool(declared) and not any(pod.ready for pod in declared)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a router until a signal; return the status: 2: invalid configuration, 1: a port is in use."""
    try:
        config, flags = parse_flags(argv)
        if flags.print_config:
            print(config_as_yaml(config), end="")
            return 0
        set_up_logs(flags)
        ignored = ignored_parameters(config.picker) if config.picker is not None else ()
        for line in (*ignored_flags(flags), *ignored):
            _log.info(line)
        stop = StopSignals()
        raise_open_files()
        use_single_arena()
        return _serve(RouterServer(config), stop)
    except (ConfigError, IndexerConfigError, ListenError) as error:
        print(f"kvroute router: error: {error}", file=sys.stderr)
        return 1 if isinstance(error, ListenError) else 2


def _serve(server: RouterServer, stop: StopSignals) -> int:
    server.start()
    tune_gc()
    stop.wait()
    _log.info("draining")
    server.drain()
    server.close()
    _log.info("stopped")
    return 0
