"""Kernels of the flat index: copies of a block beyond the first, by (slot, pod, tier). Few have any."""

from __future__ import annotations

import numpy as np

from compiled.jit import inlined, kernel
from indexer.flat_buckets import behind, delete, hash_bits, home_of, insert
from indexer.flat_layout import FURTHER, FURTHER_FREE, FURTHER_USED, NO_SLOT, FlatArrays

_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFF_FFFF)
_NOTHING = np.uint64(0)


@inlined
def _which(slot: int, pod: int, tier: int) -> np.uint64:
    return (np.uint64(slot) << np.uint64(20)) | (np.uint64(pod) << np.uint64(4)) | np.uint64(tier)


@inlined
def _find(arrays: FlatArrays, which: np.uint64) -> int:
    """Where in `further` an entry is; -1: there is none."""
    buckets = arrays.further_buckets
    bits = hash_bits(which)
    place = home_of(bits, buckets)
    while buckets[place] != _NOTHING:
        if buckets[place] >> _HALF == bits:
            entry = np.int64(buckets[place] & _LOW) - 1
            if arrays.further[entry, 0] == which:
                return entry
        place = behind(place, buckets)
    return -1


@inlined
def count_further(arrays: FlatArrays, slot: int, pod: int, tier: int) -> int:
    """How many copies beyond the first there are."""
    if arrays.counters[FURTHER] == 0:
        return 0
    entry = _find(arrays, _which(slot, pod, tier))
    return np.int64(arrays.further[entry, 1]) if entry >= 0 else 0


@inlined
def add_further(arrays: FlatArrays, slot: int, pod: int, tier: int, copies: int) -> None:
    """Counts copies more; there must be room for one more entry."""
    which = _which(slot, pod, tier)
    entry = _find(arrays, which)
    if entry < 0:
        entry = _take_entry(arrays)
        arrays.further[entry, 0] = which
        arrays.further[entry, 1] = _NOTHING
        insert(arrays.further_buckets, hash_bits(which), entry + 1)
    arrays.further[entry, 1] += np.uint64(copies)


@inlined
def drop_further(arrays: FlatArrays, slot: int, pod: int, tier: int) -> int:
    """Counts a copy less; tells how many are left beyond the first, -1 if there were none."""
    if arrays.counters[FURTHER] == 0:
        return -1
    entry = _find(arrays, _which(slot, pod, tier))
    if entry < 0:
        return -1
    left = np.int64(arrays.further[entry, 1]) - 1
    arrays.further[entry, 1] = np.uint64(left)
    if left == 0:
        _give_entry(arrays, entry)
    return left


@kernel
def forget_further(arrays: FlatArrays, slot: int, pod: int, tier: int) -> None:
    """Drops all copies beyond the first."""
    if arrays.counters[FURTHER]:
        entry = _find(arrays, _which(slot, pod, tier))
        if entry >= 0:
            _give_entry(arrays, entry)


@inlined
def _take_entry(arrays: FlatArrays) -> int:
    counters = arrays.counters
    counters[FURTHER] += 1
    entry = counters[FURTHER_FREE]
    if entry == NO_SLOT:
        entry = counters[FURTHER_USED]
        counters[FURTHER_USED] = entry + 1
    else:
        counters[FURTHER_FREE] = np.int64(arrays.further[entry, 1])
    return entry


@kernel
def _give_entry(arrays: FlatArrays, entry: int) -> None:
    delete(arrays.further_buckets, hash_bits(arrays.further[entry, 0]), entry + 1)
    arrays.further[entry, 1] = np.uint64(arrays.counters[FURTHER_FREE])
    arrays.counters[FURTHER_FREE] = entry
    arrays.counters[FURTHER] -= 1
