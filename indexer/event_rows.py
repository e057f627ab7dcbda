"""The columns of decoded events, numbers that kernels may close over, and the kernel that reads their tokens.

`event_columns` writes such rows, whoever applies them reads them. A hash is 64 bits: an unsigned number as it
is, a negative one as two's complement, of a digest its last eight bytes, which is how vLLM makes a number of
it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compiled.jit import inlined, kernel

(
    KIND,  # see below
    HASH_START,  # its part of `hashes`; a count of 0 where it has none
    HASH_COUNT,
    HAS_PARENT,  # 0 or 1
    PARENT,  # the parent hash's 64 bits; 0 where it has none
    TOKEN_START,  # its part of `tokens`
    TOKEN_COUNT,
    BLOCK_SIZE,  # 0 where it tells none
    HAS_LORA,  # 0 or 1
    MEDIUM,  # place in MEDIA; 0 where it tells none
    GROUP,  # -1 where it tells none
    SPEC_KIND,  # place in SPEC_KINDS; -1 where it tells none
) = range(12)
EVENT_COLUMNS = 12
# Values of KIND. OTHER is left to whoever reads typed events.
OTHER, STORED, REMOVED, CLEARED = range(4)

MEDIA = ("", "GPU", "CPU", "CPU_PINNED", "DISK", "STORAGE", "EXTERNAL")
SPEC_KINDS = (
    "full_attention",
    "mla_attention",
    "sliding_window",
    "sliding_window_mla",
    "sink_full_attention",
    "chunked_local_attention",
    "mamba",
    "encoder_only_attention",
    "cross_attention",
    "unknown",
)

_BROKEN = -1


@kernel
def read_token_lists(
    data: NDArray[np.uint8],
    ends: NDArray[np.int64],
    longest: int,
    tokens: NDArray[np.uint32],
    counts: NDArray[np.int64],
) -> int:
    """Reads arrays of unsigned numbers below 2**32.

    Args:
        data: uint8 [bytes], the arrays one behind the other.
        ends: int64 [arrays], where each must end.
        longest: Most numbers of an array.
        tokens: uint32 [bytes], written; an array that is broken leaves nothing in it.
        counts: int64 [arrays], written: how many numbers each has; -1 for a broken one.

    Returns:
        How many tokens were written.
    """
    at = np.int64(0)
    used = np.int64(0)
    for place in range(len(ends)):
        end = ends[place]
        counts[place] = _read_list(data, at, end, longest, tokens, used)
        used += max(np.int64(0), counts[place])
        at = end
    return used


@inlined
def _read_list(
    data: NDArray[np.uint8], at: int, end: int, longest: int, tokens: NDArray[np.uint32], used: int
) -> int:
    if at >= end:
        return _BROKEN
    head = np.int64(data[at])
    at += 1
    count = np.int64(0)
    if head & 0xF0 == 0x90:
        count = head & 0x0F
    elif head in (0xDC, 0xDD):
        width = 2 if head == 0xDC else 4
        if end - at < width:
            return _BROKEN
        for _ in range(width):
            count = count << 8 | np.int64(data[at])
            at += 1
    else:
        return _BROKEN
    # A number takes a byte at least.
    if count > min(longest, end - at):
        return _BROKEN
    for place in range(used, used + count):
        if at >= end:
            return _BROKEN
        number = np.int64(data[at])
        at += 1
        if number >= 0x80:
            width = 1 if number == 0xCC else 2 if number == 0xCD else 4 if number == 0xCE else 0
            if width == 0 or end - at < width:
                return _BROKEN
            number = np.int64(0)
            for _ in range(width):
                number = number << 8 | np.int64(data[at])
                at += 1
        tokens[place] = np.uint32(number)
    return count if at == end else _BROKEN
