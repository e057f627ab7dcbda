"""A model server's metrics page in, its load out.

Looks for the few series that picking consumes, under the names of vLLM, SGLang, TensorRT-LLM and Triton, and
never reads the rest of the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from router.metric_lines import MetricLines, UnusableError, parse_labels, parse_number, parse_whole

_ADAPTERS_MAX = 1024
_CAPACITY_TOKENS_MAX = 10**12
_SPEED_MAX = 1e9

# Without these nothing is told of a load.
_FIGURES = ("waiting", "running", "kv_usage")


@dataclass(frozen=True, slots=True)
class LoraLoad:
    """A pod's places for LoRA adapters.

    Attributes:
        running: Adapters that requests are computed with.
        waiting: Adapters that requests in the queue need.
        places: How many can run at once.

    Of several engines behind one port the pod has what any of them has.
    """

    running: frozenset[str]
    waiting: frozenset[str]
    places: int


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine's own account of its load.

    Attributes:
        waiting: Requests in its queue; None where it is not told, or senseless.
        running: Requests being computed; None as above.
        kv_usage: Share of the KV cache that running requests hold, 0..1; None as above.
        kv_capacity_tokens: Size of the KV cache; None if not told.
        scraped_s: When it was read, on the router's monotonic clock.
        asked_s: When it was asked for; -infinity: not known.
        prefill_tokens_per_s: The engine's own account of its prefill speed; None if not told.
        lora: None if not told.
    """

    waiting: int | None
    running: int | None
    kv_usage: float | None
    kv_capacity_tokens: int | None
    scraped_s: float
    prefill_tokens_per_s: float | None = None
    lora: LoraLoad | None = None
    asked_s: float = -math.inf

    @property
    def requests(self) -> int | None:
        """Requests that it has; None where a part of them is not told."""
        return None if self.waiting is None or self.running is None else self.waiting + self.running

    @property
    def untold(self) -> tuple[str, ...]:
        """Which of queue, running requests and use of the KV cache are missing."""
        return tuple(name for name in _FIGURES if getattr(self, name) is None)


@dataclass(frozen=True, slots=True)
class _Series:
    """Where an engine tells a value: a metric, of a certain label value if it has several."""

    name: bytes
    label: tuple[bytes, bytes] | None = None


@dataclass(frozen=True, slots=True)
class _Config:
    """A metric whose labels tell the KV cache's block size and number of blocks."""

    name: bytes
    block_tokens: bytes
    blocks: bytes


@dataclass(frozen=True, slots=True)
class _Engine:
    """An engine's names.

    Attributes:
        apart: Labels that tell several engines on one page apart, whose loads add up. Series that differ in
            other labels only say the same again: ranks that compute the same requests together, or parts of
            a total that is there, too.
        cache_config: None where the engine has no such metric.
        block_tokens, blocks: Metrics of what `cache_config` tells, where it is not there.
        lora, speed: None where the engine has no such metric.
    """

    waiting: _Series
    running: _Series
    kv_usage: _Series
    apart: tuple[bytes, ...] = ()
    cache_config: _Config | None = None
    block_tokens: _Series | None = None
    blocks: _Series | None = None
    lora: bytes | None = None
    speed: _Series | None = None


_TRITON_REQUESTS = b"nv_trt_llm_request_metrics"
_TRITON_BLOCKS = b"nv_trt_llm_kv_cache_block_metrics"
_ENGINES = (
    # One engine for each data parallel rank; tensor and pipeline ranks have no series of their own.
    _Engine(
        waiting=_Series(b"vllm:num_requests_waiting"),
        running=_Series(b"vllm:num_requests_running"),
        kv_usage=_Series(b"vllm:kv_cache_usage_perc"),
        apart=(b"engine",),
        cache_config=_Config(b"vllm:cache_config_info", b"block_size", b"num_gpu_blocks"),
        lora=b"vllm:lora_requests_info",
        speed=_Series(b"kvroute_engine_prefill_tokens_per_second"),
    ),
    # Every scheduler has series if it is told to: of tp_rank, pp_rank and moe_ep_rank (with context
    # parallelism by default) all have the same requests. priority="" is the total of all priorities.
    _Engine(
        waiting=_Series(b"sglang:num_queue_reqs"),
        running=_Series(b"sglang:num_running_reqs"),
        kv_usage=_Series(b"sglang:token_usage"),
        apart=(b"dp_rank",),
        cache_config=_Config(b"sglang:cache_config_info", b"page_size", b"num_pages"),
        # From 0.5.11 on.
        block_tokens=_Series(b"sglang:page_size"),
        blocks=_Series(b"sglang:num_pages"),
    ),
    # One engine behind each server.
    _Engine(
        waiting=_Series(b"trtllm_num_requests_waiting"),
        running=_Series(b"trtllm_num_requests_running"),
        kv_usage=_Series(b"trtllm_kv_cache_utilization"),
        block_tokens=_Series(b"trtllm_kv_cache_tokens_per_block"),
        blocks=_Series(b"trtllm_kv_cache_max_blocks"),
    ),
    _Engine(
        waiting=_Series(_TRITON_REQUESTS, (b"request_type", b"waiting")),
        running=_Series(_TRITON_REQUESTS, (b"request_type", b"scheduled")),
        kv_usage=_Series(_TRITON_BLOCKS, (b"kv_cache_block_type", b"fraction")),
        apart=(b"model", b"version"),
        block_tokens=_Series(_TRITON_BLOCKS, (b"kv_cache_block_type", b"tokens_per")),
        blocks=_Series(_TRITON_BLOCKS, (b"kv_cache_block_type", b"max")),
    ),
)


def engine_load(page: bytes, now_s: float, asked_s: float = -math.inf) -> EngineLoad | None:
    """Reads a metrics page; several engines on one page (data parallel ranks) are added up.

    A series that is there twice counts once, the last time. A figure with a senseless value is not told; the
    others are.

    Returns:
        None when the page tells no usable load.
    """
    lines = MetricLines(page)
    try:
        for engine in _ENGINES:
            if lines.values(engine.kv_usage.name):
                load = replace(_load(lines, engine, now_s), asked_s=asked_s)
                return load if load.untold != _FIGURES else None
    except UnusableError:
        pass
    return None


def _load(lines: MetricLines, engine: _Engine, now_s: float) -> EngineLoad:
    waiting, running = _figures(lines, engine, engine.waiting), _figures(lines, engine, engine.running)
    usages = [min(usage, 1.0) for usage in _figures(lines, engine, engine.kv_usage).values()]
    config = _configs(lines, engine)
    speed = sum(_figures(lines, engine, engine.speed).values())
    return EngineLoad(
        waiting=int(sum(waiting.values())) if waiting else None,
        running=int(sum(running.values())) if running else None,
        # The mean, which with the sum of their sizes gives the tokens that they hold together: an engine of
        # several ranks sends a request itself to one that has room.
        kv_usage=sum(usages) / len(usages) if usages else None,
        kv_capacity_tokens=_capacity_tokens(lines, engine, config),
        scraped_s=now_s,
        prefill_tokens_per_s=speed if 0.0 < speed <= _SPEED_MAX else None,
        lora=_lora(lines, engine.lora, max(map(len, (waiting, running, usages)))) if engine.lora else None,
    )


def _figures(lines: MetricLines, engine: _Engine, series: _Series | None) -> dict[tuple[bytes, ...], float]:
    """One value of each engine; none where one of them is senseless, or there is no such series."""
    figures: dict[tuple[bytes, ...], float] = {}
    if series is None:
        return figures
    for text, value in lines.values(series.name).items():
        labels = parse_labels(text)
        if series.label is not None and labels.get(series.label[0]) != series.label[1]:
            continue
        try:
            number = parse_number(value)
        except UnusableError:
            return {}
        which = _which(engine, labels)
        figures[which] = max(number, figures.get(which, 0.0))
    return figures


def _configs(lines: MetricLines, engine: _Engine) -> list[dict[bytes, bytes]]:
    """What each engine tells of its cache's settings."""
    told = lines.labels(engine.cache_config.name) if engine.cache_config else []
    return list({_which(engine, labels): labels for labels in told}.values())


def _which(engine: _Engine, labels: dict[bytes, bytes]) -> tuple[bytes, ...]:
    return tuple(labels.get(name, b"") for name in engine.apart)


def _capacity_tokens(lines: MetricLines, engine: _Engine, config: list[dict[bytes, bytes]]) -> int | None:
    names = engine.cache_config
    if names is not None and config:
        tokens = sum(
            parse_whole(labels.get(names.block_tokens)) * parse_whole(labels.get(names.blocks))
            for labels in config
        )
    else:
        blocks = _figures(lines, engine, engine.blocks)
        sizes = _figures(lines, engine, engine.block_tokens)
        tokens = sum(int(sizes.get(which, 0.0) * count) for which, count in blocks.items())
    return tokens if 0 < tokens <= _CAPACITY_TOKENS_MAX else None


def _lora(lines: MetricLines, name: bytes, engines: int) -> LoraLoad | None:
    """The series with each engine's newest timestamp: an engine leaves those of former adapters on its page.

    vLLM's do not name their engine; then as many of the newest count as there are engines.
    """
    try:
        newest_first = sorted(
            lines.values(name).items(), key=lambda item: parse_number(item[1]), reverse=True
        )
    except UnusableError:
        return None
    accounts: dict[object, dict[bytes, bytes]] = {}
    for place, (text, _) in enumerate(newest_first):
        labels = parse_labels(text)
        accounts.setdefault(labels.get(b"engine", place), labels)
        if len(accounts) >= engines:
            break
    if not accounts:
        return None
    told = accounts.values()
    return LoraLoad(
        running=frozenset().union(*(_names(labels.get(b"running_lora_adapters", b"")) for labels in told)),
        waiting=frozenset().union(*(_names(labels.get(b"waiting_lora_adapters", b"")) for labels in told)),
        places=sum(parse_whole(labels.get(b"max_lora")) for labels in told),
    )


def _names(text: bytes) -> frozenset[str]:
    names: Iterable[bytes] = text.split(b",", _ADAPTERS_MAX)[:_ADAPTERS_MAX]
    return frozenset(name.strip().decode("utf-8", "replace") for name in names if name.strip())
