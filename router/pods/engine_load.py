"""A model server's metrics page in; its load, and what it tells of its life, out.

Looks for the few series that are used, under the names of vLLM, SGLang, TensorRT-LLM and Triton, and never
reads the rest of the page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from indexer import EngineReading

_SERIES_MAX = 1024
# Timestamps are the largest numbers of a load that make sense; counters may have grown larger.
_NUMBER_MAX = 1e10
_ADAPTERS_MAX = 1024
_CAPACITY_TOKENS_MAX = 10**12
_SPEED_MAX = 1e9

# Without these nothing is told of a load.
_FIGURES = ("waiting", "running", "kv_usage")

_LABEL = re.compile(rb'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_WHOLE = re.compile(rb"[0-9]{1,12}")


@dataclass(frozen=True, slots=True)
class LoraLoad:
    """A pod's places for LoRA adapters.

    Of several engines behind one port the pod has what any of them has.
    """

    running: frozenset[str]  # adapters that requests are computed with
    waiting: frozenset[str]  # adapters that requests in the queue need
    places: int  # how many can run at once


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine's own account of its load; figures are None where they are not told, or senseless."""

    waiting: int | None  # requests in its queue
    running: int | None  # requests being computed
    kv_usage: float | None  # share of the KV cache that running requests hold, 0..1
    kv_capacity_tokens: int | None  # size of the KV cache
    scraped_s: float  # when it was read, on the router's monotonic clock
    prefill_tokens_per_s: float | None = None  # by its own account
    lora: LoraLoad | None = None
    asked_s: float = -math.inf  # when it was asked for; -infinity: not known

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
    """Place where an engine tells a value."""

    name: bytes
    label: tuple[bytes, bytes] | None = (
        None  # of a metric with several series that of the value, with its text
    )
    number: bytes | None = None  # the label that holds the value; None: it is the series' own value


@dataclass(frozen=True, slots=True)
class _Engine:
    """An engine's names; None where it has no such metric."""

    waiting: _Series
    running: _Series
    kv_usage: _Series
    # Places of the tokens of a block and the number of blocks; the first that is there counts.
    sizes: tuple[tuple[_Series, _Series], ...]
    # Labels that tell several engines on one page apart, whose loads add up. Series that differ in others
    # only say the same again: ranks that compute the same requests together, or parts of a total.
    apart: tuple[bytes, ...] = ()
    lora: bytes | None = None
    speed: _Series | None = None


_VLLM_CONFIG = b"vllm:cache_config_info"
_SGLANG_CONFIG = b"sglang:cache_config_info"
_TRITON_REQUESTS = b"nv_trt_llm_request_metrics"
_TRITON_BLOCKS = b"nv_trt_llm_kv_cache_block_metrics"
_ENGINES = (
    # One engine for each data parallel rank; tensor and pipeline ranks have no series of their own.
    _Engine(
        waiting=_Series(b"vllm:num_requests_waiting"),
        running=_Series(b"vllm:num_requests_running"),
        kv_usage=_Series(b"vllm:kv_cache_usage_perc"),
        sizes=((_Series(_VLLM_CONFIG, None, b"block_size"), _Series(_VLLM_CONFIG, None, b"num_gpu_blocks")),),
        apart=(b"engine",),
        lora=b"vllm:lora_requests_info",
        speed=_Series(b"kvroute_engine_prefill_tokens_per_second"),
    ),
    # Every scheduler has series if it is told to: of tp_rank, pp_rank and moe_ep_rank (with context
    # parallelism by default) all have the same requests. priority="" is the total of all priorities.
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


_SLEEP = b"vllm:engine_sleep_state"
# States in which the KV cache is gone.
_DROPPED = (b"weights_offloaded", b"discard_all")


class _UnusableError(Exception):
    """The page is senseless."""


class EnginePage:
    """A metrics page in the text format."""

    def __init__(self, page: bytes) -> None:
        self._page = b"\n" + page

    def load(self, now_s: float, asked_s: float = -math.inf) -> EngineLoad | None:
        """Return the load; several engines on one page (data parallel ranks) are added up.

        A figure with a senseless value is not told; the others are. None when the page tells no usable load.
        """
        try:
            engine = next((engine for engine in _ENGINES if self.series(engine.kv_usage.name)), None)
            load = _load(self, engine, now_s, asked_s) if engine is not None else None
        except _UnusableError:
            return None
        return load if load is not None and load.untold != _FIGURES else None

    def reading(self, asked_s: float | None = None) -> EngineReading | None:
        """Return what is held against the view of the engine's cache, see `indexer.audit.engine_counters`.

        By vLLM's names, which the model server has too; of other engines only the process's start is known.

        Args:
            asked_s: When the page was asked for, on a monotonic clock.

        Returns:
            None where it tells of several engines, whose sums say nothing of one view, or of too much.
        """
        try:
            configs = [labels for labels, _ in self.series(_VLLM_CONFIG)]
            if len(configs) > 1:
                return None
            awake = self._sleep_states(b"awake")
            dropped = [self._sleep_states(state) for state in _DROPPED]
            return EngineReading(
                started_s=self._sum(b"process_start_time_seconds"),
                capacity_blocks=_whole(configs[0].get(b"num_gpu_blocks")) or None if configs else None,
                prompt_tokens=self._sum(b"vllm:prompt_tokens_total"),
                query_tokens=self._sum(b"vllm:prefix_cache_queries_total"),
                hit_tokens=self._sum(b"vllm:prefix_cache_hits_total"),
                # vLLM at sleep level 0 is in neither state, and keeps its cache.
                asleep=bool(awake) and not any(awake) and (not all(dropped) or any(map(any, dropped))),
                asked_s=asked_s,
            )
        except _UnusableError:
            return None

    @property
    def is_asleep(self) -> bool:
        """Whether all engines that the page tells of sleep: requests wait until somebody wakes them."""
        try:
            awake = self._sleep_states(b"awake")
        except _UnusableError:
            return False
        return bool(awake) and not any(awake)

    def series(self, name: bytes) -> list[tuple[dict[bytes, bytes], bytes]]:
        """Labels and value, as written, of a metric's series; what is there twice counts once, the last time.

        Raises:
            _UnusableError: There are too many.
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
        """Whether each engine is in this state; none where that is not told."""
        told = self.series(_SLEEP)
        return [_number(value) != 0.0 for labels, value in told if labels.get(b"sleep_state") == state]

    def _sum(self, name: bytes) -> float | None:
        """Sum of a counter's series; None where there is none, or one is no count."""
        values = [_number(value) for _, value in self.series(name)]
        return sum(values) if values and all(map(math.isfinite, values)) else None


def _number(text: bytes) -> float:
    """Return a value that is a count, a share or a time; NaN if it is none."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if 0.0 <= value < math.inf else math.nan


def _whole(text: bytes | None) -> int:
    """Return a label's value that is a whole number; 0 where it is none."""
    return int(text) if text is not None and _WHOLE.fullmatch(text) else 0


def _load(page: EnginePage, engine: _Engine, now_s: float, asked_s: float) -> EngineLoad:
    waiting, running = _figures(page, engine, engine.waiting), _figures(page, engine, engine.running)
    usages = [min(usage, 1.0) for usage in _figures(page, engine, engine.kv_usage).values()]
    speed = sum(_figures(page, engine, engine.speed).values())
    return EngineLoad(
        waiting=int(sum(waiting.values())) if waiting else None,
        running=int(sum(running.values())) if running else None,
        # The mean, which with the sum of their sizes gives the tokens that they hold together: an engine of
        # several ranks sends a request itself to one that has room.
        kv_usage=sum(usages) / len(usages) if usages else None,
        kv_capacity_tokens=_capacity_tokens(page, engine),
        scraped_s=now_s,
        prefill_tokens_per_s=speed if 0.0 < speed <= _SPEED_MAX else None,
        lora=_lora(page, engine.lora, max(map(len, (waiting, running, usages)))) if engine.lora else None,
        asked_s=asked_s,
    )


def _figures(page: EnginePage, engine: _Engine, series: _Series | None) -> dict[tuple[bytes, ...], float]:
    """One value of each engine; none where one of them is senseless, or there is no such series."""
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
        tokens = sum(int(sizes.get(which, 0.0) * count) for which, count in counts.items())
        if 0 < tokens <= _CAPACITY_TOKENS_MAX:
            return tokens
    return None


def _lora(page: EnginePage, name: bytes, engines: int) -> LoraLoad | None:
    """The series with each engine's newest timestamp: an engine leaves those of former adapters on its page.

    vLLM's do not name their engine; then as many of the newest count as there are engines.
    """
    stamped = [(_number(value), labels) for labels, value in page.series(name)]
    if not all(stamp <= _NUMBER_MAX for stamp, _ in stamped):
        return None
    accounts: dict[object, dict[bytes, bytes]] = {}
    for place, (_, labels) in enumerate(sorted(stamped, key=lambda one: one[0], reverse=True)):
        accounts.setdefault(labels.get(b"engine", place), labels)
        if len(accounts) >= engines:
            break
    if not accounts:
        return None
    told = accounts.values()
    return LoraLoad(
        running=frozenset().union(*(_names(labels.get(b"running_lora_adapters", b"")) for labels in told)),
        waiting=frozenset().union(*(_names(labels.get(b"waiting_lora_adapters", b"")) for labels in told)),
        places=sum(_whole(labels.get(b"max_lora")) for labels in told),
    )


def _names(text: bytes) -> frozenset[str]:
    names: Iterable[bytes] = text.split(b",", _ADAPTERS_MAX)[:_ADAPTERS_MAX]
    return frozenset(name.strip().decode("utf-8", "replace") for name in names if name.strip())
