"""Prometheus metrics under vLLM's names and labels.

In: the engine's and the publisher's counters when scraped, and each request's times as they happen. Out:
metrics on the registry it is given. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from model_server.engine_stats import EngineStats
from model_server.publish import PublisherStats
from model_server.token_histogram import TokenHistogram

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
_REASONS = ("stop", "length", "abort", "error")
_TOKEN_BUCKETS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
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
        self.itl_s = TokenHistogram(
            "vllm:inter_token_latency_seconds",
            "Time between tokens.",
            dict(zip(_LABELS, labels, strict=True)),
            _ITL_BUCKETS_S,
        )
        registry.register(self.itl_s)
        self.e2e_s = histogram("vllm:e2e_request_latency_seconds", "Time of whole requests.", _E2E_BUCKETS_S)
        self.tpot_s = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time of a request's tokens.", _ITL_BUCKETS_S
        )
        self.queue_s = histogram(
            "vllm:request_queue_time_seconds", "From arrival to the first step.", _E2E_BUCKETS_S
        )
        self.prefill_s = histogram(
            "vllm:request_prefill_time_seconds", "From the first step to the first token.", _E2E_BUCKETS_S
        )
        self.decode_s = histogram(
            "vllm:request_decode_time_seconds", "From first to last token.", _E2E_BUCKETS_S
        )
        self.inference_s = histogram(
            "vllm:request_inference_time_seconds", "From the first step to the last token.", _E2E_BUCKETS_S
        )
        self.prompt_tokens = histogram("vllm:request_prompt_tokens", "Prompt tokens.", _TOKEN_BUCKETS)
        self.generation_tokens = histogram(
            "vllm:request_generation_tokens", "Tokens generated for a request.", _TOKEN_BUCKETS
        )
        self.max_tokens = histogram("vllm:request_params_max_tokens", "max_tokens asked for.", _TOKEN_BUCKETS)
        self.copies = histogram("vllm:request_params_n", "n asked for.", _N_BUCKETS)
        success = Counter(
            "vllm:request_success", "Finished requests.", (*_LABELS, "finished_reason"), registry=registry
        )
        self.success = {reason: success.labels(*labels, reason) for reason in _REASONS}

    def choice(self, arrived_s: float, prompt_tokens: int = 0) -> ChoiceObserver:
        """Observe one choice, with a prompt this long, of a request that arrived at this time."""
        return ChoiceObserver(self, arrived_s, prompt_tokens)

    def params(self, copies: int, max_tokens: int) -> None:
        """Note what a request asked for."""
        self.copies.observe(copies)
        self.max_tokens.observe(max_tokens)


class ChoiceObserver:
    """Times one choice; all times are readings of one monotonic clock, in seconds."""

    __slots__ = (
        "_arrived_s",
        "_first_tokens_s",
        "_last_tokens_s",
        "_metrics",
        "_prompt_tokens",
        "_started_s",
    )

    def __init__(self, metrics: RequestMetrics, arrived_s: float, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._arrived_s = arrived_s
        self._prompt_tokens = prompt_tokens
        self._started_s: float | None = None
        self._first_tokens_s: float | None = None
        self._last_tokens_s = 0.0

    @property
    def began(self) -> bool:
        """Whether a token has come."""
        return self._first_tokens_s is not None

    def tokens(self, now_s: float, started_s: float | None = None) -> None:
        """New tokens came; `started_s` is when the engine's first step for the request began."""
        if self._first_tokens_s is None:
            self._first_tokens_s = now_s
            self._started_s = started_s
            self._metrics.ttft_s.observe(now_s - self._arrived_s)
        else:
            self._metrics.itl_s.observe(now_s - self._last_tokens_s)
        self._last_tokens_s = now_s

    def finished(self, now_s: float, reason: str, completion_tokens: int) -> None:
        """The choice came to its regular end."""
        metrics = self._metrics
        metrics.e2e_s.observe(now_s - self._arrived_s)
        metrics.prompt_tokens.observe(self._prompt_tokens)
        metrics.generation_tokens.observe(completion_tokens)
        if self._first_tokens_s is not None:
            decode_s = now_s - self._first_tokens_s
            metrics.decode_s.observe(decode_s)
            if self._started_s is not None:
                metrics.queue_s.observe(self._started_s - self._arrived_s)
                metrics.prefill_s.observe(self._first_tokens_s - self._started_s)
                metrics.inference_s.observe(now_s - self._started_s)
            if completion_tokens > 1:
                metrics.tpot_s.observe(decode_s / (completion_tokens - 1))
        metrics.success[reason].inc()

    def broken(self, reason: str) -> None:
        """The choice ended by "abort" or "error": it has no times that mean anything."""
        self._metrics.success[reason].inc()


class LoraCollector(Collector):
    """Tells which adapters are in use, as GIE's LoRA affinity reads it.

    Args:
        max_loras: Most adapters loaded at once.
        in_use: Adapters of the requests that run, and of those that wait for their first token.
        now_s: Unix time, the metric's value: readers take the newest of its label sets.
    """

    def __init__(
        self,
        max_loras: int,
        in_use: Callable[[], tuple[Iterable[str], Iterable[str]]],
        now_s: Callable[[], float],
    ) -> None:
        self._max_loras = max_loras
        self._in_use = in_use
        self._now_s = now_s

    def collect(self) -> Iterator[Metric]:
        """Yield the one metric with its present labels."""
        running, waiting = self._in_use()
        labels = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        family = GaugeMetricFamily("vllm:lora_requests_info", "Adapters in use.", labels=labels)
        family.add_metric((str(self._max_loras), ",".join(waiting), ",".join(running)), self._now_s())
        yield family


# Name, help, and the field that tells it.
_ENGINE_GAUGES = (
    ("vllm:num_requests_running", "Requests being run.", "running"),
    ("vllm:num_requests_waiting", "Requests waiting to run.", "waiting"),
    ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", "kv_usage"),
    ("kvroute_engine_prefill_tokens_per_second", "Measured speed of prefills.", "prefill_tokens_per_s"),
    ("kvroute_engine_host_usage", "Share of the host tier in use.", "host_usage"),
)
_ENGINE_COUNTERS = (
    ("vllm:prefix_cache_queries", "Tokens looked up.", "prefix_queries_tokens"),
    ("vllm:prefix_cache_hits", "Tokens found on the device.", "device_hits_tokens"),
    ("vllm:external_prefix_cache_queries", "Tokens looked up in the host tier.", "host_queries_tokens"),
    ("vllm:external_prefix_cache_hits", "Tokens found in the host tier.", "host_hits_tokens"),
    ("vllm:prompt_tokens_cached", "Prompt tokens not computed.", "prefix_hits_tokens"),
    ("vllm:prompt_tokens", "Prompt tokens of admitted requests.", "prompt_tokens"),
    ("vllm:generation_tokens", "Tokens generated.", "generated_tokens"),
    ("vllm:num_preemptions", "Requests preempted.", "preemptions"),
    ("kvroute_engine_steps", "Model steps run.", "steps"),
    ("kvroute_engine_host_hits", "Tokens restored from the host tier.", "host_hits_tokens"),
    ("kvroute_engine_swap_ins", "Blocks restored.", "swapped_in_blocks"),
    ("kvroute_engine_swap_outs", "Blocks stored.", "swapped_out_blocks"),
    ("kvroute_engine_swap_in_bytes", "Bytes restored.", "swapped_in_bytes"),
    ("kvroute_engine_swap_out_bytes", "Bytes stored.", "swapped_out_bytes"),
    ("kvroute_engine_restores", "Waits of requests for blocks.", "restores"),
)
_PUBLISHER_COUNTERS = (
    ("kvroute_kv_event_batches_published", "Batches sent.", "published"),
    ("kvroute_kv_event_batches_dropped", "Batches not sent: queue full.", "dropped"),
    ("kvroute_kv_event_replays", "Replay requests taken.", "replays"),
    ("kvroute_kv_event_replays_rejected", "Replay requests refused.", "replays_rejected"),
)


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
        told = [(_ENGINE_GAUGES, GaugeMetricFamily, stats), (_ENGINE_COUNTERS, CounterMetricFamily, stats)]
        if self._publisher_stats is not None:
            told.append((_PUBLISHER_COUNTERS, CounterMetricFamily, self._publisher_stats()))
        for metrics, kind, source in told:
            for name, text, field in metrics:
                family = kind(name, text, labels=_LABELS)
                family.add_metric(self._labels, getattr(source, field))
                yield family
        # Sleep drops the cache, as vLLM's level 1 does.
        states = {"awake": not stats.asleep, "weights_offloaded": stats.asleep, "discard_all": False}
        sleep = GaugeMetricFamily(
            "vllm:engine_sleep_state", "1 for the state the engine is in.", labels=(*_LABELS, "sleep_state")
        )
        for state, is_on in states.items():
            sleep.add_metric((*self._labels, state), float(is_on))
        yield sleep
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache's settings.", labels=tuple(self._cache_config)
        )
        info.add_metric(tuple(self._cache_config.values()), 1)
        yield info


def new_registry() -> CollectorRegistry:
    """A registry that already tells the process's own figures (start time, memory, CPU)."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry
