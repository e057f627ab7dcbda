"""The router's Prometheus metrics: what the steps of a request report in, samples out.

`llm_d_epp_*` carry the reference picker's names and labels where they mean the same; `kvroute_router_*` are
ours. Per-pod gauges are read from the live state when scraped, so nothing has to keep them up to date.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import Lock, local
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.counters import BatchedMetrics
from router.errors import RequestError
from router.inflight.ledger import Ledger
from router.picking.decision import Decision
from router.pods.load_table import PodWork
from router.pods.pod_set import Pod, PodSet
from tokenization import PromptTokenizer

_MODELS_MAX = 1000
_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_TTFT_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_STREAM_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_MODEL_LABELS = ("model_name", "target_model_name", "fairness_id", "priority")

_EPP, _OURS = "llm_d_epp_", "kvroute_router_"

# By our name: the metric's, its text and its labels.
_COUNTERS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "requests": (_EPP + "request_total", "Requests that were given a pod.", _MODEL_LABELS),
    "errors": (
        _EPP + "request_error_total",
        "Requests answered with an error.",
        (*_MODEL_LABELS, "error_code"),
    ),
    "attempts": (
        _EPP + "scheduler_attempts_total",
        "Picks by outcome.",
        ("status", "target_model_name", "endpoint_name", "namespace", "port"),
    ),
    "picks": (
        _OURS + "picks_total",
        "Picks; `degraded` says why the cache's view was not used.",
        ("degraded",),
    ),
    "partial": (
        _OURS + "partial_prompts_total",
        "Picks by the beginning of a prompt alone; `partial` says why.",
        ("partial",),
    ),
    "predicted": (_OURS + "predicted_cached_tokens_total", "Cached tokens predicted on the picked pod.", ()),
    "best": (_OURS + "best_cached_tokens_total", "Cached tokens on the pod that held most.", ()),
    "compared": (
        _OURS + "compared_predicted_cached_tokens_total",
        "Predictions of requests whose delivery was told.",
        (),
    ),
    "delivered": (_OURS + "delivered_cached_tokens_total", "Cached tokens that pods said they served.", ()),
    "ends": (_OURS + "request_ends_total", "Ended requests, by who told.", ("source", "outcome")),
    "dropped": (
        _OURS + "dropped_messages_total",
        "Messages from outside that made no sense.",
        ("door", "reason"),
    ),
    "logged": (_OURS + "access_log_entries_total", "Access log entries by what they joined.", ("join",)),
}
# With their buckets before their labels.
_HISTOGRAMS: Mapping[str, tuple[str, str, tuple[float, ...], tuple[str, ...]]] = {
    "picking": (
        _EPP + "scheduler_e2e_duration_seconds",
        "Time from a parsed request to its pick.",
        _SECONDS,
        (),
    ),
    "input": (_EPP + "request_input_tokens", "Prompt tokens.", _TOKENS, _MODEL_LABELS),
    "prefill_ends": (
        _OURS + "prefill_end_seconds",
        "Dispatch to end of prefill, by who told; what the clock guessed, others may tell yet.",
        _TTFT_SECONDS,
        ("source",),
    ),
    "late": (
        _OURS + "told_late_seconds",
        "How late an event was told: by the source's own account, or after the first to tell.",
        _TTFT_SECONDS,
        ("event", "source"),
    ),
}

_OBJECTIVE = "inference_objective_"
# By name: the older one.
_TWINS = {
    "llm_d_epp_request": f"{_OBJECTIVE}request",
    "llm_d_epp_request_error": f"{_OBJECTIVE}request_error",
    "llm_d_epp_request_input_tokens": f"{_OBJECTIVE}input_tokens",
    "llm_d_epp_request_running": f"{_OBJECTIVE}running_requests",
    "llm_d_epp_ready_endpoints": "inference_pool_ready_pods",
    "llm_d_epp_scheduler_e2e_duration_seconds": "inference_extension_scheduler_e2e_duration_seconds",
}


class RouterMetrics:
    """All counters and histograms of one router."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = BatchedMetrics(registry)
        self._lock = make.lock
        self._counts = {name: make.counter(*told) for name, told in _COUNTERS.items()}
        self._spreads = {name: make.histogram(*told) for name, told in _HISTOGRAMS.items()}
        self._open = Gauge(_OURS + "open_requests", "Requests inside a door.", ("door",), registry=registry)
        self._models = _CappedLabels(_MODELS_MAX)
        self._pods: frozenset[str] | None = None

    def picked(self, took_s: float, decision: Decision | None) -> None:
        """Count a pick that took so many seconds; None: it failed."""
        if decision is None:
            with self._lock:
                self._counts["attempts"].add(("failure", "", "", "", ""))
                self._spreads["picking"].observe(took_s)
            return
        best, client, count = decision.primary, decision.client_model, self._counts
        model = self._models.admit(decision.model or "")
        named = model if client is None else self._models.admit(client)
        labels = named, model, "", str(decision.priority)
        with self._lock:
            self._spreads["picking"].observe(took_s)
            count["requests"].add(labels)
            count["picks"].add((decision.degraded or "",))
            if decision.partial is not None:
                count["partial"].add((decision.partial,))
            # A pick that is older than the pod's end must not bring its series back for good.
            if self._pods is None or best.pod in self._pods:
                count["attempts"].add(("success", model, best.pod, "", best.pod.rpartition(":")[2]))
            if decision.degraded is None:
                self._spreads["input"].observe(decision.prompt_tokens, labels)
                count["predicted"].add((), best.cached_tokens)
                count["best"].add((), decision.ranked.most_cached_tokens)

    def refused(self, error: RequestError) -> None:
        """Counts an error that the router answers; without the model's name, which the client chose."""
        with self._lock:
            self._counts["errors"].add(("", "", "", "0", error.error_type))

    def keep(self, pods: Collection[str]) -> None:
        """Drops the series of every pod but these."""
        self._pods, attempts = frozenset(pods), self._counts["attempts"]
        with self._lock:
            attempts.drop(
                [labels for labels in attempts.series() if labels[2] and labels[2] not in self._pods]
            )

    def count(self, name: str, *labels: str, number: float = 1.0) -> None:
        """Counts under one of the names of `_COUNTERS`."""
        with self._lock:
            self._counts[name].add(labels, number)

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Notes a value, as 0 where clocks make it negative, under one of the names of `_HISTOGRAMS`."""
        with self._lock:
            self._spreads[name].observe(max(0.0, value), labels)

    def ended(self, source: str, *, failed: bool, late_s: float | None = None) -> None:
        """Counts the end of a request, and notes how late its source told of it; None: not worth a note."""
        self.count("ends", source, "failed" if failed else "done")
        if late_s is not None:
            self.observe("late", late_s, "end", source)

    def inside(self, door: str) -> AbstractContextManager[None]:
        """Counts a request as inside a door while the context lasts; to be entered any number of times."""
        return self._open.labels(door).track_inprogress()

    @property
    def requests_inside(self) -> int:
        return sum(int(sample.value) for family in self._open.collect() for sample in family.samples)


class StreamMetrics:
    """Metrics of ext_proc streams beside those of requests, under the reference picker's names.

    Off unless asked for, as in the reference.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        name = _EPP + "extproc_stream"
        self._open = Gauge(f"{name}s_inflight", "Open ext_proc streams.", registry=registry)
        self._durations = Histogram(
            f"{name}_duration_seconds",
            "How long ext_proc streams were open.",
            buckets=_STREAM_SECONDS,
            registry=registry,
        )
        self._ended = Counter(f"{name}s_total", "Ended ext_proc streams.", ("code",), registry=registry)

    def opened(self) -> Callable[[str], None]:
        """Count a stream; what is returned is to be called with the code that it ends with."""
        self._open.inc()
        started_s = time.monotonic()

        def ended(code: str) -> None:
            self._open.dec()
            self._durations.observe(time.monotonic() - started_s)
            self._ended.labels(code).inc()

        return ended


class _Seen(NamedTuple):
    """What there is to see of a pod."""

    pod: Pod
    work: PodWork
    tokens_per_s: float
    now_s: float


_PER_POD: tuple[tuple[str, str, Callable[[_Seen], float | None]], ...] = (
    ("ready", "1 if the pod may be given requests.", lambda seen: seen.pod.takes_requests),
    ("asleep", "1 if its engine sleeps.", lambda seen: seen.pod.asleep),
    ("awaiting", "Requests awaiting a first token.", lambda seen: seen.work.awaiting),
    ("awaiting_tokens", "Uncached tokens of these.", lambda seen: seen.work.awaiting_tokens),
    ("decoding", "Requests past it.", lambda seen: seen.work.decoding),
    ("prefill_tokens_per_second", "Learnt speed.", lambda seen: seen.tokens_per_s),
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


@dataclass(eq=False, slots=True)
class StateCollector(Collector):
    """Gauges of the live state: pods, work and rates."""

    pods: PodSet
    ledger: Ledger
    now_s: Callable[[], float]  # the router's monotonic clock
    pool: str = "default"  # the pods' name as a whole

    def collect(self) -> Iterable[Metric]:
        pods, board, now_s = self.pods.snapshot(), self.pods.board, self.now_s()
        ready = GaugeMetricFamily(
            _EPP + "ready_endpoints", "Pods that may be given requests.", labels=["name"]
        )
        ready.add_metric([self.pool], sum(pod.takes_requests for pod in pods.values()))
        yield ready
        yield GaugeMetricFamily(_EPP + "request_running", "Requests in flight.", value=len(self.ledger))
        yield GaugeMetricFamily(
            _OURS + "fleet_prefill_tokens_per_second",
            "Speed believed of a pod of which nothing is known.",
            value=board.fleet_tokens_per_s,
        )
        seen = [
            _Seen(pod, board.work(address), board.prefill_tokens_per_s(address), now_s)
            for address, pod in pods.items()
        ]
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


_PER_TOKENIZER: tuple[tuple[Any, str, str, str], ...] = (
    (
        GaugeMetricFamily,
        "is_fast",
        "tokenizer_fast",
        "1: fastokens encodes the model's prompts. 0: it refuses the tokenizer or was found to differ; "
        "the tokenizers library encodes them.",
    ),
    (
        CounterMetricFamily,
        "checks",
        "tokenizer_checks",
        "Texts whose ids by fastokens were compared with the library's.",
    ),
    (
        CounterMetricFamily,
        "mismatches",
        "tokenizer_mismatches",
        "Distinct texts that fastokens encodes unlike the library; after three the library encodes all.",
    ),
)


@dataclass(eq=False)
class TokenizerCollector(Collector):
    """Metrics of the tokenizers of this process."""

    tokenizers: Mapping[str, PromptTokenizer]  # by base model

    def collect(self) -> Iterable[Metric]:
        for family_of, fact, name, text in _PER_TOKENIZER:
            family = family_of(_OURS + name, text, labels=["model"])
            for model, tokenizer in self.tokenizers.items():
                family.add_metric([model], getattr(tokenizer.encoder.facts, fact))
            yield family


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


class MetricTwins(Collector):
    """The reference's metrics under their older names: what a registry shows under the new ones, shown twice.

    Args:
        registry: Whose metrics are shown again; this one is registered beside their collectors.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._here = local()

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the names are those of others."""
        return ()

    def collect(self) -> Iterable[Metric]:
        # The registry asks us, too, while we ask it.
        if getattr(self._here, "collecting", False):
            return
        self._here.collecting = True
        try:
            families = [family for family in self._registry.collect() if family.name in _TWINS]
        finally:
            self._here.collecting = False
        for family in families:
            yield _twin(family, _TWINS[family.name])


def _twin(family: Metric, name: str) -> Metric:
    twin = Metric(name, family.documentation, family.type, family.unit)
    twin.samples = [
        sample._replace(name=name + sample.name.removeprefix(family.name)) for sample in family.samples
    ]
    return twin
