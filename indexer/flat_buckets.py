"""Kernels of the flat index: open-addressed buckets of (32 bits of hash, number), in the order of the hash.

Linear probing with a home that grows with the hash: entries of a table lie sorted but for their
displacement, so that a table can be rebuilt in a larger one in one pass, and a deletion closes its gap
without tombstones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from indexer.jit import inlined, kernel

GOLDEN = np.uint64(0x9E37_79B9_7F4A_7C15)
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFF_FFFF)
_NOTHING = np.uint64(0)


@inlined
def hash_bits(value: np.uint64) -> np.uint64:
    """32 bits of a hash of `value`."""
    return (value * GOLDEN) >> _HALF


@inlined
def home_of(bits: np.uint64, buckets: NDArray[np.uint64]) -> int:
    """The bucket where entries with these hash bits begin."""
    return np.int64((bits * np.uint64(len(buckets))) >> _HALF)


@inlined
def insert(buckets: NDArray[np.uint64], bits: np.uint64, number: int) -> None:
    """Enters `number` (> 0, 32 bits); there must be an empty bucket."""
    place = home_of(bits, buckets)
    while buckets[place] != _NOTHING:
        place += 1
        if place == len(buckets):
            place = 0
    buckets[place] = (bits << _HALF) | np.uint64(number)


@kernel
def delete(buckets: NDArray[np.uint64], bits: np.uint64, number: int) -> None:
    """Takes an entry out, and closes the gap; it must be there."""
    size = len(buckets)
    wanted = (bits << _HALF) | np.uint64(number)
    gap = home_of(bits, buckets)
    while buckets[gap] != wanted:
        gap += 1
        if gap == size:
            gap = 0
    place = gap
    while True:
        place += 1
        if place == size:
            place = 0
        entry = buckets[place]
        if entry == _NOTHING:
            break
        home = home_of(entry >> _HALF, buckets)
        # It may move to the gap if its home does not lie behind the gap, seen around the table.
        distance = place - home
        if distance < 0:
            distance += size
        room = place - gap
        if room < 0:
            room += size
        if distance >= room:
            buckets[gap] = entry
            gap = place
    buckets[gap] = _NOTHING


@kernel
def rebuild(old: NDArray[np.uint64], new: NDArray[np.uint64]) -> None:
    """Enters all of `old` in `new`, which is empty and large enough."""
    for place in range(len(old)):
        entry = old[place]
        if entry != _NOTHING:
            insert(new, entry >> _HALF, np.int64(entry & _LOW))
