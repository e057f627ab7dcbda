"""What an engine's metrics page tells of its life rather than its load: a page in, an EngineReading out.

Held against the view of its cache, see `indexer.reconcile`. vLLM's names, which the model server has too; of
other engines only the process's start is known.
"""

from __future__ import annotations

import math

from indexer.reconcile import EngineReading
from router.metric_lines import MetricLines, UnusableError

_CONFIG = b"vllm:cache_config_info"
_SLEEP = b"vllm:engine_sleep_state"
_START = b"process_start_time_seconds"
# States in which the KV cache is gone.
_DROPPED = (b"weights_offloaded", b"discard_all")
_PROMPT, _QUERIES, _HITS = (
    b"vllm:prompt_tokens_total",
    b"vllm:prefix_cache_queries_total",
    b"vllm:prefix_cache_hits_total",
)


def is_asleep(page: bytes) -> bool:
    """Whether all engines that a metrics page tells of sleep: requests wait until somebody wakes them."""
    try:
        awake = _sleep_states(MetricLines(page), b"awake")
    except UnusableError:
        return False
    return bool(awake) and not any(awake)


def engine_reading(page: bytes, asked_s: float | None = None) -> EngineReading | None:
    """Reads a metrics page.

    Args:
        page: The page.
        asked_s: When it was asked for, on a monotonic clock.

    Returns:
        None where it tells of several engines, whose sums say nothing of one view, or of too much.
    """
    lines = MetricLines(page)
    try:
        configs = lines.labels(_CONFIG)
        if len(configs) > 1:
            return None
        blocks = configs[0].get(b"num_gpu_blocks", b"") if configs else b""
        awake = _sleep_states(lines, b"awake")
        dropped = [_sleep_states(lines, state) for state in _DROPPED]
        return EngineReading(
            started_s=_sum(lines, _START),
            capacity_blocks=int(blocks) if blocks.isdigit() and len(blocks) < 12 and int(blocks) else None,
            prompt_tokens=_sum(lines, _PROMPT),
            query_tokens=_sum(lines, _QUERIES),
            hit_tokens=_sum(lines, _HITS),
            # vLLM at sleep level 0 is in neither state, and keeps its cache.
            asleep=bool(awake) and not any(awake) and (not all(dropped) or any(map(any, dropped))),
            asked_s=asked_s,
        )
    except UnusableError:
        return None


def _sleep_states(lines: MetricLines, state: bytes) -> list[bool]:
    """Whether each engine is in this state; none where that is not told."""
    told = zip(lines.labels(_SLEEP), lines.values(_SLEEP).values(), strict=True)
    return [_value(value) != 0.0 for labels, value in told if labels.get(b"sleep_state") == state]


def _sum(lines: MetricLines, name: bytes) -> float | None:
    """Sum of a metric's series; None where there is none, or one is no count."""
    found = [_value(text) for text in lines.values(name).values()]
    values = [value for value in found if value is not None]
    return sum(values) if values and len(values) == len(found) else None


def _value(text: bytes) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0.0 else None
