"""Room in the flat index's arrays: what must be done before a run of blocks, or before one more pod."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compiled.jit import kernel
from indexer.flat_buckets import room_for
from indexer.flat_layout import (
    BLOCKS,
    BYTES_MAX,
    CAPACITY,
    FURTHER,
    NAMES,
    ROWS_USED,
    RUN_MAX,
    TIERS_USED,
    FlatArrays,
    empty_rows,
)
from indexer.flat_update import add_blocks, evict_oldest, used_bytes


@kernel
def for_blocks(arrays: FlatArrays, blocks: int) -> None:
    """Makes room for a run of so many blocks, each with a name and further copies.

    What runs before this one brought for blocks that were known already (names, holders, copies) may have
    gone beyond the ceiling: the least recently used blocks leave for it.
    """
    counters = arrays.counters
    while used_bytes(arrays) > counters[BYTES_MAX] and evict_oldest(arrays, 1):
        pass
    capacity = counters[CAPACITY]
    room_for(arrays.buckets, min(counters[BLOCKS] + blocks, capacity), capacity)
    room_for(arrays.name_buckets, counters[NAMES] + blocks, capacity + RUN_MAX)
    room_for(arrays.further_buckets, counters[FURTHER] + blocks, capacity + RUN_MAX)


@kernel
def add_with_room(
    arrays: FlatArrays,
    pod: int,
    tier: int,
    keys: NDArray[np.uint64],
    chain: NDArray[np.int64],
) -> None:
    """`for_blocks` and `add_blocks` in one call: to hand the arrays over costs as much as a few blocks."""
    for_blocks(arrays, len(keys))
    add_blocks(arrays, pod, tier, keys, chain)


def for_pods(arrays: FlatArrays, pods: int) -> FlatArrays:
    """Arrays whose rows have a bit for each of so many pods; all rows are copied where they had not."""
    tiers, _, words = arrays.rows.shape
    if pods <= words * 64:
        return arrays
    counters = arrays.counters
    rows = empty_rows(int(counters[CAPACITY]), int(counters[BYTES_MAX]), tiers, 2 * words)
    used, tiers_used = int(counters[ROWS_USED]), int(counters[TIERS_USED])
    rows[:tiers_used, :used, :words] = arrays.rows[:tiers_used, :used]
    return arrays._replace(rows=rows)
