"""Parser of a model server's metrics page: load and engine counters.

Searches for the few series needed, under the names of vLLM, SGLang, TensorRT-LLM and Triton, without parsing
the rest of the page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from indexer import CachingFacts, EngineReading

_SERIES_MAX = 1024
# Timestamps are the largest valid numbers of a load; counters may be larger.
_NUMBER_MAX = 1e10
_ADAPTERS_MAX = 1024
_CAPACITY_TOKENS_MAX = 10**12
_SPEED_MAX = 1e9

# A page without any of these has no load.
_FIGURES = ("waiting", "running", "kv_usage")

_LABEL = re.compile(rb'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_WHOLE = re.compile(rb"[0-9]{1,12}")


@dataclass(frozen=True, slots=True)
class LoraLoad:
    """LoRA adapters in use by a pod; the union over several engines behind one port."""

    running: frozenset[str]  # adapters of running requests
    waiting: frozenset[str]  # adapters of queued requests
    places: int  # maximum number of adapters that can run at once


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load reported by an engine; fields are None if missing or invalid."""

    waiting: int | None  # queued requests
    running: int | None  # running requests
    kv_usage: float | None  # share of the KV cache used by running requests, 0..1
    kv_capacity_tokens: int | None  # size of the KV cache
    scraped_s: float  # when the page was received, in seconds of the router's monotonic clock
    prefill_tokens_per_s: float | None = None  # prefill rate reported by the engine
    lora: LoraLoad | None = None
    asked_s: float = -math.inf  # when the page was requested; -inf if unknown
    tokens: float | None = None  # prompt and output tokens since the engine's start

    @property
    def requests(self) -> int | None:
        """Number of queued and running requests; None if either is missing."""
        return None if self.waiting is None or self.running is None else self.waiting + self.running

    @property
    def missing_figures(self) -> tuple[str, ...]:
        """Names of missing fields among `waiting`, `running` and `kv_usage`."""
        return tuple(name for name in _FIGURES if getattr(self, name) is None)


@dataclass(frozen=True, slots=True)
class _Series:
    """Location of a value on a metrics page."""

    name: bytes
    label: tuple[bytes, bytes] | None = None  # name and text of the label that selects one of several series
    number: bytes | None = None  # the label that holds the value; None: it is the series' own value


@dataclass(frozen=True, slots=True)
class _Engine:
    """Metric names of an engine type; None if it has no such metric."""

    waiting: _Series
    running: _Series
    kv_usage: _Series
    # Alternatives of (tokens per block, number of blocks); the first one present applies.
    sizes: tuple[tuple[_Series, _Series], ...]
    # Labels that identify the engines on one page, whose loads are added. Series that differ only in other
    # labels are duplicates: ranks that compute the same requests together, or parts of a total.
    apart: tuple[bytes, ...] = ()
    sizes_are_totals: bool = False  # whether each engine's number of blocks is that of all
    lora: bytes | None = None
    speed: _Series | None = None
    tokens: tuple[bytes, ...] = ()  # counters of prompt and output tokens


_VLLM_CONFIG = b"vllm:cache_config_info"
_SGLANG_CONFIG = b"sglang:cache_config_info"
_TRITON_REQUESTS = b"nv_trt_llm_request_metrics"
_TRITON_BLOCKS = b"nv_trt_llm_kv_cache_block_metrics"
_ENGINES = (
    # One engine per data-parallel rank; tensor and pipeline ranks have no series of their own.
    _Engine(
        waiting=_Series(b"vllm:num_requests_waiting"),
        running=_Series(b"vllm:num_requests_running"),
        kv_usage=_Series(b"vllm:kv_cache_usage_perc"),
        sizes=((_Series(_VLLM_CONFIG, None, b"block_size"), _Series(_VLLM_CONFIG, None, b"num_gpu_blocks")),),
        apart=(b"engine",),
        sizes_are_totals=True,
        lora=b"vllm:lora_requests_info",
        speed=_Series(b"kvroute_engine_prefill_tokens_per_second"),
        tokens=(b"vllm:prompt_tokens_total", b"vllm:generation_tokens_total"),
    ),
    # Optionally every scheduler has series; those that differ in tp_rank, pp_rank and moe_ep_rank (with
    # context parallelism by default) have the same requests. priority="" is the total of all priorities.
    _Engine(
        waiting=_Series(b"sglang:num_queue_reqs"),
        running=_Series(b"sglang:num_running_reqs"),
        kv_usage=_Series(b"sglang:token_usage"),
        sizes=(
            (_Series(_SGLANG_CONFIG, None, b"page_size"), _Series(_SGLANG_CONFIG, None, b"num_pages")),
            # From 0.5.11 on.
            (_Series(b"sglang:page_size"), _Series(b"sglang:num_pages")),
        ),
        apart=(b"dp_rank",),
        tokens=(b"sglang:prompt_tokens_total", b"sglang:generation_tokens_total"),
    ),
    # One engine behind each server.
    _Engine(
        waiting=_Series(b"trtllm_num_requests_waiting"),
        running=_Series(b"trtllm_num_requests_running"),
        kv_usage=_Series(b"trtllm_kv_cache_utilization"),
        sizes=((_Series(b"trtllm_kv_cache_tokens_per_block"), _Series(b"trtllm_kv_cache_max_blocks")),),
    ),
    _Engine(
        waiting=_Series(_TRITON_REQUESTS, (b"request_type", b"waiting")),
        running=_Series(_TRITON_REQUESTS, (b"request_type", b"scheduled")),
        kv_usage=_Series(_TRITON_BLOCKS, (b"kv_cache_block_type", b"fraction")),
        sizes=(
            (
                _Series(_TRITON_BLOCKS, (b"kv_cache_block_type", b"tokens_per")),
                _Series(_TRITON_BLOCKS, (b"kv_cache_block_type", b"max")),
            ),
        ),
        apart=(b"model", b"version"),
    ),
)


# Present, even at 0, with any kind of speculative decoding.
_DRAFTS = b"vllm:spec_decode_num_drafts_total"
_CACHING = b"enable_prefix_caching"
_PROMPTS = b"vllm:request_prompt_tokens"
# Prefixes of metrics of vLLM's own OffloadingConnector and of our model server, whose events report removals.
_REPORT_EVICTIONS = (b"vllm:kv_offload_", b"kvroute_engine_")
_SLEEP = b"vllm:engine_sleep_state"
# States in which the KV cache is gone.
_DROPPED = (b"weights_offloaded", b"discard_all")


class _UnusableError(Exception):
    """Raised for a page that cannot be used."""


class EnginePage:
    """Metrics page in Prometheus text format."""

    def __init__(self, page: bytes) -> None:
        self._page = b"\n" + page

    def load(self, now_s: float, asked_s: float = -math.inf) -> EngineLoad | None:
        """Return the load, summed over engines (data-parallel ranks); None if the page has no valid load.

        A field with an invalid value is None; others are unaffected.
        """
        try:
            engine = next((engine for engine in _ENGINES if self.series(engine.kv_usage.name)), None)
            load = _load(self, engine, now_s, asked_s) if engine is not None else None
        except _UnusableError:
            return None
        return load if load is not None and load.missing_figures != _FIGURES else None

    def reading(self, asked_s: float | None = None) -> EngineReading | None:
        """Return the counters to compare with the engine's view, see `indexer.audit.engine_counters`.

        Uses vLLM's names, as the model server does; other engines report only the start of the process.
        Of several engines on a page only `caching` and `has_drafter` are read.

        Args:
            asked_s: When the page was requested, in monotonic seconds.

        Returns:
            The counters; None if the page has too many series.
        """
        try:
            configs = [labels for labels, _ in self.series(_VLLM_CONFIG)]
            caching = {labels.get(_CACHING) for labels in configs} - {None}
            facts = CachingFacts(
                is_on=b"False" not in caching if caching else None,
                block_tokens=_whole(configs[0].get(b"block_size")) if configs else 0,
                prompts=self.total(_PROMPTS + b"_count") or math.nan,
                prompts_tokens=self.total(_PROMPTS + b"_sum") or math.nan,
                reports_evictions=any(b"\n" + sign in self._page for sign in _REPORT_EVICTIONS),
            )
            has_drafter = bool(self.series(_DRAFTS)) if configs else None
            if len(configs) > 1:
                return EngineReading(caching=facts, has_drafter=has_drafter)
            awake = self._sleep_states(b"awake")
            dropped = [self._sleep_states(state) for state in _DROPPED]
            return EngineReading(
                started_s=self.total(b"process_start_time_seconds"),
                capacity_blocks=_whole(configs[0].get(b"num_gpu_blocks")) or None if configs else None,
                prompt_tokens=self.total(b"vllm:prompt_tokens_total"),
                query_tokens=self.total(b"vllm:prefix_cache_queries_total"),
                hit_tokens=self.total(b"vllm:prefix_cache_hits_total"),
                # vLLM at sleep level 0 is in neither state, and keeps its cache.
                asleep=bool(awake) and not any(awake) and (not all(dropped) or any(map(any, dropped))),
                asked_s=asked_s,
                has_drafter=has_drafter,
                caching=facts,
            )
        except _UnusableError:
            return None

    @property
    def is_asleep(self) -> bool:
        """Return whether all engines on the page sleep, so that requests wait until they are woken."""
        try:
            awake = self._sleep_states(b"awake")
        except _UnusableError:
            return False
        return bool(awake) and not any(awake)

    @property
    def block_tokens(self) -> int | None:
        """Tokens of a block, in the first engine that reports them; None if none does."""
        try:
            sizes = [_figures(self, engine, size) for engine in _ENGINES for size, _ in engine.sizes]
        except _UnusableError:
            return None
        return next((int(size) for of_one in sizes for size in of_one.values() if size), None)

    def series(self, name: bytes) -> list[tuple[dict[bytes, bytes], bytes]]:
        """Return labels and value text of a metric's series; of duplicates, the last one.

        Raises:
            _UnusableError: There are too many series.
        """
        page, needle, found = self._page, b"\n" + name, {}
        at = page.find(needle)
        while at >= 0:
            end = page.find(b"\n", at + 1)
            rest = page[at + len(needle) : end if end >= 0 else len(page)]
            if rest[:1] in (b"{", b" ", b"\t"):
                labels, _, tail = rest.rpartition(b"}")
                found[labels] = (tail.split(maxsplit=1) or [b""])[0]
                if len(found) > _SERIES_MAX:
                    raise _UnusableError
            at = page.find(needle, at + len(needle))
        return [(dict(_LABEL.findall(labels)), value) for labels, value in found.items()]

    def _sleep_states(self, state: bytes) -> list[bool]:
        """Return, per engine, whether it is in this state; empty if not reported."""
        reported = self.series(_SLEEP)
        return [_number(value) != 0.0 for labels, value in reported if labels.get(b"sleep_state") == state]

    def total(self, name: bytes) -> float | None:
        """Return the sum of a counter's series; None if there are none, or one is invalid."""
        values = [_number(value) for _, value in self.series(name)]
        return sum(values) if values and all(map(math.isfinite, values)) else None


def _number(text: bytes) -> float:
    """Return a finite non-negative number, or NaN."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if 0.0 <= value < math.inf else math.nan


def _whole(text: bytes | None) -> int:
    """Return a label's value as an integer; 0 if it is not one."""
    return int(text) if text is not None and _WHOLE.fullmatch(text) else 0


def _load(page: EnginePage, engine: _Engine, now_s: float, asked_s: float) -> EngineLoad:
    waiting, running = _figures(page, engine, engine.waiting), _figures(page, engine, engine.running)
    usages = [min(usage, 1.0) for usage in _figures(page, engine, engine.kv_usage).values()]
    speed = sum(_figures(page, engine, engine.speed).values())
    tokens = [total for name in engine.tokens if (total := page.total(name)) is not None]
    return EngineLoad(
        waiting=int(sum(waiting.values())) if waiting else None,
        running=int(sum(running.values())) if running else None,
        # The mean usage times the total size gives the tokens in use. An engine with several ranks itself
        # assigns a request to a rank with room.
        kv_usage=sum(usages) / len(usages) if usages else None,
        kv_capacity_tokens=_capacity_tokens(page, engine),
        scraped_s=now_s,
        prefill_tokens_per_s=speed if 0.0 < speed <= _SPEED_MAX else None,
        lora=_lora(page, engine.lora, max(map(len, (waiting, running, usages)))) if engine.lora else None,
        asked_s=asked_s,
        tokens=sum(tokens) if tokens else None,
    )


def _figures(page: EnginePage, engine: _Engine, series: _Series | None) -> dict[tuple[bytes, ...], float]:
    """Return one value per engine; empty if any value is invalid, or the series is missing."""
    figures: dict[tuple[bytes, ...], float] = {}
    if series is None:
        return figures
    for labels, value in page.series(series.name):
        if series.label is not None and labels.get(series.label[0]) != series.label[1]:
            continue
        number = _number(value if series.number is None else labels.get(series.number, b""))
        if not number <= _NUMBER_MAX:
            return {}
        which = tuple(labels.get(name, b"") for name in engine.apart)
        figures[which] = max(number, figures.get(which, 0.0))
    return figures


def _capacity_tokens(page: EnginePage, engine: _Engine) -> int | None:
    for block_tokens, blocks in engine.sizes:
        sizes, counts = _figures(page, engine, block_tokens), _figures(page, engine, blocks)
        each = [int(sizes.get(which, 0.0) * count) for which, count in counts.items()]
        tokens = max(each, default=0) if engine.sizes_are_totals else sum(each)
        if 0 < tokens <= _CAPACITY_TOKENS_MAX:
            return tokens
    return None


def _lora(page: EnginePage, name: bytes, engines: int) -> LoraLoad | None:
    """Return the LoRA load from the newest series, one per engine; those of former adapters stay there."""
    stamped = [(_number(value), labels) for labels, value in page.series(name)]
    if not all(stamp <= _NUMBER_MAX for stamp, _ in stamped):
        return None
    accounts: dict[object, dict[bytes, bytes]] = {}
    for place, (_, labels) in enumerate(sorted(stamped, key=lambda one: one[0], reverse=True)):
        # vLLM's series may lack the engine label.
        accounts.setdefault(labels.get(b"engine", place), labels)
        if len(accounts) >= engines:
            break
    if not accounts:
        return None
    reported = accounts.values()
    running, waiting = (
        frozenset(name for labels in reported for name in _names(labels.get(adapters, b"")))
        for adapters in (b"running_lora_adapters", b"waiting_lora_adapters")
    )
    return LoraLoad(running, waiting, places=sum(_whole(labels.get(b"max_lora")) for labels in reported))


def _names(text: bytes) -> Iterator[str]:
    """Yield the names in a comma-separated list."""
    for name in text.split(b",", _ADAPTERS_MAX)[:_ADAPTERS_MAX]:
        if name.strip():
            yield name.strip().decode("utf-8", "replace")
