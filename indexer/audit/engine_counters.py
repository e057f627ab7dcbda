"""Consistency check of a view against the counters on the engine's metrics page. Pure.

Input: two readings of a page and the size of the view. Output: a finding or None. Only signals count that a
healthy engine cannot produce:

- Process changed: its start time or its number of blocks changed, or a counter decreased.
- Asleep: a sleeping engine has dropped its cache, and publishes that only with its first step after waking.
- Overfull: the view has more blocks than the engine, so removals were lost.
- Phantom hits: we predicted hits and requests were looked up, but the engine's counter of hit tokens did not
  change. Its cache was reset while it was idle, or it has no prefix cache.

The usage of the KV cache is no signal: it counts blocks of running requests, not cached blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

# Predicted hit tokens without any hit that are a finding; fewer may be requests that skip the cache.
_PHANTOM_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class CachingFacts:
    """Facts about prefix caching on a metrics page, also of several engines."""

    is_on: bool | None = None  # None: unknown
    block_tokens: int = 0  # 0: unknown
    prompts: float = math.nan  # counter of finished prompts; NaN: unknown or none
    prompts_tokens: float = math.nan  # counter of their tokens
    reports_evictions: bool = False  # whether removals from host memory are known to be published


@dataclass(frozen=True, slots=True)
class EngineReading:
    """Counters of one metrics page and our predictions at that time; None where unknown."""

    started_s: float | None = None  # start time of the process, seconds since the epoch
    capacity_blocks: int | None = None
    prompt_tokens: float | None = None
    query_tokens: float | None = None  # counter of tokens looked up in the prefix cache
    hit_tokens: float | None = None  # counter of tokens found in the prefix cache
    asleep: bool = False
    has_drafter: bool | None = None  # whether the engine has counters of speculative decoding
    # Time of the page's request, on a monotonic clock; later events are newer than the page.
    asked_s: float | None = None
    # Our counter of cached tokens, predicted for requests answered before the page was requested.
    predicted_tokens: int | None = None
    # Our counter of cached tokens, predicted for requests sent before the page was read.
    predicted_sent_tokens: int | None = None
    caching: CachingFacts = CachingFacts()


class Finding(StrEnum):
    """Contradiction between an engine's counters and its view; the reason for clearing the view."""

    PROCESS_CHANGED = "process_changed"
    ASLEEP = "asleep"
    OVERFULL = "overfull"
    PHANTOM_HITS = "phantom_hits"

    @property
    def emptied(self) -> bool:
        return self is Finding.ASLEEP


def check_counters(
    before: EngineReading | None, now: EngineReading, held_blocks: int | None
) -> Finding | None:
    """Compare an engine's counters with its view; return the finding, None if they agree.

    Args:
        before: Earlier reading, since which predicted and actual hits are compared; None: the first reading.
        held_blocks: Blocks of the view in device memory, in the engine's block size; None: unknown.
    """
    if before is not None and _another_process(before, now):
        return Finding.PROCESS_CHANGED
    if now.asleep:
        return Finding.ASLEEP
    if held_blocks is not None and now.capacity_blocks is not None and held_blocks > now.capacity_blocks:
        return Finding.OVERFULL
    if before is not None and _phantom_hits(before, now):
        return Finding.PHANTOM_HITS
    return None


def _another_process(before: EngineReading, now: EngineReading) -> bool:
    def grown(name: str) -> float:
        return _grown(getattr(before, name), getattr(now, name)) or 0

    constants, counters = ("started_s", "capacity_blocks"), ("prompt_tokens", "query_tokens", "hit_tokens")
    return any(map(grown, constants)) or any(grown(name) < 0 for name in counters)


def _phantom_hits(before: EngineReading, now: EngineReading) -> bool:
    # The older page may already count hits of requests that were in flight then.
    predicted = _grown(before.predicted_sent_tokens, now.predicted_tokens)
    queried = _grown(before.query_tokens, now.query_tokens)
    hits = _grown(before.hit_tokens, now.hit_tokens)
    if predicted is None or queried is None or hits is None:
        return False
    return predicted >= _PHANTOM_TOKENS and queried >= predicted and hits == 0


def _grown(before: float | None, now: float | None) -> float | None:
    return None if before is None or now is None else now - before
