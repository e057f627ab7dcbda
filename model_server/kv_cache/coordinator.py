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
            length = next((index for index in range(length) if not is_cached(group, index)), length)
    return length


def resumable_prefix(limit: int, windows: Sequence[int | None], is_cached: IsCached) -> int:
    """Return the longest prefix of at most `limit` blocks at whose end every sliding window is cached."""
    length, checked = limit, -1
    while length != checked:
        checked = length
        for group, window in enumerate(windows):
            if window is not None:
                # A missing block is the next end to try: every longer end that needs it fails, too.
                while (hole := _last_hole(group, max(0, length - window), length, is_cached)) is not None:
                    length = hole
    return length


def _last_hole(group: int, first: int, end: int, is_cached: IsCached) -> int | None:
    return next((index for index in range(end - 1, first - 1, -1) if not is_cached(group, index)), None)
