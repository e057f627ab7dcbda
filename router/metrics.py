"""The router's Prometheus metrics: what the steps of a request report in, samples out.

`llm_d_epp_*` carry the reference picker's names and labels where they mean the same; `kvroute_router_*` are
ours. Per-pod gauges are read from the live state when scraped, so nothing has to keep them up to date.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache, partial
from threading import Lock
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from indexer.tallies import Tallies
from router.board import PodWork
from router.decision import Decision
from router.errors import RequestError
from router.ledger import Ledger
from router.pods import Pod, PodSet
from router.rates import PrefillRates

_MODELS_MAX = 1000
_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_TTFT_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_MODEL_LABELS = ("model_name", "target_model_name", "fairness_id", "priority")

_EPP, _OURS = "llm_d_epp_", "kvroute_router_"


class RouterMetrics:
    """All counters and histograms of one router."""

    def __init__(self, registry: CollectorRegistry) -> None:
        tallies = Tallies(registry)
        self._lock = tallies.lock
        self._make_picks(tallies)
        self._make_outcomes(tallies)
        self._open = Gauge(_OURS + "open_requests", "Requests inside a door.", ("door",), registry=registry)
        self._models = _CappedLabels(_MODELS_MAX)
        self._pods: frozenset[str] | None = None
        self._insides: dict[str, Inside] = {}

    def decided(self, decision: Decision, took_s: float) -> None:
        best, client = decision.ranked.best, decision.client_model
        model = self._models.admit(decision.model or "")
        named = model if client is None else self._models.admit(client)
        labels = _model_labels(named, model, decision.priority)
        with self._lock:
            self._picking.observe(took_s)
            self._requests.add(labels)
            self._picks.add((decision.degraded or "",))
            if decision.partial is not None:
                self._partial.add((decision.partial,))
            # A pick that is older than the pod's end must not bring its series back for good.
            if self._pods is None or best.pod in self._pods:
                self._attempts.add(_attempt_labels(model, best.pod))
            if decision.degraded is None:
                self._input.observe(decision.prompt_tokens, labels)
                self._predicted.add((), best.cached_tokens)
                self._best.add((), decision.ranked.most_cached_tokens)

    def refused(self, error: RequestError, took_s: float | None = None) -> None:
        """Counts an error that the router answers; without the model's name, which the client chose."""
        with self._lock:
            self._errors.add(("", "", "", "0", error.error_type))
            if took_s is not None:
                self._attempts.add(("failure", "", "", "", ""))
                self._picking.observe(took_s)

    def keep(self, pods: Collection[str]) -> None:
        """Drops the series of every pod but these."""
        kept = frozenset(pods)
        with self._lock:
            self._pods = kept
            self._attempts.drop(
                [labels for labels in self._attempts.series() if labels[2] and labels[2] not in kept]
            )

    def prefill_ended(self, source: str, after_s: float) -> None:
        with self._lock:
            self._prefill_ends.observe(after_s, (source,))

    def ended(self, source: str, *, failed: bool, late_s: float | None = None) -> None:
        """Counts the end of a request, and notes how late its source told of it; None: not worth a note."""
        with self._lock:
            self._ends.add((source, "failed" if failed else "done"))
            if late_s is not None:
                self._late.observe(max(0.0, late_s), ("end", source))

    def told_late(self, event: str, source: str, late_s: float) -> None:
        with self._lock:
            self._late.observe(max(0.0, late_s), (event, source))

    def delivered(self, predicted_tokens: int, delivered_tokens: int) -> None:
        """Counts a prediction together with what came true of it."""
        with self._lock:
            self._compared.add(number=predicted_tokens)
            self._delivered.add(number=delivered_tokens)

    def dropped(self, door: str, reason: str) -> None:
        with self._lock:
            self._dropped.add((door, reason))

    def logged(self, joins: Mapping[str, int]) -> None:
        """Counts access log entries, by what they joined."""
        with self._lock:
            for join, entries in joins.items():
                self._logged.add((join,), entries)

    def inside(self, door: str) -> Inside:
        """Counts a request as inside a door while the context lasts."""
        inside = self._insides.get(door)
        if inside is None:
            with self._lock:
                inside = self._insides.setdefault(door, Inside())
                self._open.labels(door).set_function(partial(getattr, inside, "requests"))
        return inside

    def _make_picks(self, make: Tallies) -> None:
        self._requests = make.counter(
            _EPP + "request_total", "Requests that were given a pod.", _MODEL_LABELS
        )
        self._errors = make.counter(
            _EPP + "request_error_total", "Requests answered with an error.", (*_MODEL_LABELS, "error_code")
        )
        self._attempts = make.counter(
            _EPP + "scheduler_attempts_total",
            "Picks by outcome.",
            ("status", "target_model_name", "endpoint_name", "namespace", "port"),
        )
        self._picking = make.histogram(
            _EPP + "scheduler_e2e_duration_seconds", "Time from a parsed request to its pick.", _SECONDS
        )
        self._input = make.histogram(_EPP + "request_input_tokens", "Prompt tokens.", _TOKENS, _MODEL_LABELS)
        self._picks = make.counter(
            _OURS + "picks_total", "Picks; `degraded` says why the cache's view was not used.", ("degraded",)
        )
        self._partial = make.counter(
            _OURS + "partial_prompts_total",
            "Picks by the beginning of a prompt alone; `partial` says why.",
            ("partial",),
        )
        self._predicted = make.counter(
            _OURS + "predicted_cached_tokens_total", "Cached tokens predicted on the picked pod."
        )
        self._best = make.counter(
            _OURS + "best_cached_tokens_total", "Cached tokens on the pod that held most."
        )
        self._compared = make.counter(
            _OURS + "compared_predicted_cached_tokens_total",
            "Predictions of requests whose delivery was told.",
        )
        self._delivered = make.counter(
            _OURS + "delivered_cached_tokens_total", "Cached tokens that pods said they served."
        )

    def _make_outcomes(self, make: Tallies) -> None:
        self._prefill_ends = make.histogram(
            _OURS + "prefill_end_seconds",
            "Dispatch to end of prefill, by who told; what the clock guessed, others may tell yet.",
            _TTFT_SECONDS,
            ("source",),
        )
        self._ends = make.counter(
            _OURS + "request_ends_total", "Ended requests, by who told.", ("source", "outcome")
        )
        self._late = make.histogram(
            _OURS + "told_late_seconds",
            "How late an event was told: by the source's own account, or after the first to tell.",
            _TTFT_SECONDS,
            ("event", "source"),
        )
        self._dropped = make.counter(
            _OURS + "dropped_messages_total", "Messages from outside that made no sense.", ("door", "reason")
        )
        self._logged = make.counter(
            _OURS + "access_log_entries_total", "Access log entries by what they joined.", ("join",)
        )

    @property
    def requests_inside(self) -> int:
        return sum(inside.requests for inside in list(self._insides.values()))


class Inside:
    """Counts who is inside; one for all who enter the same door."""

    __slots__ = ("_within",)

    def __init__(self) -> None:
        # As long as there are many inside: to append and to pop are one step each, and need no lock.
        self._within: deque[None] = deque()

    @property
    def requests(self) -> int:
        return len(self._within)

    def __enter__(self) -> None:
        self._within.append(None)

    def __exit__(self, *_error: object) -> None:
        self._within.pop()


class _Seen(NamedTuple):
    """What there is to see of a pod."""

    pod: Pod
    work: PodWork
    rates: PrefillRates
    now_s: float


_PER_POD: tuple[tuple[str, str, Callable[[_Seen], float | None]], ...] = (
    ("ready", "1 if the pod may be given requests.", lambda seen: seen.pod.takes_requests),
    ("asleep", "1 if its engine sleeps.", lambda seen: seen.pod.asleep),
    ("awaiting", "Requests awaiting a first token.", lambda seen: seen.work.awaiting),
    ("awaiting_tokens", "Uncached tokens of these.", lambda seen: seen.work.awaiting_tokens),
    ("decoding", "Requests past it.", lambda seen: seen.work.decoding),
    ("prefill_tokens_per_second", "Learnt speed.", lambda seen: seen.rates.tokens_per_s(seen.pod.address)),
    (
        "decode_slowdown",
        "By how much of itself a prefill gets slower per decoding request, learnt or believed.",
        lambda seen: seen.rates.decode_slowdown(seen.pod.address),
    ),
    (
        "kv_usage",
        "Scraped share of the KV cache in use.",
        lambda seen: seen.pod.load.kv_usage if seen.pod.load else None,
    ),
    ("waiting", "Scraped queue length.", lambda seen: seen.pod.load.waiting if seen.pod.load else None),
    ("hides_load", "1 if the pod answers, but its metrics tell no load.", lambda seen: seen.pod.hides_load),
    (
        "scrape_age_seconds",
        "Age of these.",
        lambda seen: seen.now_s - seen.pod.load.scraped_s if seen.pod.load else None,
    ),
)


class StateCollector(Collector):
    """Gauges of the live state: pods, work and rates.

    Args:
        now_s: The router's monotonic clock.
        pool: The pods' name as a whole.
    """

    def __init__(
        self,
        pods: PodSet,
        ledger: Ledger,
        rates: PrefillRates,
        now_s: Callable[[], float],
        pool: str = "default",
    ) -> None:
        self._pods = pods
        self._ledger = ledger
        self._rates = rates
        self._now_s = now_s
        self._pool = pool

    def collect(self) -> Iterable[Metric]:
        pods = self._pods.snapshot()
        ready = GaugeMetricFamily(
            _EPP + "ready_endpoints", "Pods that may be given requests.", labels=["name"]
        )
        ready.add_metric([self._pool], sum(pod.takes_requests for pod in pods.values()))
        yield ready
        yield GaugeMetricFamily(_EPP + "request_running", "Requests in flight.", value=len(self._ledger))
        yield GaugeMetricFamily(
            _OURS + "fleet_prefill_tokens_per_second",
            "Speed believed of a pod of which nothing is known.",
            value=self._rates.fleet_tokens_per_s,
        )
        now_s = self._now_s()
        seen = [_Seen(pod, self._ledger.work(address), self._rates, now_s) for address, pod in pods.items()]
        for name, text, read in _PER_POD:
            family = GaugeMetricFamily(f"{_OURS}pod_{name}", text, labels=["pod"])
            for one in seen:
                if (value := read(one)) is not None:
                    family.add_metric([one.pod.address], float(value))
            yield family
        untold = GaugeMetricFamily(
            _OURS + "pod_load_untold",
            "1 for each figure that the pod's metrics do not tell, or not sensibly, beside others.",
            labels=["pod", "figure"],
        )
        for pod in pods.values():
            for figure in pod.load.untold if pod.load is not None else ():
                untold.add_metric([pod.address, figure], 1.0)
        yield untold


class _CappedLabels:
    """The first so many values as they are; all later ones as "other"."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._known: set[str] = set()
        self._lock = Lock()

    def admit(self, value: str) -> str:
        if value in self._known:
            return value
        with self._lock:
            if len(self._known) >= self._capacity or len(value) > 256:
                return "other"
            self._known.add(value)
            return value


@lru_cache(maxsize=1024)
def _model_labels(named: str, model: str, priority: int) -> tuple[str, ...]:
    return named, model, "", str(priority)


@lru_cache(maxsize=4096)
def _attempt_labels(model: str, pod: str) -> tuple[str, ...]:
    return "success", model, pod, "", pod.rpartition(":")[2]
