"""The router process: a RouterConfig in, a running endpoint picker out; wires the parts, owns their lives."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from indexer import ConfigError as IndexerConfigError
from indexer import KvIndexer
from indexer.streams.subscriber import raise_open_files
from router.app.config import RouterConfig, parse_flags
from router.app.debug_pages import DebugPages
from router.app.print_config import printed_config
from router.app.process import StopSignals, calm_collector, give_back, set_up_logs, use_one_heap
from router.app.wiring import (
    connector_sign,
    entrance,
    listen_grpc,
    listen_health,
    listen_metrics,
    may_wait,
    open_source,
    plugin_states,
    ranker,
    scheduler,
)
from router.config.flags import told_in_vain
from router.config.resources import Resources, RewriteRules, read_resources
from router.doors.access_log import AccessLogDoor
from router.doors.ext_authz import CheckDoor
from router.doors.ext_proc import ExtProcDoor, ExtProcOptions
from router.doors.ext_proc_forms import OwnForm, llmd_form
from router.doors.health import Health
from router.doors.pick import PickDoor
from router.errors import ConfigError, ListenError
from router.feedback.fleet import Fleet
from router.feedback.lifecycle import EngineWatch, Outcomes, Reconciler
from router.inflight.ledger import Ledger, LedgerParameters
from router.inflight.rates import PrefillRates, RateParameters
from router.observe.decision_log import Explain
from router.observe.metrics import (
    MetricTwins,
    RouterMetrics,
    StateCollector,
    StreamMetrics,
    TokenizerCollector,
)
from router.observe.tracing import Traces
from router.picking.route import Router
from router.pods.pod_set import Pod, PodSet
from router.pods.probe import Prober
from router.pods.watch import PodWatch
from router.prompts.body_guard import BodyGuard
from router.prompts.tokenizers import TokenizeOptions, TokenizerRegistry

_log = logging.getLogger(__name__)

_DECISIONS_KEPT = 1000
_HOUSEKEEPING_S = 0.05
_PROBE_TIMEOUT_S = 1.0
_REVIEW_EVERY_S = 5.0
_LOOK_EVERY_S = 1.0
_GIVE_BACK_EVERY_S = 60.0


class RouterServer:
    """One router with all its doors.

    Raises:
        ConfigError: The pods file or a tokenizer is wrong, or there are no credentials for a cluster.
        ListenError: A port is in use.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        # What the configuration may have wrong comes before whatever opens sockets.
        self._ranker = ranker(config)
        registry = CollectorRegistry()
        resources = read_resources(config.resources_file) if config.resources_file else Resources()
        self._rewrites = RewriteRules(resources.rules, np.random.default_rng())
        self.pods = PodSet()
        self._admission, self._flow = entrance(config, resources.priorities, self.pods, registry)
        self._ledger = Ledger(LedgerParameters(lifetime_s=config.request_lifetime_s), self.pods.board)
        self.rates = PrefillRates(
            RateParameters(prior_tokens_per_s=config.prefill_tokens_per_s), self.pods.board
        )
        self._metrics = RouterMetrics(registry)
        registry.register(StateCollector(self.pods, self._ledger, time.monotonic, config.pool_name))
        if config.compat != "off":
            registry.register(MetricTwins(registry))
        self.explain = Explain(_DECISIONS_KEPT, self._pod_name)
        # The index is made after those who call it: it calls them, too.
        self.outcomes = Outcomes(
            self._ledger,
            self.rates,
            self.explain,
            self._metrics,
            lambda request, now_s: self.index.settle(request, now_s),
            lambda request: self.index.cancel_expectation(request),
        )
        self._reconciler = Reconciler(self.outcomes)
        self.health = Health()
        self._stopping = threading.Event()
        self._review_due_s = 0.0
        self._looked_s = 0.0
        self._give_back_due_s = 0.0
        self._listed_s: float | None = None
        self._housekeeper = threading.Thread(target=self._keep_house, name="housekeeping", daemon=True)
        # Closed in the other order: by `close`, or at once if one of them cannot be had.
        with ExitStack() as opened:
            self._open(registry, opened)
            self._opened = opened.pop_all()

    @property
    def ports(self) -> dict[str, int]:
        """The bound ports by flag."""
        return {"grpc": self._grpc.port, "grpc-health": self._grpc_health.port, "metrics": self._debug.port}

    @property
    def requests_in_flight(self) -> int:
        """Requests dispatched and not heard to have ended."""
        return len(self._ledger)

    def start(self) -> None:
        self.index.start()
        self.watch.start()
        self._source.start(self.watch.look)
        self._housekeeper.start()
        if self._flow is not None:
            self._flow.start()
        for listener in (self._grpc, self._grpc_health, self._debug):
            listener.start()
        self._fleet.start()
        _log.info("listening: %s", ", ".join(f"{name} {port}" for name, port in self.ports.items()))

    def drain(self) -> None:
        """Tells gateways to go elsewhere and waits, with a limit, for the requests inside the doors."""
        self._stop_housekeeping()
        self._grpc.drain()
        deadline_s = time.monotonic() + self.config.drain_timeout_s
        while self._metrics.requests_inside and time.monotonic() < deadline_s:
            time.sleep(_HOUSEKEEPING_S)

    def close(self) -> None:
        """Ends everything; idempotent."""
        self._stop_housekeeping()
        self._opened.close()

    def _open(self, registry: CollectorRegistry, opened: ExitStack) -> None:
        """Makes the parts that hold sockets, loops and processes; each is closed before what it calls."""
        config = self.config
        self._source = opened.enter_context(closing(open_source(config, registry, self._take)))
        tokenize = TokenizeOptions(config.tokenize_deadline_s)
        self._tokenizers = TokenizerRegistry.load(dict(config.tokenizers), tokenize)
        opened.callback(self._tokenizers.close)
        registry.register(TokenizerCollector(self._tokenizers.local))
        self._traces = Traces.to_collector() if config.tracing else None
        if self._traces is not None:
            opened.callback(self._traces.close)
        self.index = KvIndexer(
            config.index,
            registry=registry,
            on_stored=self.outcomes.stored,
            # Likewise made after the index.
            on_link=lambda pod, up: self.watch.link(pod, up),
        )
        opened.callback(self.index.close)
        self._fleet = Fleet(
            config.index, self.index.exports.identity, self._ledger, self.pods, self.index, self.outcomes
        )
        opened.callback(self._fleet.close)
        registry.register(self._fleet)
        if config.index.peers:
            self.outcomes.join(self._fleet)
        self.watch = opened.enter_context(closing(self._pod_watch()))
        self.router = Router(
            pods=self.pods,
            tokenizers=self._tokenizers,
            index=self.index,
            admission=self._admission,
            scheduler=scheduler(config, self.pods, self._ledger, self._ranker),
            sink=self.outcomes,
            flow=self._flow,
            traces=self._traces,
        )
        self._debug = opened.enter_context(closing(listen_metrics(config, registry, self._pages())))
        self._grpc_health = opened.enter_context(closing(listen_health(config, self.health)))
        waits = may_wait(config, self._flow, self._tokenizers)
        grpc = listen_grpc(config, self._services(registry), may_wait=waits)
        self._grpc = opened.enter_context(closing(grpc))
        if self._flow is not None:
            # Before the doors: whoever waits in it waits in them.
            opened.callback(self._flow.close)

    def _pod_watch(self) -> PodWatch:
        config = self.config
        return PodWatch(
            self._source,
            self.pods,
            Prober(
                timeout_s=_PROBE_TIMEOUT_S,
                admin_token=config.index.admin_token,
                metrics_path=config.metrics_path,
            ),
            self.index.follow,
            interval_s=config.refresh_interval_s,
            engines=EngineWatch(self._ledger, self.index.observe),
            declared=self._forget_others,
        )

    def _pages(self) -> DebugPages:
        return DebugPages(
            source=self._source,
            pods=self.pods,
            index=self.index,
            explain=self.explain,
            health=self.health,
            plugins=lambda: plugin_states(self._ranker, self._flow),
            routers=self._fleet.shown,
        )

    def _services(self, registry: CollectorRegistry) -> list[Callable[[Any], object]]:
        """Make the doors of the gRPC port; each adds its service to a server."""
        config, outcomes, metrics = self.config, self.outcomes, self._metrics
        guard = BodyGuard(
            config.forbidden_fields, lambda: connector_sign(config, self.pods.snapshot()) is not None
        )
        ext_proc = self._ext_proc(guard)
        opened = StreamMetrics(registry).opened if config.stream_metrics else None
        return [
            lambda server: ext_proc.add_to(server, opened),
            CheckDoor(self.router, guard, metrics, config.max_request_bytes).add_to,
            PickDoor(self.router, outcomes, metrics, self.pods).add_to,
            AccessLogDoor(outcomes, metrics, self.watch.distrust).add_to,
            self.index.exports.add_to,
            self._fleet.door.add_to,
            self.health.add_to,
        ]

    def _ext_proc(self, guard: BodyGuard) -> ExtProcDoor:
        config, router, metrics = self.config, self.router, self._metrics
        options = ExtProcOptions(config.max_request_bytes, config.responses_full, config.subset_filter)
        if config.compat == "off":
            return ExtProcDoor(OwnForm(router=router, guard=guard, metrics=metrics), self.outcomes, options)
        form = llmd_form(config, self._rewrites, router, guard, metrics, self.pods)
        evictions = self._flow.evictions if self._flow is not None else None
        return ExtProcDoor(form, self.outcomes, options, evictions)

    def _stop_housekeeping(self) -> None:
        self._stopping.set()
        # Only then can a late sync no longer make us ready again.
        if self._housekeeper.is_alive():
            self._housekeeper.join()
        self.health.set_ready(False)

    def _keep_house(self) -> None:
        while not self._stopping.wait(_HOUSEKEEPING_S):
            try:
                self._tidy(time.monotonic())
            except Exception:
                # Without housekeeping nothing would expire, and the router never be ready.
                _log.exception("housekeeping failed; it goes on")

    def _tidy(self, now_s: float) -> None:
        self.outcomes.expire(now_s)
        self._reconciler.look(self.pods.snapshot(), now_s)
        if now_s >= self._review_due_s:
            self._review_due_s = now_s + _REVIEW_EVERY_S
            self.index.check_mismatches()
            self.rates.review(now_s)
        if now_s >= self._give_back_due_s:
            self._give_back_due_s = now_s + _GIVE_BACK_EVERY_S
            give_back()
        if now_s - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = now_s
            engines = self.index.engine_registry.engines.values()
            self._source.look(self.pods.snapshot().values(), tuple(engines), now_s)
        if not self.health.ready and self._synced(now_s):
            sign = connector_sign(self.config, self.pods.snapshot())
            if sign is not None and self.config.forbidden_fields:
                _log.warning(
                    "engines have a KV connector, so requests whose body cannot be checked are refused: "
                    "sign=%s; the gateway must not fail open (failure_mode_allow: false)",
                    sign,
                )
            self.health.set_ready(True)
            _log.info("ready")

    def _synced(self, now_s: float) -> bool:
        """Whether it is known which pods there are, each was asked, and its view built; or had their time."""
        if not self.watch.listed:
            return False
        if self._listed_s is None:
            self._listed_s = now_s
        late = now_s - self._listed_s > self.config.sync_timeout_s
        if not (self.watch.synced or late):
            return False
        pods = self.pods.snapshot()
        # Pods that are Ready and refuse us, all of them: it is we whom a network policy does not know yet.
        if self.config.kube is not None and not late and _all_refuse(pods.values()):
            return False
        return not any(pod in pods and pods[pod].ready for pod in self.index.pending())

    def _pod_name(self, address: str) -> str:
        pod = self.pods.snapshot().get(address)
        return pod.name if pod is not None else ""

    def _take(self, resources: Resources) -> None:
        """Objectives and rewrites of the cluster, whenever they change."""
        self._admission.priorities = dict(self.config.priorities) | dict(resources.priorities)
        self._rewrites.replace(resources.rules)

    def _forget_others(self, pods: Collection[str], anew: Collection[str]) -> None:
        # What begins anew may be another machine.
        self.rates.keep(set(pods).difference(anew))
        self._metrics.keep(pods)
        self._ledger.keep(pods)


def _all_refuse(pods: Collection[Pod]) -> bool:
    """Whether some pods are declared as ready, and none of them answered."""
    declared = [pod for pod in pods if pod.entry.ready]
    return bool(declared) and not any(pod.ready for pod in declared)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a router until SIGTERM or SIGINT; returns the exit status."""
    try:
        config, flags = parse_flags(argv)
        if flags.print_config:
            print(printed_config(config), end="")
            return 0
        set_up_logs(flags)
        for line in told_in_vain(flags):
            _log.info(line)
        if config.compat != "off" and config.tls is None:
            _log.info("the gRPC port is without TLS; the reference's default is --secure-serving")
        stop = StopSignals()
        raise_open_files()
        use_one_heap()
        return _serve(RouterServer(config), stop)
    except (ConfigError, IndexerConfigError) as error:
        print(f"kvroute router: error: {error}", file=sys.stderr)
        return 2
    except ListenError as error:
        print(f"kvroute router: error: {error}", file=sys.stderr)
        return 1


def _serve(server: RouterServer, stop: StopSignals) -> int:
    server.start()
    calm_collector()
    stop.wait()
    _log.info("draining")
    server.drain()
    server.close()
    _log.info("ended")
    return 0
