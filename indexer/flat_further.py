"""Kernels of the flat index: copies of a block beyond the first, by (slot, pod, tier). Few have any."""

from __future__ import annotations

import numpy as np

from indexer.flat_buckets import hash_bits, home_of
from indexer.flat_layout import FURTHER, FlatArrays
from indexer.jit import inlined, kernel

_ONE = np.uint64(1)
_NOTHING = np.uint64(0)


@inlined
def _name(slot: int, pod: int, tier: int) -> np.uint64:
    return ((np.uint64(slot) << np.uint64(20)) | (np.uint64(pod) << np.uint64(4)) | np.uint64(tier)) + _ONE


@inlined
def _home(arrays: FlatArrays, name: np.uint64) -> int:
    return home_of(hash_bits(name), arrays.further[:, 0])


@inlined
def _place(arrays: FlatArrays, name: np.uint64) -> int:
    """Where an entry is, or would be."""
    further = arrays.further
    place = _home(arrays, name)
    while further[place, 0] != _NOTHING and further[place, 0] != name:
        place += 1
        if place == len(further):
            place = 0
    return place


@inlined
def count_further(arrays: FlatArrays, slot: int, pod: int, tier: int) -> int:
    """How many copies beyond the first there are."""
    if arrays.counters[FURTHER] == 0:
        return 0
    place = _place(arrays, _name(slot, pod, tier))
    return np.int64(arrays.further[place, 1]) if arrays.further[place, 0] != _NOTHING else 0


@inlined
def add_further(arrays: FlatArrays, slot: int, pod: int, tier: int, copies: int) -> None:
    """Counts copies more; there must be an empty place."""
    name = _name(slot, pod, tier)
    place = _place(arrays, name)
    if arrays.further[place, 0] == _NOTHING:
        arrays.further[place, 0] = name
        arrays.further[place, 1] = _NOTHING
        arrays.counters[FURTHER] += 1
    arrays.further[place, 1] += np.uint64(copies)


@inlined
def drop_further(arrays: FlatArrays, slot: int, pod: int, tier: int) -> int:
    """Counts a copy less; tells how many are left beyond the first, -1 if there were none."""
    if arrays.counters[FURTHER] == 0:
        return -1
    place = _place(arrays, _name(slot, pod, tier))
    if arrays.further[place, 0] == _NOTHING:
        return -1
    left = np.int64(arrays.further[place, 1]) - 1
    arrays.further[place, 1] = np.uint64(left)
    if left == 0:
        _delete(arrays, place)
    return left


@kernel
def forget_further(arrays: FlatArrays, slot: int, pod: int, tier: int) -> None:
    """Drops all copies beyond the first."""
    if arrays.counters[FURTHER]:
        place = _place(arrays, _name(slot, pod, tier))
        if arrays.further[place, 0] != _NOTHING:
            _delete(arrays, place)


@kernel
def _delete(arrays: FlatArrays, gap: int) -> None:
    further = arrays.further
    size = len(further)
    place = gap
    while True:
        place += 1
        if place == size:
            place = 0
        name = further[place, 0]
        if name == _NOTHING:
            break
        distance = place - _home(arrays, name)
        if distance < 0:
            distance += size
        room = place - gap
        if room < 0:
            room += size
        if distance >= room:
            further[gap, 0] = name
            further[gap, 1] = further[place, 1]
            gap = place
    further[gap, 0] = _NOTHING
    arrays.counters[FURTHER] -= 1


@kernel
def rebuild_further(arrays: FlatArrays, old: np.ndarray) -> None:
    """Enters all of an old table in the new one, which is empty and larger."""
    for place in range(len(old)):
        if old[place, 0] != _NOTHING:
            entry = _place(arrays, old[place, 0])
            arrays.further[entry, 0] = old[place, 0]
            arrays.further[entry, 1] = old[place, 1]
