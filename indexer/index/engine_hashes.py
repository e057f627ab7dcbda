"""Kernels of the flat index: the engines' hashes of blocks ("names"), one map for all pods.

Pods whose engines agree on a hash share its entry. A name may stand for several blocks (two models, two
seeds, two lives): of these a pod means the one that it holds, so that lives never meet, and nothing is kept
per pod. Names of blocks that went are remembered, as many as there is room for, of all pods together: a
child, or a copy in another tier, may still be told by such a name.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.jit import inlined, kernel
from indexer.index import layout
from indexer.index.hash_table import behind, delete, hash_bits, home_of, insert
from indexer.index.holders import held_tiers
from indexer.index.layout import HALF, LOW, NOTHING, ONE, FlatArrays

_ODD = np.uint64(0xBF58_476D_1CE4_E5B9)
_STEP = np.uint64(0x9E37_79B9_7F4A_7C15)


@inlined
def name_of(handle: np.uint64, scope: np.uint64, part: int) -> np.uint64:
    """The name of one index block, never 0.

    Args:
        scope: Names of different scopes have nothing in common.
        part: Which index block of the engine's block.
    """
    mixed = (handle ^ scope) * _ODD
    mixed = (mixed ^ (mixed >> HALF)) + np.uint64(part) * _STEP
    return mixed if mixed != NOTHING else ONE


@inlined
def name_blocks(handles: NDArray[np.uint64], scope: np.uint64, split: int, names: NDArray[np.uint64]) -> None:
    """Write the names of the `split` index blocks of each engine block: uint64 [len(handles) * split]."""
    for block in range(len(handles)):
        for part in range(split):
            names[block * split + part] = name_of(handles[block], scope, part)


_LIFE_ODD = np.uint64(0xD6E8_FEB8_6659_FD93)
_SET_STEP = np.uint64(0xA076_1D64_78BD_642F)


@inlined
def _of_life(arrays: FlatArrays, name: np.uint64, pod: int) -> np.uint64:
    """The name mixed with the life of the pod that used it."""
    mixed = (name ^ (arrays.lives[pod] * _LIFE_ODD)) * _LIFE_ODD
    return mixed ^ (mixed >> HALF)


@inlined
def _released_set(arrays: FlatArrays, name: np.uint64, pod: int) -> int:
    """Where in `released` a name is remembered, if it is."""
    bits = hash_bits(name + arrays.lives[pod] * _SET_STEP)
    return np.int64((bits * np.uint64(len(arrays.released))) >> HALF)


@inlined
def remember_released(arrays: FlatArrays, name: np.uint64, pod: int, key: np.uint64) -> None:
    """Remembers for a while which block a name meant for a pod that holds it no more."""
    mixed = _of_life(arrays, name, pod)
    ways = arrays.released[_released_set(arrays, name, pod)]
    turn = arrays.counters[layout.RELEASE_TURN]
    arrays.counters[layout.RELEASE_TURN] = turn + 1
    place = turn % layout.RELEASED_WAYS
    # All of them, the first one last: where to stop nobody could foresee.
    for way in range(layout.RELEASED_WAYS - 1, -1, -1):
        remembered = ways[layout.RELEASED_NAME, way]
        place = way if remembered in (mixed, NOTHING) else place
    ways[layout.RELEASED_NAME, place] = mixed
    ways[layout.RELEASED_KEY, place] = key


@kernel
def _released_key(arrays: FlatArrays, name: np.uint64, pod: int, keys: NDArray[np.uint64]) -> bool:
    """Find the block that a name lately meant for a pod; writes its key."""
    mixed = _of_life(arrays, name, pod)
    ways = arrays.released[_released_set(arrays, name, pod)]
    for way in range(layout.RELEASED_WAYS):
        if ways[layout.RELEASED_NAME, way] == mixed:
            keys[0] = ways[layout.RELEASED_KEY, way]
            return True
    return False


# More names than this for one block, and the oldest further one is forgotten.
ALIASES_MAX = 64

_ALIAS_BIT = 0x8000_0000
_NUMBER = 0x7FFF_FFFF


@inlined
def find_named(arrays: FlatArrays, name: np.uint64, pod: int) -> int:
    """The slot that a pod holds under this name; -1: none."""
    bits = hash_bits(name)
    place = home_of(bits, arrays.name_buckets)
    while True:
        entry = arrays.name_buckets[place]
        if entry == NOTHING:
            return -1
        if entry >> HALF == bits:
            slot = _slot_named(arrays, np.int64(entry & LOW), name)
            if slot >= 0 and held_tiers(arrays, slot, pod):
                return slot
        place = behind(place, arrays.name_buckets)


@inlined
def _slot_named(arrays: FlatArrays, number: int, name: np.uint64) -> int:
    """The slot of a bucket's entry, if it is one of this name."""
    if number & _ALIAS_BIT:
        if arrays.aliases[(number & _NUMBER) - 1, 0] == name:
            return np.int64(arrays.aliases[(number & _NUMBER) - 1, 1] >> HALF)
    elif arrays.names[number - 1] == name:
        return number - 1
    return -1


@inlined
def give_name(arrays: FlatArrays, slot: int, name: np.uint64) -> None:
    """Lets a slot be found by this name, also; there must be room for one more bucket and alias."""
    if arrays.names[slot] == name:
        return
    if arrays.names[slot] == NOTHING:
        arrays.names[slot] = name
        insert(arrays.name_buckets, hash_bits(name), slot + 1)
        arrays.counters[layout.NAMES] += 1
        return
    aliases = 0
    last = np.int64(layout.NO_SLOT)
    before_last = last
    alias = np.int64(arrays.first_alias[slot])
    while alias != layout.NO_SLOT:
        if arrays.aliases[alias, 0] == name:
            return
        aliases += 1
        before_last = last
        last = alias
        alias = np.int64(arrays.aliases[alias, 1] & LOW)
    if aliases >= ALIASES_MAX:
        arrays.aliases[before_last, 1] |= LOW
        _give_alias(arrays, last)
    _add_alias(arrays, slot, name)


@kernel
def _add_alias(arrays: FlatArrays, slot: int, name: np.uint64) -> None:
    counters = arrays.counters
    alias = counters[layout.ALIAS_FREE]
    if alias == layout.NO_SLOT:
        alias = counters[layout.ALIASES_USED]
        counters[layout.ALIASES_USED] = alias + 1
    else:
        counters[layout.ALIAS_FREE] = np.int64(arrays.aliases[alias, 1])
    arrays.aliases[alias, 0] = name
    arrays.aliases[alias, 1] = (np.uint64(slot) << HALF) | np.uint64(arrays.first_alias[slot])
    arrays.first_alias[slot] = np.uint32(alias)
    insert(arrays.name_buckets, hash_bits(name), _ALIAS_BIT | (alias + 1))
    counters[layout.ALIASES] += 1
    counters[layout.NAMES] += 1


@kernel
def _give_alias(arrays: FlatArrays, alias: int) -> None:
    """Forgets an alias that its slot's list does not lead to any more."""
    delete(arrays.name_buckets, hash_bits(arrays.aliases[alias, 0]), _ALIAS_BIT | (alias + 1))
    arrays.aliases[alias, 1] = np.uint64(arrays.counters[layout.ALIAS_FREE])
    arrays.counters[layout.ALIAS_FREE] = alias
    arrays.counters[layout.ALIASES] -= 1
    arrays.counters[layout.NAMES] -= 1


@inlined
def forget_names(arrays: FlatArrays, slot: int) -> None:
    """Forgets all names of a slot."""
    if arrays.names[slot] == NOTHING:
        return
    delete(arrays.name_buckets, hash_bits(arrays.names[slot]), slot + 1)
    arrays.names[slot] = NOTHING
    arrays.counters[layout.NAMES] -= 1
    if arrays.first_alias[slot] != np.uint32(layout.NO_SLOT):
        _forget_aliases(arrays, slot)


@kernel
def _forget_aliases(arrays: FlatArrays, slot: int) -> None:
    """Forgets all names of a slot but the first."""
    alias = np.int64(arrays.first_alias[slot])
    while alias != layout.NO_SLOT:
        following = np.int64(arrays.aliases[alias, 1] & LOW)
        _give_alias(arrays, alias)
        alias = following
    arrays.first_alias[slot] = np.uint32(layout.NO_SLOT)


@kernel
def key_named(arrays: FlatArrays, name: np.uint64, pod: int, keys: NDArray[np.uint64]) -> bool:
    """Finds the block that a name means, or lately meant, for a pod; writes its key."""
    slot = find_named(arrays, name, pod)
    if slot >= 0:
        keys[0] = arrays.keys[slot, 0]
        return True
    return _released_key(arrays, name, pod, keys)


@kernel
def keys_named(arrays: FlatArrays, pod: int, names: NDArray[np.uint64], keys: NDArray[np.uint64]) -> bool:
    """As `key_named`, for several names; whether all of them are known."""
    known = 0
    for place in range(len(names)):
        known += key_named(arrays, names[place], pod, keys[place:])
    return known == len(names)
