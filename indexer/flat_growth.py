"""Room in the flat index's arrays: those that cannot be reserved in advance are made anew, larger."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from indexer.flat_buckets import rebuild
from indexer.flat_further import rebuild_further
from indexer.flat_layout import (
    ALIASES,
    ALIASES_USED,
    BLOCKS,
    CAPACITY,
    FURTHER,
    NAMES,
    ROWS,
    ROWS_USED,
    FlatArrays,
)


def for_blocks(arrays: FlatArrays, blocks: int) -> FlatArrays:
    """Arrays in which any run of so many blocks fits.

    Each of them may need a slot's bucket, a name's bucket, an alias, a row and a count of further copies.
    """
    counters = arrays.counters
    if _is_full(counters[BLOCKS] + blocks, len(arrays.buckets)):
        larger = _rebuilt(arrays.buckets, counters[BLOCKS] + blocks, counters[CAPACITY] + blocks)
        arrays = arrays._replace(buckets=larger)
    if _is_full(counters[NAMES] + blocks, len(arrays.name_buckets)):
        larger = _rebuilt(arrays.name_buckets, counters[NAMES] + blocks, counters[CAPACITY] + blocks)
        arrays = arrays._replace(name_buckets=larger)
    if _is_full(counters[FURTHER] + blocks, len(arrays.further)):
        old = arrays.further
        arrays = arrays._replace(further=np.zeros((2 * (len(old) + blocks), 2), np.uint64))
        rebuild_further(arrays, old)
    if counters[ROWS] + blocks > len(arrays.rows):
        arrays = arrays._replace(rows=_longer(arrays.rows, int(counters[ROWS_USED]), blocks))
    if counters[ALIASES] + blocks > len(arrays.aliases):
        arrays = arrays._replace(aliases=_longer(arrays.aliases, int(counters[ALIASES_USED]), blocks))
    return arrays


def for_pods(arrays: FlatArrays, pods: int) -> FlatArrays:
    """Arrays whose rows have a bit for each of so many pods."""
    tiers, words = arrays.rows.shape[1:]
    if pods <= words * 64:
        return arrays
    rows = np.zeros((len(arrays.rows), tiers, 2 * words), np.uint64)
    used = int(arrays.counters[ROWS_USED])
    rows[:used, :, :words] = arrays.rows[:used]
    return arrays._replace(rows=rows)


def _is_full(entries: int, places: int) -> bool:
    """Open addressing wants a quarter of its places empty."""
    return bool(4 * entries > 3 * places)


def _rebuilt(buckets: NDArray[np.uint64], entries: int, most: int) -> NDArray[np.uint64]:
    """Buckets for half as many entries more, but for no more than there will mostly be at most."""
    wanted = entries + entries // 2
    if entries <= most:
        wanted = min(wanted, most)
    larger = np.zeros(4 * wanted // 3 + 1, np.uint64)
    rebuild(buckets, larger)
    return larger


def _longer(array: NDArray[np.uint64], used: int, more: int) -> NDArray[np.uint64]:
    longer = np.empty((2 * (len(array) + more), *array.shape[1:]), np.uint64)
    longer[:used] = array[:used]
    return longer
