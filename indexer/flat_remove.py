"""Kernels of the flat index: what removals of many names will read is read ahead, for all of them at once.

A block's removal reads places that lie far from each other: buckets of its name and of its key, its slot, and
where its name is remembered. What is found here may be another block by the time that this one goes; so it is
a guess, which `slot_held` checks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compiled.jit import inlined, kernel
from indexer.flat_buckets import behind, hash_bits, home_of
from indexer.flat_holders import held_tiers
from indexer.flat_layout import RELEASED_NAME, FlatArrays
from indexer.flat_names import find_named, slot_of_number
from indexer.flat_released import released_set

# In so many buckets a name is looked for.
_PROBES = 8

_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFF_FFFF)


@kernel
def look_ahead_named(
    arrays: FlatArrays,
    names: NDArray[np.uint64],
    count: int,
    pod: int,
    slots: NDArray[np.int64],
    read: NDArray[np.uint64],
) -> None:
    """Reads all that removing the blocks of these names will, without waiting for one after the other.

    Args:
        names: uint64 [count or more].
        slots: int64 [count or more], written: where each block may be; -1: not found.
        read: uint64 [1], overwritten: what is read must go somewhere, or the compiler leaves reading out.
    """
    buckets = arrays.name_buckets
    for place in range(count):
        slots[place] = np.int64(buckets[home_of(hash_bits(names[place]), buckets)])
    for place in range(count):
        slots[place] = _probable_slot(arrays, names[place])
    all_read = np.uint64(0)
    for place in range(count):
        key = arrays.keys[max(0, slots[place]), 0]
        all_read |= arrays.buckets[home_of(hash_bits(key), arrays.buckets)]
        all_read |= arrays.released[released_set(arrays, names[place], pod), RELEASED_NAME, 0]
    read[0] = all_read


@inlined
def _probable_slot(arrays: FlatArrays, name: np.uint64) -> int:
    """The slot of a name, or of another one with the same hash; -1 if it has none, or is far from home."""
    bits = hash_bits(name)
    place = home_of(bits, arrays.name_buckets)
    for _ in range(_PROBES):
        entry = arrays.name_buckets[place]
        if entry >> _HALF == bits:
            return slot_of_number(arrays, np.int64(entry & _LOW))
        place = behind(place, arrays.name_buckets)
    return -1


@inlined
def slot_held(arrays: FlatArrays, name: np.uint64, pod: int, guess: int) -> int:
    """As `find_named`, but a guess that is right saves the way through the buckets; -1 is none."""
    if guess >= 0 and arrays.names[guess] == name and held_tiers(arrays, guess, pod):
        return guess
    return _find_anew(arrays, name, pod)


@kernel
def _find_anew(arrays: FlatArrays, name: np.uint64, pod: int) -> int:
    return find_named(arrays, name, pod)
