"""Kernels of the flat index: names of blocks that went, as many as there is room for, of all pods together.

A child, or a copy in another tier, may still be told by such a name.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compiled.jit import inlined, kernel
from indexer.flat_buckets import GOLDEN, hash_bits
from indexer.flat_layout import RELEASE_TURN, RELEASED_KEY, RELEASED_NAME, RELEASED_WAYS, FlatArrays

_HALF = np.uint64(32)
_NOTHING = np.uint64(0)
_ODD = np.uint64(0xD6E8_FEB8_6659_FD93)
# What takes a multiplication by it back, modulo 2**64.
_ODD_INVERSE = np.uint64(pow(0xD6E8_FEB8_6659_FD93, -1, 1 << 64))
_STEP = np.uint64(0xA076_1D64_78BD_642F)
_WORD = 0xFFFF_FFFF_FFFF_FFFF


@inlined
def _of_life(arrays: FlatArrays, name: np.uint64, pod: int) -> np.uint64:
    """The name mixed with the life of the pod that used it; `released_by` takes it apart."""
    mixed = (name ^ (arrays.lives[pod] * _ODD)) * _ODD
    return mixed ^ (mixed >> _HALF)


@inlined
def released_set(arrays: FlatArrays, name: np.uint64, pod: int) -> int:
    """Where in `released` a name is remembered, if it is."""
    bits = hash_bits(name + arrays.lives[pod] * _STEP)
    return np.int64((bits * np.uint64(len(arrays.released))) >> _HALF)


@inlined
def remember_released(arrays: FlatArrays, name: np.uint64, pod: int, key: np.uint64) -> None:
    """Remembers for a while which block a name meant for a pod that holds it no more."""
    mixed = _of_life(arrays, name, pod)
    ways = arrays.released[released_set(arrays, name, pod)]
    turn = arrays.counters[RELEASE_TURN]
    arrays.counters[RELEASE_TURN] = turn + 1
    place = turn % RELEASED_WAYS
    # All of them, the first one last: where to stop nobody could foresee.
    for way in range(RELEASED_WAYS - 1, -1, -1):
        remembered = ways[RELEASED_NAME, way]
        place = way if remembered in (mixed, _NOTHING) else place
    ways[RELEASED_NAME, place] = mixed
    ways[RELEASED_KEY, place] = key


@kernel
def find_released(arrays: FlatArrays, name: np.uint64, pod: int) -> int:
    """Where in its set of `released` a name is remembered; -1: it is not."""
    mixed = _of_life(arrays, name, pod)
    ways = arrays.released[released_set(arrays, name, pod)]
    for way in range(RELEASED_WAYS):
        if ways[RELEASED_NAME, way] == mixed:
            return way
    return -1


@kernel
def released_key(arrays: FlatArrays, name: np.uint64, pod: int, way: int) -> np.uint64:
    """The key that `find_released` found."""
    return arrays.released[released_set(arrays, name, pod), RELEASED_KEY, way]


def released_by(
    released: NDArray[np.uint64], first: int, stop: int, life: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The names that one life remembers in these sets, and their keys.

    A name taken out with another life than it was put in with would lie in another set, mostly: of the
    strangers one in as many as there are sets is told too, under a name that nobody uses.

    Args:
        released: See `FlatArrays.released`.
        first: The first set.
        stop: The one behind the last.
        life: As in `FlatArrays.lives`.
    """
    entries = released[first:stop]
    mixed = entries[:, RELEASED_NAME]
    names = ((mixed ^ (mixed >> _HALF)) * _ODD_INVERSE) ^ np.uint64(life * int(_ODD) & _WORD)
    hashes = (names + np.uint64(life * int(_STEP) & _WORD)) * GOLDEN >> _HALF
    sets = np.arange(first, first + len(entries), dtype=np.uint64)[:, None]
    mine = (hashes * np.uint64(len(released)) >> _HALF == sets) & (mixed != _NOTHING) & (names != _NOTHING)
    return names[mine], entries[:, RELEASED_KEY][mine]
