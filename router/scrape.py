"""A model server's metrics page in, its load out.

Looks for the few series that picking consumes, under the names of vLLM, SGLang, TensorRT-LLM and Triton, and
never reads the rest of the page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

_SERIES_MAX = 1024
_ADAPTERS_MAX = 1024
_COUNT_MAX = 1e9
_CAPACITY_TOKENS_MAX = 10**12
_SPEED_MAX = 1e9

_LABEL = re.compile(rb'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_WHOLE = re.compile(rb"[0-9]{1,12}")


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
        waiting: Requests in its queue.
        running: Requests being computed.
        kv_usage: Share of the KV cache that running requests hold, 0..1.
        kv_capacity_tokens: Size of the KV cache; None if not told.
        scraped_s: When it was read, on the router's monotonic clock.
        prefill_tokens_per_s: The engine's own account of its prefill speed; None if not told.
        ordered_step_tokens: Tokens of one step of an engine that announces the "aged" prefill order, see
            `queue_order`; 0: it does not, or does not say how many.
        lora: None if not told.
    """

    waiting: int
    running: int
    kv_usage: float
    kv_capacity_tokens: int | None
    scraped_s: float
    prefill_tokens_per_s: float | None = None
    ordered_step_tokens: int = 0
    lora: LoraLoad | None = None


@dataclass(frozen=True, slots=True)
class _Series:
    """Where an engine tells a value: a metric, of a certain label value if it has several."""

    name: bytes
    label: tuple[bytes, bytes] | None = None


@dataclass(frozen=True, slots=True)
class _Engine:
    """An engine's names.

    Attributes:
        block_tokens, blocks: The KV cache's block size and number of blocks: labels of `cache_config` where
            the engine has such a metric, else metrics of their own.
        lora, speed: None where the engine has no such metric.
    """

    waiting: _Series
    running: _Series
    kv_usage: _Series
    block_tokens: _Series
    blocks: _Series
    cache_config: bytes | None = None
    lora: bytes | None = None
    speed: bytes | None = None


_TRITON_REQUESTS = b"nv_trt_llm_request_metrics"
_TRITON_BLOCKS = b"nv_trt_llm_kv_cache_block_metrics"
_ENGINES = (
    _Engine(
        waiting=_Series(b"vllm:num_requests_waiting"),
        running=_Series(b"vllm:num_requests_running"),
        kv_usage=_Series(b"vllm:kv_cache_usage_perc"),
        block_tokens=_Series(b"block_size"),
        blocks=_Series(b"num_gpu_blocks"),
        cache_config=b"vllm:cache_config_info",
        lora=b"vllm:lora_requests_info",
        speed=b"kvroute_engine_prefill_tokens_per_second",
    ),
    _Engine(
        waiting=_Series(b"sglang:num_queue_reqs"),
        running=_Series(b"sglang:num_running_reqs"),
        kv_usage=_Series(b"sglang:token_usage"),
        block_tokens=_Series(b"page_size"),
        blocks=_Series(b"num_pages"),
        cache_config=b"sglang:cache_config_info",
    ),
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
        block_tokens=_Series(_TRITON_BLOCKS, (b"kv_cache_block_type", b"tokens_per")),
        blocks=_Series(_TRITON_BLOCKS, (b"kv_cache_block_type", b"max")),
    ),
)


class UnusableError(Exception):
    """The page says something senseless."""


def engine_load(page: bytes, now_s: float) -> EngineLoad | None:
    """Reads a metrics page; several engines on one page (data parallel ranks) are added up.

    A series that is there twice counts once, the last time.

    Returns:
        None when the page tells no usable load.
    """
    lines = Lines(page)
    try:
        for engine in _ENGINES:
            if lines.values(engine.kv_usage.name):
                return _load(lines, engine, now_s)
    except UnusableError:
        pass
    return None


def _load(lines: Lines, engine: _Engine, now_s: float) -> EngineLoad:
    usages = lines.numbers(engine.kv_usage)
    config = lines.labels(engine.cache_config) if engine.cache_config else []
    speeds = lines.numbers(_Series(engine.speed)) if engine.speed else []
    return EngineLoad(
        waiting=int(sum(lines.numbers(engine.waiting))),
        running=int(sum(lines.numbers(engine.running))),
        kv_usage=sum(min(usage, 1.0) for usage in usages) / max(1, len(usages)),
        kv_capacity_tokens=_capacity_tokens(lines, engine, config),
        scraped_s=now_s,
        prefill_tokens_per_s=sum(speeds) if 0.0 < sum(speeds) <= _SPEED_MAX else None,
        ordered_step_tokens=_ordered_step_tokens(config),
        lora=_lora(lines, engine.lora, len(usages)) if engine.lora else None,
    )


def _capacity_tokens(lines: Lines, engine: _Engine, config: list[dict[bytes, bytes]]) -> int | None:
    if engine.cache_config is None:
        blocks = zip(lines.numbers(engine.block_tokens), lines.numbers(engine.blocks), strict=False)
        tokens = sum(int(size * count) for size, count in blocks)
    else:
        tokens = sum(
            _whole(labels.get(engine.block_tokens.name)) * _whole(labels.get(engine.blocks.name))
            for labels in config
        )
    return tokens if 0 < tokens <= _CAPACITY_TOKENS_MAX else None


def _ordered_step_tokens(config: list[dict[bytes, bytes]]) -> int:
    orders = [labels for labels in config if labels.get(b"prefill_order") == b"aged"]
    return sum(_whole(labels.get(b"max_num_batched_tokens")) for labels in orders)


def _lora(lines: Lines, name: bytes, engines: int) -> LoraLoad | None:
    """The series with each engine's newest timestamp: an engine leaves those of former adapters on its page.

    vLLM's do not name their engine; then as many of the newest count as there are engines.
    """
    newest_first = sorted(lines.values(name).items(), key=lambda item: _number(item[1]), reverse=True)
    accounts: dict[object, dict[bytes, bytes]] = {}
    for place, (text, _) in enumerate(newest_first):
        labels = _labels(text)
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


class Lines:
    """The lines of a page, found by the name they begin with."""

    def __init__(self, page: bytes) -> None:
        self._page = b"\n" + page

    def values(self, name: bytes) -> dict[bytes, bytes]:
        """Values by labels, as they are written.

        Raises:
            UnusableError: There are too many.
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
                    raise UnusableError
            at = page.find(needle, at + len(needle))
        return found

    def numbers(self, series: _Series) -> list[float]:
        """Values of one series of each engine.

        Raises:
            UnusableError: One is no sensible count.
        """
        found = self.values(series.name)
        if series.label is None:
            return [_number(value) for value in found.values()]
        key, wanted = series.label
        return [_number(value) for labels, value in found.items() if _labels(labels).get(key) == wanted]

    def labels(self, name: bytes) -> list[dict[bytes, bytes]]:
        """Labels of all series of a metric."""
        return [_labels(labels) for labels in self.values(name)]


def _labels(text: bytes) -> dict[bytes, bytes]:
    return dict(_LABEL.findall(text))


def _number(text: bytes) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise UnusableError from error
    # Timestamps are the largest numbers that make sense.
    if not (math.isfinite(value) and 0.0 <= value <= _COUNT_MAX * 10):
        raise UnusableError
    return value


def _whole(text: bytes | None) -> int:
    return int(text) if text is not None and _WHOLE.fullmatch(text) else 0


def _names(text: bytes) -> frozenset[str]:
    names: Iterable[bytes] = text.split(b",", _ADAPTERS_MAX)[:_ADAPTERS_MAX]
    return frozenset(name.strip().decode("utf-8", "replace") for name in names if name.strip())
