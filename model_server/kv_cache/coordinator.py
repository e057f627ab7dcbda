"""The longest prefix that can be resumed, where groups of layers differ in what they must remember.

The rule is that of vLLM's hybrid cache managers. Pure.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

# (group, block index) -> whether the block's content is cached.
IsCached: TypeAlias = Callable[[int, int], bool]


def blocks_behind(window_tokens: int | None, block_tokens: int) -> int | None:
    """Return how many blocks in front of a prefix's end a group needs to resume there; None for all.

    The next token sees the `window_tokens - 1` before it.
    """
    return None if window_tokens is None else -(-(window_tokens - 1) // block_tokens)


def blocks_bound(needs: Sequence[int | None], num_tokens: int, chunk_tokens: int, block_tokens: int) -> int:
    """Return the most blocks of all groups together that a request holds at any time, computed in chunks.

    `needs` are, per group, what `blocks_behind` tells.
    """
    blocks = -(-num_tokens // block_tokens)
    # The window, what alignment keeps in front of it, and a chunk that begins and ends within a block.
    rolling = 2 + -(-chunk_tokens // block_tokens)
    return sum(blocks if need is None else min(blocks, need + rolling) for need in needs)


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
