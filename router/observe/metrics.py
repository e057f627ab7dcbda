"""Prometheus metrics of the router.

`llm_d_epp_*` have the names and labels of the llm-d endpoint picker where the meaning is the same;
`kvroute_router_*` are this router's own. Per-pod gauges read the live state when scraped.
"""

from __future__ import annotations

import time
from collections import Counter as Sums
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.counters import BatchedMetrics
from indexer import Cause
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
_ATTEMPT_LABELS = ("status", "target_model_name", "endpoint_name", "namespace", "port")

_EPP, _OURS = "llm_d_epp_", "kvroute_router_"

# Help text and labels by name, without `_OURS` and `_total`.
_COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "llm_d_epp_request": ("Requests routed to a pod.", _MODEL_LABELS),
    "llm_d_epp_request_error": ("Requests answered with an error.", (*_MODEL_LABELS, "error_code")),
    "llm_d_epp_scheduler_attempts": ("Picks by outcome.", _ATTEMPT_LABELS),
    "picks": ("Picks; `degraded` is the reason why the cache view was not used.", ("degraded",)),
    "partial_prompts": (
        "Picks by the first part of a prompt; `partial` is the reason why the rest is unknown.",
        ("partial",),
    ),
    "predicted_cached_tokens": ("Cached tokens predicted on the picked pod.", ()),
    "best_cached_tokens": ("Most cached tokens on any candidate.", ()),
    "prompt_tokens": (
        "Prompt tokens by the cause why they are served from the cache (hit) or computed.",
        ("model", "cause"),
    ),
    "compared_predicted_cached_tokens": (
        "Predicted cached tokens of requests whose cached tokens were reported.",
        (),
    ),
    "delivered_cached_tokens": ("Cached tokens reported by the pods.", ()),
    "told_prompt_tokens": ("Prompt tokens of these requests: all, cached.", ("model", "part")),
    "prefix_breaks": ("Prompts that left their session's last one.", ("model", "part")),
    "prefix_break_lost_tokens": ("Tokens not cached for these breaks.", ("model", "part")),
    "served_prompt_tokens": ("Prompt tokens by what served them.", ("model", "source")),
    "policy_computed_tokens": ("Tokens computed, estimated.", ("policy",)),
    "policy_prefill_seconds": ("Seconds of their prefill, estimated.", ("policy",)),
    "analysis_dropped": ("Requests left out: busy, large, failed.", ("reason",)),
    "request_ends": ("Ended requests by source of the report.", ("source", "outcome")),
    "stateful_requests": (
        "Requests that name a stored response, conversation or file, by what is known of its pod.",
        ("outcome",),
    ),
    "dropped_messages": ("Invalid messages that were dropped.", ("door", "reason")),
    "served_requests": (
        "Requests by whether the picked pod served them, by Envoy's log; again: repeated ext_proc calls.",
        ("outcome",),
    ),
    "response_usage": (
        "Responses by whether they told their cached tokens, from Envoy's access log.",
        ("outcome",),
    ),
    "access_log_entries": ("Access log entries by matched request.", ("join",)),
}
# Like `_COUNTERS`, with the buckets before the labels.
_HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...], tuple[str, ...]]] = {
    "llm_d_epp_scheduler_e2e_duration_seconds": ("Seconds from a parsed request to its pick.", _SECONDS, ()),
    "llm_d_epp_request_input_tokens": ("Prompt tokens.", _TOKENS, _MODEL_LABELS),
    "prefill_end_seconds": (
        "Seconds from dispatch to end of prefill by source; a request that timed out may be reported again.",
        _TTFT_SECONDS,
        ("source",),
    ),
    "render_seconds": (
        "Seconds for which a pod or server renders a prompt, by outcome: ok, late, failed.",
        _TTFT_SECONDS,
        ("outcome",),
    ),
    "told_late_seconds": (
        "Delay of a report in seconds: since the event if known, else since the first report of it.",
        _TTFT_SECONDS,
        ("event", "source"),
    ),
}

# Older name of the same metric.
_ALIASES = {
    "llm_d_epp_request": "inference_objective_request",
    "llm_d_epp_request_error": "inference_objective_request_error",
    "llm_d_epp_request_input_tokens": "inference_objective_input_tokens",
    "llm_d_epp_request_running": "inference_objective_running_requests",
    "llm_d_epp_ready_endpoints": "inference_pool_ready_pods",
    "llm_d_epp_scheduler_e2e_duration_seconds": "inference_extension_scheduler_e2e_duration_seconds",
}


def _full(name: str) -> str:
    return name if name.startswith(_EPP) else _OURS + name


class RouterMetrics:
    """All counters and histograms of one router."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = BatchedMetrics(registry)
        self._lock = make.lock
        self._counters = {name: make.counter(_full(name), *facts) for name, facts in _COUNTERS.items()}
        self._histograms = {name: make.histogram(_full(name), *facts) for name, facts in _HISTOGRAMS.items()}
        self._open = Gauge(_OURS + "open_requests", "Requests in a service.", ("door",), registry=registry)
        registry.register(_CeilingCollector(self))
        self.collectors: Sequence[Collector] = (*self._counters.values(), *self._histograms.values())
        self._models: set[str] = set()  # names in labels
        self._pods: frozenset[str] | None = None

    def picked(self, took_s: float, decision: Decision | None) -> None:
        """Count a pick that took `took_s` seconds; the decision is None if it failed."""
        if decision is None:
            with self._lock:
                self._counters["llm_d_epp_scheduler_attempts"].add(("failure", "", "", "", ""))
                self._histograms["llm_d_epp_scheduler_e2e_duration_seconds"].observe(took_s)
            return
        best, client, count = decision.primary, decision.client_model, self._counters
        attempts = count["llm_d_epp_scheduler_attempts"]
        model = self.model_label(decision.model or "")
        named = model if client is None else self.model_label(client)
        labels = named, model, "", str(decision.priority)
        with self._lock:
            self._histograms["llm_d_epp_scheduler_e2e_duration_seconds"].observe(took_s)
            count["llm_d_epp_request"].add(labels)
            count["picks"].add((decision.degraded or "",))
            if decision.partial is not None:
                count["partial_prompts"].add((decision.partial,))
            add_tokens = count["prompt_tokens"].add
            for cause, tokens in decision.ranked.causes.tokens.items():
                add_tokens((model, cause), tokens)
            # A pick made before the pod's removal must not recreate the pod's series.
            if self._pods is None or best.pod in self._pods:
                attempts.add(("success", model, best.pod, "", best.pod.rpartition(":")[2]))
            if decision.degraded is None:
                self._histograms["llm_d_epp_request_input_tokens"].observe(decision.prompt_tokens, labels)
                count["predicted_cached_tokens"].add((), best.cached_tokens)
                count["best_cached_tokens"].add((), decision.ranked.most_cached_tokens)

    def model_label(self, model: str) -> str:
        """Return a model's name; "other" for a long one, and for all but the first names."""
        if model in self._models:
            return model
        with self._lock:
            if len(self._models) >= _MODELS_MAX or len(model) > 256:
                return "other"
            self._models.add(model)
            return model

    def values(self, name: str) -> dict[tuple[str, ...], float]:
        """Return the values of a counter by its labels; `name` as in `_COUNTERS`."""
        samples = (sample for family in self._counters[name].collect() for sample in family.samples)
        return {tuple(sample.labels.values()): sample.value for sample in samples}

    def refused(self, error: RequestError) -> None:
        """Count an error response, without the model's name: clients could create any number of series."""
        with self._lock:
            self._counters["llm_d_epp_request_error"].add(("", "", "", "0", error.error_type))

    def keep(self, pods: Collection[str]) -> None:
        """Drop the series of all other pods."""
        self._pods, attempts = frozenset(pods), self._counters["llm_d_epp_scheduler_attempts"]
        with self._lock:
            attempts.drop(
                [labels for labels in attempts.series() if labels[2] and labels[2] not in self._pods]
            )

    def count(self, name: str, *labels: str, number: float = 1.0) -> None:
        """Add to a counter, by its name in `_COUNTERS`."""
        with self._lock:
            self._counters[name].add(labels, number)

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Add a value to a histogram, by its name in `_HISTOGRAMS`; clock skew below 0 counts as 0."""
        with self._lock:
            self._histograms[name].observe(max(0.0, value), labels)

    def inside(self, door: str) -> AbstractContextManager[None]:
        """Return a reentrant context that counts a request as open in a service, named by `door`."""
        return self._open.labels(door).track_inprogress()

    @property
    def requests_inside(self) -> int:
        return sum(int(sample.value) for family in self._open.collect() for sample in family.samples)


def gauge(
    name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]
) -> GaugeMetricFamily:
    """Return a gauge, from the label values and the value of each series."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for shown, value in values:
        family.add_metric(shown, value)
    return family


UNCACHEABLE = (Cause.NEVER_CACHED, Cause.PARTIAL_BLOCK, Cause.OTHER_SCOPE)


@dataclass(eq=False, slots=True)
class _CeilingCollector(Collector):
    """Share of prompt tokens that caches without limits, shared by all pods, could have served."""

    metrics: RouterMetrics

    def collect(self) -> Iterable[Metric]:
        known, uncacheable = Sums[str](), Sums[str]()
        for (model, cause), tokens in self.metrics.values("prompt_tokens").items():
            known[model] += int(tokens) * (cause != Cause.UNKNOWN)
            uncacheable[model] += int(tokens) * (cause in UNCACHEABLE)
        shares = [([model], 1.0 - uncacheable[model] / tokens) for model, tokens in known.items() if tokens]
        yield gauge(_OURS + "cacheable_ceiling", self.__doc__ or "", ("model",), shares)


class StreamMetrics:
    """Metrics of ext_proc streams, by name and default (off) those of the llm-d endpoint picker."""

    def __init__(self, registry: CollectorRegistry) -> None:
        name = _EPP + "extproc_stream"
        self._open = Gauge(f"{name}s_inflight", "Open ext_proc streams.", registry=registry)
        self._durations = Histogram(
            f"{name}_duration_seconds",
            "Duration of ext_proc streams in seconds.",
            buckets=_STREAM_SECONDS,
            registry=registry,
        )
        self._ended = Counter(f"{name}s_total", "Ended ext_proc streams.", ("code",), registry=registry)

    def opened(self) -> Callable[[str], None]:
        """Count an open stream; return a function to call at its end with the gRPC status code."""
        self._open.inc()
        started_s = time.monotonic()

        def ended(code: str) -> None:
            self._open.dec()
            self._durations.observe(time.monotonic() - started_s)
            self._ended.labels(code).inc()

        return ended


class _PodState(NamedTuple):
    """State of a pod at a scrape."""

    pod: Pod
    work: PodWork
    tokens_per_s: float
    now_s: float


_PER_POD: tuple[tuple[str, str, Callable[[_PodState], float | None]], ...] = (
    ("ready", "1 if the pod can receive requests.", lambda state: state.pod.takes_requests),
    ("asleep", "1 if the pod's engine is asleep.", lambda state: state.pod.asleep),
    ("stalled", "1 if requests wait at the pod and it computes nothing.", lambda state: state.pod.stalled),
    (
        "failing",
        "1 if the pod gets no requests while others serve, because its last ones failed.",
        lambda state: bool(state.pod.failing),
    ),
    ("awaiting", "Requests awaiting a first token.", lambda state: state.work.awaiting),
    ("awaiting_tokens", "Uncached tokens of awaiting requests.", lambda state: state.work.awaiting_tokens),
    ("decoding", "Requests that have their first token.", lambda state: state.work.decoding),
    ("prefill_tokens_per_second", "Estimated prefill rate.", lambda state: state.tokens_per_s),
    (
        "kv_usage",
        "Scraped share of the KV cache in use.",
        lambda state: state.pod.load.kv_usage if state.pod.load else None,
    ),
    ("waiting", "Scraped queue length.", lambda state: state.pod.load.waiting if state.pod.load else None),
    ("hides_load", "1 if the pod answers without load metrics.", lambda state: state.pod.hides_load),
    (
        "scrape_age_seconds",
        "Seconds since the scrape of the pod's load.",
        lambda state: state.now_s - state.pod.load.scraped_s if state.pod.load else None,
    ),
)


@dataclass(eq=False, slots=True)
class StateCollector(Collector):
    """Gauges of the live state: pods, their load and prefill rates."""

    pods: PodSet
    ledger: Ledger
    now_s: Callable[[], float]  # monotonic clock of the router
    queued_s: Callable[[Sequence[str], float], Sequence[float]]  # seconds of queued work by pod
    pool: str = "default"  # name of the inference pool

    def collect(self) -> Iterable[Metric]:
        pods, load_table, now_s = self.pods.current, self.pods.load_table, self.now_s()
        taking = [address for address, pod in pods.items() if pod.takes_requests]
        queued_s = self.queued_s(taking, now_s)
        queued = [([pod], seconds) for pod, seconds in zip(taking, queued_s, strict=True)]
        text = "Seconds of uncached work before a new request."
        yield gauge(_OURS + "pod_queued_seconds", text, ("pod",), queued)
        by_model = defaultdict[str, list[float]](list)
        for address, seconds in zip(taking, queued_s, strict=True):
            models = pods[address].models
            by_model[models.base if models else ""].append(seconds)
        text = "Mean of pod_queued_seconds over a model's pods that can receive requests, for autoscalers."
        means = [([model], sum(each) / len(each)) for model, each in by_model.items()]
        yield gauge(_OURS + "queued_seconds_per_pod", text, ("model",), means)
        ready, text = [([self.pool], len(taking))], "Pods that can receive requests."
        yield gauge(_EPP + "ready_endpoints", text, ("name",), ready)
        yield GaugeMetricFamily(_EPP + "request_running", "Requests in flight.", len(self.ledger))
        rate, text = load_table.fleet_tokens_per_s, "Prefill rate of pods without a rate of their own."
        yield GaugeMetricFamily(_OURS + "fleet_prefill_tokens_per_second", text, rate)
        states = [
            _PodState(pod, load_table.work(address), load_table.prefill_tokens_per_s(address), now_s)
            for address, pod in pods.items()
        ]
        for name, text, read in _PER_POD:
            values = [([state.pod.address], read(state)) for state in states]
            known = [(labels, float(value)) for labels, value in values if value is not None]
            yield gauge(f"{_OURS}pod_{name}", text, ("pod",), known)
        loads = [(address, pod.load) for address, pod in pods.items() if pod.load is not None]
        missing = [((pod, figure), 1.0) for pod, load in loads for figure in load.missing_figures]
        text = "1 for each load figure that is missing or invalid in the pod's metrics."
        yield gauge(_OURS + "pod_load_untold", text, ("pod", "figure"), missing)
        faults = [((pod.address, fault.kind), 1.0) for pod in pods.values() for fault in pod.faults]
        text = "1 for each reason why an engine's cache cannot be used or seen."
        yield gauge(_OURS + "engine_fault", text, ("pod", "fault"), faults)


_PER_TOKENIZER: tuple[tuple[Any, str, str, str], ...] = (
    (
        GaugeMetricFamily,
        "is_fast",
        "tokenizer_fast",
        "1 if fastokens encodes the model's prompts; 0 if the tokenizers library does, because fastokens "
        "does not support the tokenizer or gave other ids.",
    ),
    (
        CounterMetricFamily,
        "checks",
        "tokenizer_checks",
        "Texts encoded by both libraries to compare the ids.",
    ),
    (
        CounterMetricFamily,
        "mismatches",
        "tokenizer_mismatches",
        "Distinct texts with other ids by fastokens; after three the tokenizers library encodes all texts.",
    ),
)


@dataclass(eq=False)
class TokenizerCollector(Collector):
    """Metrics of this process's tokenizers, and of pods that render without being told to."""

    tokenizers: Mapping[str, PromptTokenizer]  # by base model
    renderings: Callable[[], Mapping[str, Mapping[str, Any]]] = dict  # states by base model

    def collect(self) -> Iterable[Metric]:
        text = "1 while the model's pods do not render its prompts, and its requests are routed by load."
        states = self.renderings().items()
        paused = [([model], float(state["state"] == "paused")) for model, state in states]
        yield gauge(_OURS + "render_paused", text, ("model",), paused)
        for family_of, fact, name, text in _PER_TOKENIZER:
            family = family_of(_OURS + name, text, labels=["model"])
            for model, tokenizer in self.tokenizers.items():
                family.add_metric([model], getattr(tokenizer.encoder.facts, fact))
            yield family


@dataclass(eq=False, slots=True)
class MetricAliases(Collector):
    """Metrics of the llm-d endpoint picker repeated under their older names."""

    sources: Sequence[Collector]  # of the metrics under their present names

    def collect(self) -> Iterable[Metric]:
        for family in chain.from_iterable(source.collect() for source in self.sources):
            if (name := _ALIASES.get(family.name)) is not None:
                renamed = Metric(name, family.documentation, family.type, family.unit)
                for sample in family.samples:
                    renamed.samples.append(sample._replace(name=name + sample.name.removeprefix(family.name)))
                yield renamed
