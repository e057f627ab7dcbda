"""Prometheus metrics under vLLM's names and labels.

In: the engine's and the publisher's counters when scraped, and each request's times as they happen. Out:
metrics on the registry it is given. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from model_server.engine_stats import EngineStats
from model_server.publish import PublisherStats

_ENGINE_INDEX = "0"
_LABELS = ("model_name", "engine")
_TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_E2E_BUCKETS_S = (
    *(0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class RequestMetrics:
    """Latencies and outcomes of requests.

    Args:
        model_name: Value of the model_name label.
        registry: Where the metrics are registered.
    """

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        labels = (model_name, _ENGINE_INDEX)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, _LABELS, registry=registry, buckets=buckets).labels(*labels)

        self.ttft_s = histogram("vllm:time_to_first_token_seconds", "Time to first token.", _TTFT_BUCKETS_S)
        self.itl_s = histogram("vllm:inter_token_latency_seconds", "Time between tokens.", _ITL_BUCKETS_S)
        self.e2e_s = histogram("vllm:e2e_request_latency_seconds", "Time of whole requests.", _E2E_BUCKETS_S)
        success = Counter(
            "vllm:request_success", "Finished requests.", (*_LABELS, "finished_reason"), registry=registry
        )
        self.success = {reason: success.labels(*labels, reason) for reason in ("stop", "length")}

    def choice(self, arrived_s: float) -> ChoiceObserver:
        """Observe one choice of a request that arrived at this time."""
        return ChoiceObserver(self, arrived_s)


class ChoiceObserver:
    """Times one choice; all times are readings of one monotonic clock, in seconds."""

    __slots__ = ("_arrived_s", "_last_tokens_s", "_metrics")

    def __init__(self, metrics: RequestMetrics, arrived_s: float) -> None:
        self._metrics = metrics
        self._arrived_s = arrived_s
        self._last_tokens_s: float | None = None

    def tokens(self, now_s: float) -> None:
        """New tokens came."""
        if self._last_tokens_s is None:
            self._metrics.ttft_s.observe(now_s - self._arrived_s)
        else:
            self._metrics.itl_s.observe(now_s - self._last_tokens_s)
        self._last_tokens_s = now_s

    def finished(self, now_s: float, reason: str) -> None:
        """The choice came to its regular end."""
        self._metrics.e2e_s.observe(now_s - self._arrived_s)
        self._metrics.success[reason].inc()


class EngineCollector(Collector):
    """Reads the engine's and the publisher's counters at each scrape.

    Args:
        model_name: Value of the model_name label.
        engine_stats: Reads the engine.
        publisher_stats: Reads the event publisher; None when events are off.
        cache_config: Labels of vllm:cache_config_info.
    """

    def __init__(
        self,
        model_name: str,
        engine_stats: Callable[[], EngineStats],
        publisher_stats: Callable[[], PublisherStats] | None,
        cache_config: Mapping[str, str],
    ) -> None:
        self._labels = (model_name, _ENGINE_INDEX)
        self._engine_stats = engine_stats
        self._publisher_stats = publisher_stats
        self._cache_config = {**cache_config, "engine": _ENGINE_INDEX}

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics with their present values."""
        stats = self._engine_stats()
        yield self._gauge("vllm:num_requests_running", "Requests being run.", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting to run.", stats.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", stats.kv_usage)
        yield self._counter("vllm:prefix_cache_queries", "Tokens looked up.", stats.prefix_queries_tokens)
        yield self._counter("vllm:prefix_cache_hits", "Tokens found cached.", stats.prefix_hits_tokens)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens of admitted requests.", stats.prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens generated.", stats.generated_tokens)
        yield self._counter("vllm:num_preemptions", "Requests preempted.", stats.preemptions)
        yield self._counter("kvroute_engine_steps", "Model steps run.", stats.steps)
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache's settings.", labels=tuple(self._cache_config)
        )
        info.add_metric(tuple(self._cache_config.values()), 1)
        yield info
        if self._publisher_stats is not None:
            yield from self._publisher(self._publisher_stats())

    def _publisher(self, stats: PublisherStats) -> Iterator[Metric]:
        yield self._counter("kvroute_kv_event_batches_published", "Batches sent.", stats.published)
        yield self._counter(
            "kvroute_kv_event_batches_dropped", "Batches not sent: queue full.", stats.dropped
        )
        yield self._counter("kvroute_kv_event_replays", "Replay requests taken.", stats.replays)
        yield self._counter(
            "kvroute_kv_event_replays_rejected", "Replay requests refused.", stats.replays_rejected
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family


def new_registry() -> CollectorRegistry:
    """A registry that already tells the process's own figures (start time, memory, CPU)."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry
