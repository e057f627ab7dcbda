"""The router's Prometheus metrics: what the steps of a request report in, samples out.

`llm_d_epp_*` carry the reference picker's names and labels where they mean the same; `kvroute_router_*` are
ours. Per-pod gauges are read from the live state when scraped, so nothing has to keep them up to date.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Lock

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.decision import Decision
from router.errors import RequestError
from router.ledger import Ledger
from router.pods import PodSet
from router.rates import PrefillRates

_MODELS_MAX = 1000
_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_TTFT_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_MODEL_LABELS = ("model_name", "target_model_name", "fairness_id", "priority")


class RouterMetrics:
    """All counters and histograms of one router."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def histogram(
            name: str, text: str, buckets: Iterable[float], labels: Iterable[str] = ()
        ) -> Histogram:
            return Histogram(name, text, labels, buckets=tuple(buckets), registry=registry)

        epp, ours = "llm_d_epp_", "kvroute_router_"
        self._requests = counter(epp + "request_total", "Requests that were given a pod.", _MODEL_LABELS)
        self._errors = counter(
            epp + "request_error_total", "Requests answered with an error.", (*_MODEL_LABELS, "error_code")
        )
        self._attempts = counter(
            epp + "scheduler_attempts_total",
            "Picks by outcome.",
            ("status", "target_model_name", "endpoint_name", "namespace", "port"),
        )
        self._picking = histogram(
            epp + "scheduler_e2e_duration_seconds", "Time from a parsed request to its pick.", _SECONDS
        )
        self._input = histogram(epp + "request_input_tokens", "Prompt tokens.", _TOKENS, _MODEL_LABELS)
        self._picks = counter(
            ours + "picks_total", "Picks; `degraded` says why the cache's view was not used.", ("degraded",)
        )
        self._predicted = counter(
            ours + "predicted_cached_tokens_total", "Cached tokens predicted on the picked pod."
        )
        self._best = counter(ours + "best_cached_tokens_total", "Cached tokens on the pod that held most.")
        self._compared = counter(
            ours + "compared_predicted_cached_tokens_total",
            "Predictions of requests whose delivery was told.",
        )
        self._delivered = counter(
            ours + "delivered_cached_tokens_total", "Cached tokens that pods said they served."
        )
        self._prefill_ends = histogram(
            ours + "prefill_end_seconds",
            "Dispatch to end of prefill, by who told.",
            _TTFT_SECONDS,
            ("source",),
        )
        self._ends = counter(
            ours + "request_ends_total", "Ended requests, by who told.", ("source", "outcome")
        )
        self._dropped = counter(
            ours + "dropped_messages_total", "Messages from outside that made no sense.", ("door", "reason")
        )
        self._logged = counter(
            ours + "access_log_entries_total", "Access log entries by what they joined.", ("join",)
        )
        self._open = Gauge(ours + "open_requests", "Requests inside a door.", ("door",), registry=registry)
        self._models = _CappedLabels(_MODELS_MAX)
        self._inside = 0
        self._lock = Lock()

    def decided(self, decision: Decision, took_s: float) -> None:
        """Counts a pick."""
        model = self._models.admit(decision.model or "")
        best = decision.primary
        self._requests.labels(model, model, "", "0").inc()
        self._attempts.labels("success", model, best.pod, "", best.pod.rpartition(":")[2]).inc()
        self._picking.observe(took_s)
        self._picks.labels(decision.degraded or "").inc()
        if decision.degraded is None:
            self._input.labels(model, model, "", "0").observe(decision.prompt_tokens)
            self._predicted.inc(best.cached_tokens)
            self._best.inc(decision.best_cached_tokens)

    def refused(self, error: RequestError, took_s: float | None = None) -> None:
        """Counts an error that the router answers; without the model's name, which the client chose."""
        self._errors.labels("", "", "", "0", error.error_type).inc()
        if took_s is not None:
            self._attempts.labels("failure", "", "", "", "").inc()
            self._picking.observe(took_s)

    def prefill_ended(self, source: str, after_s: float) -> None:
        """Counts the end of a prefill."""
        self._prefill_ends.labels(source).observe(after_s)

    def ended(self, source: str, *, failed: bool) -> None:
        """Counts the end of a request."""
        self._ends.labels(source, "failed" if failed else "done").inc()

    def delivered(self, predicted_tokens: int, delivered_tokens: int) -> None:
        """Counts a prediction together with what came true of it."""
        self._compared.inc(predicted_tokens)
        self._delivered.inc(delivered_tokens)

    def dropped(self, door: str, reason: str) -> None:
        """Counts a message that was ignored."""
        self._dropped.labels(door, reason).inc()

    def logged(self, join: str) -> None:
        """Counts an access log entry."""
        self._logged.labels(join).inc()

    @contextmanager
    def inside(self, door: str) -> Iterator[None]:
        """Counts a request as inside a door while the context lasts."""
        with self._lock:
            self._inside += 1
        with self._open.labels(door).track_inprogress():
            try:
                yield
            finally:
                with self._lock:
                    self._inside -= 1

    @property
    def requests_inside(self) -> int:
        """Requests inside the doors now."""
        return self._inside


class StateCollector(Collector):
    """Gauges of the live state: pods, work and rates.

    Args:
        now_s: The router's monotonic clock.
    """

    def __init__(self, pods: PodSet, ledger: Ledger, rates: PrefillRates, now_s: Callable[[], float]) -> None:
        self._pods = pods
        self._ledger = ledger
        self._rates = rates
        self._now_s = now_s

    def collect(self) -> Iterable[Metric]:
        """Reads the state."""
        pods = self._pods.snapshot()
        works = {address: self._ledger.work(address) for address in pods}
        loads = {address: pod.load for address, pod in pods.items() if pod.load is not None}
        ready = GaugeMetricFamily(
            "llm_d_epp_ready_endpoints", "Pods that may be given requests.", labels=["name"]
        )
        ready.add_metric(["default"], sum(pod.ready for pod in pods.values()))
        yield ready
        yield GaugeMetricFamily("llm_d_epp_request_running", "Requests in flight.", value=len(self._ledger))
        yield _per_pod(
            "pod_ready", "1 if the pod may be given requests.", {a: p.ready for a, p in pods.items()}
        )
        yield _per_pod(
            "pod_awaiting", "Requests awaiting a first token.", {a: w.awaiting for a, w in works.items()}
        )
        yield _per_pod(
            "pod_awaiting_tokens",
            "Uncached tokens of these.",
            {a: w.awaiting_tokens for a, w in works.items()},
        )
        yield _per_pod("pod_decoding", "Requests past it.", {a: w.decoding for a, w in works.items()})
        yield _per_pod(
            "pod_prefill_tokens_per_second", "Learnt speed.", {a: self._rates.tokens_per_s(a) for a in pods}
        )
        yield _per_pod(
            "pod_kv_usage", "Scraped share of the KV cache in use.", {a: s.kv_usage for a, s in loads.items()}
        )
        yield _per_pod("pod_waiting", "Scraped queue length.", {a: s.waiting for a, s in loads.items()})
        now_s = self._now_s()
        yield _per_pod(
            "pod_scrape_age_seconds", "Age of these.", {a: now_s - s.scraped_s for a, s in loads.items()}
        )


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


def _per_pod(name: str, text: str, values: dict[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"kvroute_router_{name}", text, labels=["pod"])
    for pod, value in values.items():
        family.add_metric([pod], float(value))
    return family
