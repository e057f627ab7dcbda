"""A model server's metrics page in, its load out.

Knows vLLM's metric names and picks out their lines; builds no tree of the rest.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_WAITING = b"vllm:num_requests_waiting"
_RUNNING = b"vllm:num_requests_running"
_KV_USAGE = b"vllm:kv_cache_usage_perc"
_CACHE_CONFIG = b"vllm:cache_config_info"

_LINE = re.compile(
    rb"^(" + b"|".join((_WAITING, _RUNNING, _KV_USAGE, _CACHE_CONFIG)) + rb")(?:\{([^\n]*)\})?"
    rb"[ \t]+(\S+)(?:[ \t]+-?[0-9]+)?[ \t\r]*$",
    re.MULTILINE,
)
_LABEL = re.compile(rb'(block_size|num_gpu_blocks)="([0-9]{1,12})"')
_COUNT_MAX = 1e9


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine's own account of its load.

    Attributes:
        waiting: Requests in its queue.
        running: Requests being computed.
        kv_usage: Share of the KV cache that running requests hold, 0..1.
        kv_capacity_tokens: Size of the KV cache; None if not told.
        scraped_s: When it was read, on the router's monotonic clock.
    """

    waiting: int
    running: int
    kv_usage: float
    kv_capacity_tokens: int | None
    scraped_s: float


def engine_load(page: bytes, now_s: float) -> EngineLoad | None:
    """Reads a metrics page; several engines on one page (data parallel ranks) are added up.

    Returns:
        None when the page tells no usable load.
    """
    waiting = running = capacity = 0
    usages = []
    for name, labels, text in _LINE.findall(page):
        if name == _CACHE_CONFIG:
            capacity += _capacity_tokens(labels)
        elif name in (_WAITING, _RUNNING, _KV_USAGE):
            value = _number(text)
            if value is None:
                return None
            if name == _WAITING:
                waiting += int(value)
            elif name == _RUNNING:
                running += int(value)
            else:
                usages.append(min(value, 1.0))
    if not usages:
        return None
    return EngineLoad(waiting, running, sum(usages) / len(usages), capacity or None, now_s)


def _capacity_tokens(labels: bytes) -> int:
    told = {name: int(value) for name, value in _LABEL.findall(labels)}
    return told.get(b"block_size", 0) * told.get(b"num_gpu_blocks", 0)


def _number(text: bytes) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and 0.0 <= value <= _COUNT_MAX else None
