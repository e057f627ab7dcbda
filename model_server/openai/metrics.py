"""Prometheus metrics with vLLM's names and labels. Counters are read at a scrape, latencies when observed."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from common.counters import BatchedMetrics
from model_server.kv_events.replay import PublisherStats
from model_server.requests import EngineStats

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


# Name without "vllm:", help text and bucket bounds. Latencies are in seconds.
_REQUEST_HISTOGRAMS = (
    ("time_to_first_token_seconds", "Time to first token.", _TTFT_BUCKETS_S),
    ("e2e_request_latency_seconds", "Time of whole requests.", _E2E_BUCKETS_S),
    ("request_time_per_output_token_seconds", "Mean time of a request's tokens.", _ITL_BUCKETS_S),
    ("request_queue_time_seconds", "From arrival to the first step.", _E2E_BUCKETS_S),
    ("request_prefill_time_seconds", "From the first step to the first token.", _E2E_BUCKETS_S),
    ("request_decode_time_seconds", "From first to last token.", _E2E_BUCKETS_S),
    ("request_inference_time_seconds", "From the first step to the last token.", _E2E_BUCKETS_S),
    ("request_prompt_tokens", "Prompt tokens.", _TOKEN_BUCKETS),
    ("request_generation_tokens", "Tokens generated for a request.", _TOKEN_BUCKETS),
    ("request_params_max_tokens", "max_tokens asked for.", _TOKEN_BUCKETS),
    ("request_params_n", "n asked for.", _N_BUCKETS),
)


class RequestMetrics:
    """Histograms of request latencies and sizes, and counters of finish reasons."""

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        self._labels = labels = (model_name, _ENGINE_INDEX)
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, _LABELS, registry=registry, buckets=buckets).labels(*labels)
            for name, text, buckets in _REQUEST_HISTOGRAMS
        }
        self._itl_s = BatchedMetrics(registry).histogram(
            "vllm:inter_token_latency_seconds", "Time between tokens.", _ITL_BUCKETS_S, _LABELS
        )
        success = Counter(
            "vllm:request_success", "Finished requests.", (*_LABELS, "finished_reason"), registry=registry
        )
        self.success = {reason: success.labels(*labels, reason) for reason in _REASONS}

    def observe(self, name: str, value: float) -> None:
        """Observe a value in a histogram of `_REQUEST_HISTOGRAMS`."""
        self._histograms[name].observe(value)

    def observe_interval(self, seconds: float) -> None:
        """Observe the time between two tokens of a choice, on the event loop, which also scrapes: no lock."""
        self._itl_s.observe(seconds, self._labels)


@dataclass(slots=True, eq=False, repr=False)
class ChoiceObserver:
    """Records the latencies of one choice. All times are seconds of one monotonic clock."""

    metrics: RequestMetrics
    arrived_s: float
    prompt_tokens: int
    _started_s: float | None = None
    _first_tokens_s: float | None = None
    _last_tokens_s: float = 0.0

    @property
    def began(self) -> bool:
        return self._first_tokens_s is not None

    def tokens(self, now_s: float, started_s: float | None = None) -> None:
        """Record new tokens; `started_s` is the start of the request's first step."""
        if self._first_tokens_s is None:
            self._first_tokens_s = now_s
            self._started_s = started_s
            self.metrics.observe("time_to_first_token_seconds", now_s - self.arrived_s)
        else:
            self.metrics.observe_interval(now_s - self._last_tokens_s)
        self._last_tokens_s = now_s

    def finished(self, now_s: float, reason: str, completion_tokens: int) -> None:
        """Record the end of a choice, except by "abort" or "error", of which only the number counts."""
        observe, started_s, first_s = self.metrics.observe, self._started_s, self._first_tokens_s
        observe("e2e_request_latency_seconds", now_s - self.arrived_s)
        observe("request_prompt_tokens", self.prompt_tokens)
        observe("request_generation_tokens", completion_tokens)
        if first_s is not None:
            observe("request_decode_time_seconds", now_s - first_s)
            if started_s is not None:
                observe("request_queue_time_seconds", started_s - self.arrived_s)
                observe("request_prefill_time_seconds", first_s - started_s)
                observe("request_inference_time_seconds", now_s - started_s)
            if completion_tokens > 1:
                observe("request_time_per_output_token_seconds", (now_s - first_s) / (completion_tokens - 1))
        self.metrics.success[reason].inc()


@dataclass(frozen=True, eq=False)
class LoraCollector(Collector):
    """Collector of the adapters in use, in the form that GIE's LoRA affinity scorer reads."""

    max_loras: int
    # Adapters of running requests, and of requests waiting for their first token.
    in_use: Callable[[], tuple[Iterable[str], Iterable[str]]]
    now_s: Callable[[], float]  # Unix time, the metric's value: readers use the newest label set

    def collect(self) -> Iterator[Metric]:
        running, waiting = self.in_use()
        labels = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        family = GaugeMetricFamily("vllm:lora_requests_info", "Adapters in use.", labels=labels)
        family.add_metric((str(self.max_loras), ",".join(waiting), ",".join(running)), self.now_s())
        yield family


# Name, help text and field of `EngineStats`.
_ENGINE_GAUGES = (
    ("vllm:num_requests_running", "Requests being run.", "running"),
    ("vllm:num_requests_waiting", "Requests waiting to run.", "waiting"),
    ("vllm:kv_cache_usage_perc", "Shard of KV blocks in use, 0 to 1.", "kv_usage"),
    ("kvroute_engine_prefill_tokens_per_second", "Measured speed of prefills.", "prefill_tokens_per_s"),
    ("kvroute_engine_host_usage", "Shard of the host tier in use.", "host_usage"),
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


@dataclass(frozen=True, eq=False)
class EngineCollector(Collector):
    """Collector that reads the engine's and the publisher's counters at each scrape."""

    model_name: str
    engine_stats: Callable[[], EngineStats]
    publisher_stats: PublisherStats | None
    cache_config: Mapping[str, str]

    def collect(self) -> Iterator[Metric]:
        stats, labels = self.engine_stats(), (self.model_name, _ENGINE_INDEX)
        sources: list[tuple[Sequence[Sequence[str]], type[GaugeMetricFamily | CounterMetricFamily], object]]
        sources = [(_ENGINE_GAUGES, GaugeMetricFamily, stats), (_ENGINE_COUNTERS, CounterMetricFamily, stats)]
        if self.publisher_stats is not None:
            sources.append((_PUBLISHER_COUNTERS, CounterMetricFamily, self.publisher_stats))
        for metrics, kind, source in sources:
            for name, text, field in metrics:
                family = kind(name, text, labels=_LABELS)
                family.add_metric(labels, getattr(source, field))
                yield family
        # Sleep clears the prefix cache, as vLLM's level 1 does.
        states = {"awake": not stats.asleep, "weights_offloaded": stats.asleep, "discard_all": False}
        sleep = GaugeMetricFamily(
            "vllm:engine_sleep_state", "1 for the state the engine is in.", labels=(*_LABELS, "sleep_state")
        )
        for state, is_on in states.items():
            sleep.add_metric((*labels, state), float(is_on))
        yield sleep
        settings = {**self.cache_config, "engine": _ENGINE_INDEX}
        info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache's settings.", labels=tuple(settings))
        info.add_metric(tuple(settings.values()), 1)
        yield info


def new_registry() -> CollectorRegistry:
    """Return a registry with the process metrics (start time, memory, CPU)."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry
