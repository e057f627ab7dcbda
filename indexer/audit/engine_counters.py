"""Compares what an engine's metrics page tells with what its events made us believe. Pure.

Two readings of a page and the size of our view come in, a verdict comes out. Only signals that cannot be told
by a healthy engine count:

- The process is another one: its start time or its number of blocks changed, or a counter went back.
- It sleeps: a sleeping engine has dropped its cache, and says so only with the step after it wakes up.
- We hold more blocks than the engine has: removals were lost.
- Nothing of what we predicted was delivered: hits that we predicted added up, requests were looked up, and
  its counter of hit tokens did not move. Its cache was reset while it was idle, or it does not cache at all.

The usage of the KV cache is none of them: it counts blocks that running requests hold, not those that are
cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

# So many predicted hit tokens without any delivered are no coincidence of requests that skip the cache.
_PHANTOM_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class EngineReading:
    """Counts that one page told, and that we predicted until then; None where it is not told."""

    started_s: float | None = None  # start time of the process, seconds since the epoch
    capacity_blocks: int | None = None
    prompt_tokens: float | None = None
    query_tokens: float | None = None  # counter of tokens looked up in the prefix cache
    hit_tokens: float | None = None  # counter of tokens found there
    asleep: bool = False
    # When the page was asked for, on a monotonic clock: what came of the events since is newer.
    asked_s: float | None = None
    # Counter of ours: cached tokens predicted for requests that it had answered before the page was asked
    # for.
    predicted_tokens: int | None = None
    # The same with those of all requests sent to it before the page was read.
    predicted_sent_tokens: int | None = None


class Finding(StrEnum):
    """What is wrong with a view; also the reason that is given for dropping it."""

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
    """Judges a view by what its engine tells.

    Args:
        before: The reading since which predicted and delivered hits are compared; None for none.
        held_blocks: Copies that the view holds in device memory, in the engine's blocks; None: not known.
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
    constants = (before.started_s, now.started_s), (before.capacity_blocks, now.capacity_blocks)
    counters = (
        (before.prompt_tokens, now.prompt_tokens),
        (before.query_tokens, now.query_tokens),
        (before.hit_tokens, now.hit_tokens),
    )
    return any(_grown(*pair) for pair in constants) or any((_grown(*pair) or 0) < 0 for pair in counters)


def _phantom_hits(before: EngineReading, now: EngineReading) -> bool:
    # Hits of a request that was in flight may be in the older page already.
    predicted = _grown(before.predicted_sent_tokens, now.predicted_tokens)
    queried = _grown(before.query_tokens, now.query_tokens)
    hits = _grown(before.hit_tokens, now.hit_tokens)
    if predicted is None or queried is None or hits is None:
        return False
    return predicted >= _PHANTOM_TOKENS and queried >= predicted and hits == 0


def _grown(before: float | None, now: float | None) -> float | None:
    return None if before is None or now is None else now - before
