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
_PROMPT, _QUERIES, _HITS = (
    b"vllm:prompt_tokens_total",
    b"vllm:prefix_cache_queries_total",
    b"vllm:prefix_cache_hits_total",
)


def engine_reading(page: bytes) -> EngineReading | None:
    """Reads a metrics page.

    Returns:
        None where it tells of several engines, whose sums say nothing of one view, or of too much.
    """
    lines = MetricLines(page)
    try:
        configs = lines.labels(_CONFIG)
        if len(configs) > 1:
            return None
        blocks = configs[0].get(b"num_gpu_blocks", b"") if configs else b""
        awake = [
            value
            for labels, value in zip(lines.labels(_SLEEP), lines.values(_SLEEP).values(), strict=True)
            if labels.get(b"sleep_state") == b"awake"
        ]
        return EngineReading(
            started_s=_sum(lines, _START),
            capacity_blocks=int(blocks) if blocks.isdigit() and len(blocks) < 12 and int(blocks) else None,
            prompt_tokens=_sum(lines, _PROMPT),
            query_tokens=_sum(lines, _QUERIES),
            hit_tokens=_sum(lines, _HITS),
            asleep=bool(awake) and all(_value(value) == 0.0 for value in awake),
        )
    except UnusableError:
        return None


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
