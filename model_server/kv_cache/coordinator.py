"""The longest prefix that can be resumed, where groups of layers differ in what they must remember.

The rule is that of vLLM's hybrid cache managers. Pure.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

# (group, block index) -> whether the block's content is cached.
IsCached: TypeAlias = Callable[[int, int], bool]


def full_prefix(limit: int, needs: Sequence[int | None], is_cached: IsCached) -> int:
    """Return the unbroken prefix that all groups with full attention hold, in blocks; at most `limit`."""
    length = limit
    for group, need in enumerate(needs):
        if need is None:
            run = 0
            while run < length and is_cached(group, run):
                run += 1
            length = run
    return length


def resumable_prefix(limit: int, needs: Sequence[int | None], is_cached: IsCached) -> int:
    """Return the longest prefix of at most `limit` blocks whose end every windowed group can resume at."""
    length, checked = limit, -1
    while length != checked:
        checked = length
        for group, need in enumerate(needs):
            if need is not None:
                length = _resumable_in(group, need, length, is_cached)
    return length


def _resumable_in(group: int, need: int, limit: int, is_cached: IsCached) -> int:
    end = limit
    while end > 0:
        first = max(0, end - need)
        hole = end - 1
        while hole >= first and is_cached(group, hole):
            hole -= 1
        if hole < first:
            break
        # Every end that would need the missing block is out, too.
        end = hole
    return end
