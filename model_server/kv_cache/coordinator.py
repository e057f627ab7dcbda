"""Longest cached prefix of models whose KV cache groups differ (full attention and sliding windows).

Follows the rule of vLLM's hybrid KV cache coordinator. Pure functions.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

# (group, block index) -> whether the block's content is cached.
IsCached: TypeAlias = Callable[[int, int], bool]


def full_attention_prefix(limit: int, windows: Sequence[int | None], is_cached: IsCached) -> int:
    """Return the longest gapless prefix of at most `limit` blocks cached in all full-attention groups.

    `windows` has, per group, the blocks needed behind a position; None for full attention.
    """
    length = limit
    for group, window in enumerate(windows):
        if window is None:
            run = 0
            while run < length and is_cached(group, run):
                run += 1
            length = run
    return length


def resumable_prefix(limit: int, windows: Sequence[int | None], is_cached: IsCached) -> int:
    """Return the longest prefix of at most `limit` blocks at whose end every sliding window is cached."""
    length, checked = limit, -1
    while length != checked:
        checked = length
        for group, window in enumerate(windows):
            if window is not None:
                length = _resumable_in(group, window, length, is_cached)
    return length


def _resumable_in(group: int, window: int, limit: int, is_cached: IsCached) -> int:
    end = limit
    while end > 0:
        first = max(0, end - window)
        hole = end - 1
        while hole >= first and is_cached(group, hole):
            hole -= 1
        if hole < first:
            break
        # Every end that needs the missing block fails, too.
        end = hole
    return end
