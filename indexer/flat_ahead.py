"""Kernel of the flat index: has the processor fetch where a chain's blocks lie, before they are looked at.

A chain of keys comes in; nothing goes out but warmer caches. What is read may be wrong, and is not used.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compiled.jit import inlined
from indexer.flat_buckets import behind, hash_bits, home_of
from indexer.flat_layout import FlatArrays

# Of so many blocks one is looked for, in so many buckets.
_SAMPLE = 16
_PROBES = 8

_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFF_FFFF)


@inlined
def look_ahead(arrays: FlatArrays, keys: NDArray[np.uint64], chain: NDArray[np.int64]) -> None:
    """Reads buckets and slots of a chain without waiting for one block after the other.

    Blocks of a chain mostly lie in runs, of which one block brings the next ones along; where they do not,
    each is fetched.

    Args:
        chain: int64 [keys or more], overwritten.
    """
    _fetch(arrays, keys, len(keys), chain, _SAMPLE)
    known = 0
    in_runs = 0
    for place in range(0, len(keys), _SAMPLE):
        if chain[place] >= 0:
            known = place + 1
            if place and chain[place] == chain[place - _SAMPLE] + _SAMPLE:
                in_runs += 1
    if in_runs * _SAMPLE * 4 < known:
        _fetch(arrays, keys, known, chain, 1)


@inlined
def _fetch(
    arrays: FlatArrays, keys: NDArray[np.uint64], blocks: int, chain: NDArray[np.int64], step: int
) -> None:
    """Reads the buckets of some blocks, then their slots; writes which these are, -1 for none."""
    buckets = arrays.buckets
    for place in range(0, blocks, step):
        # Nothing depends on what is read: it is written so that the compiler does not leave it out.
        chain[place] = np.int64(buckets[home_of(hash_bits(keys[place]), buckets)])
    for place in range(0, blocks, step):
        chain[place] = _probable_slot(buckets, keys[place])
    for place in range(0, blocks, step):
        if arrays.keys[max(0, chain[place]), 0] != keys[place]:
            chain[place] = -1


@inlined
def _probable_slot(buckets: NDArray[np.uint64], key: np.uint64) -> int:
    """The slot of a key, or of another one with the same hash; -1 if it has none, or is far from home."""
    bits = hash_bits(key)
    place = home_of(bits, buckets)
    for _ in range(_PROBES):
        entry = buckets[place]
        if entry >> _HALF == bits:
            return np.int64(entry & _LOW) - 1
        place = behind(place, buckets)
    return -1
