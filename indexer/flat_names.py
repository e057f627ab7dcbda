"""Kernels of the flat index: the engines' hashes of blocks ("names"), one map for all pods.

Pods whose engines agree on a hash share its entry. A name may stand for several blocks (two models, two
seeds, two lives): of these a pod means the one that it holds, so that lives never meet, and nothing is kept
per pod but a bounded memory of blocks that went.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compiled.jit import inlined, kernel
from indexer.flat_buckets import behind, delete, hash_bits, home_of, insert
from indexer.flat_holders import held_tiers
from indexer.flat_layout import (
    ALIAS_FREE,
    ALIASES,
    ALIASES_USED,
    NAMES,
    NO_SLOT,
    FlatArrays,
)
from indexer.flat_released import find_released, released_key

# More names than this for one block, and the oldest further one is forgotten.
ALIASES_MAX = 64

_ALIAS_BIT = 0x8000_0000
_NUMBER = 0x7FFF_FFFF
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFF_FFFF)
_NOTHING = np.uint64(0)


@inlined
def find_named(arrays: FlatArrays, name: np.uint64, pod: int) -> int:
    """The slot that a pod holds under this name; -1: none."""
    bits = hash_bits(name)
    place = home_of(bits, arrays.name_buckets)
    while True:
        entry = arrays.name_buckets[place]
        if entry == _NOTHING:
            return -1
        if entry >> _HALF == bits:
            slot = _slot_named(arrays, np.int64(entry & _LOW), name)
            if slot >= 0 and held_tiers(arrays, slot, pod):
                return slot
        place = behind(place, arrays.name_buckets)


@inlined
def _slot_named(arrays: FlatArrays, number: int, name: np.uint64) -> int:
    """The slot of a bucket's entry, if it is one of this name."""
    if number & _ALIAS_BIT:
        if arrays.aliases[(number & _NUMBER) - 1, 0] == name:
            return slot_of_number(arrays, number)
    elif arrays.names[number - 1] == name:
        return number - 1
    return -1


@inlined
def slot_of_number(arrays: FlatArrays, number: int) -> int:
    """The slot of a bucket's entry, whatever name it is of."""
    if number & _ALIAS_BIT:
        return np.int64(arrays.aliases[(number & _NUMBER) - 1, 1] >> _HALF)
    return number - 1


@inlined
def give_name(arrays: FlatArrays, slot: int, name: np.uint64) -> None:
    """Lets a slot be found by this name, also; there must be room for one more bucket and alias."""
    if arrays.names[slot] == name:
        return
    if arrays.names[slot] == _NOTHING:
        arrays.names[slot] = name
        insert(arrays.name_buckets, hash_bits(name), slot + 1)
        arrays.counters[NAMES] += 1
        return
    aliases = 0
    last = np.int64(NO_SLOT)
    before_last = last
    alias = np.int64(arrays.first_alias[slot])
    while alias != NO_SLOT:
        if arrays.aliases[alias, 0] == name:
            return
        aliases += 1
        before_last = last
        last = alias
        alias = np.int64(arrays.aliases[alias, 1] & _LOW)
    if aliases >= ALIASES_MAX:
        arrays.aliases[before_last, 1] |= _LOW
        _give_alias(arrays, last)
    _add_alias(arrays, slot, name)


@kernel
def _add_alias(arrays: FlatArrays, slot: int, name: np.uint64) -> None:
    counters = arrays.counters
    alias = counters[ALIAS_FREE]
    if alias == NO_SLOT:
        alias = counters[ALIASES_USED]
        counters[ALIASES_USED] = alias + 1
    else:
        counters[ALIAS_FREE] = np.int64(arrays.aliases[alias, 1])
    arrays.aliases[alias, 0] = name
    arrays.aliases[alias, 1] = (np.uint64(slot) << _HALF) | np.uint64(arrays.first_alias[slot])
    arrays.first_alias[slot] = np.uint32(alias)
    insert(arrays.name_buckets, hash_bits(name), _ALIAS_BIT | (alias + 1))
    counters[ALIASES] += 1
    counters[NAMES] += 1


@kernel
def _give_alias(arrays: FlatArrays, alias: int) -> None:
    """Forgets an alias that its slot's list does not lead to any more."""
    delete(arrays.name_buckets, hash_bits(arrays.aliases[alias, 0]), _ALIAS_BIT | (alias + 1))
    arrays.aliases[alias, 1] = np.uint64(arrays.counters[ALIAS_FREE])
    arrays.counters[ALIAS_FREE] = alias
    arrays.counters[ALIASES] -= 1
    arrays.counters[NAMES] -= 1


@inlined
def forget_names(arrays: FlatArrays, slot: int) -> None:
    """Forgets all names of a slot."""
    if arrays.names[slot] == _NOTHING:
        return
    delete(arrays.name_buckets, hash_bits(arrays.names[slot]), slot + 1)
    arrays.names[slot] = _NOTHING
    arrays.counters[NAMES] -= 1
    if arrays.first_alias[slot] != np.uint32(NO_SLOT):
        _forget_aliases(arrays, slot)


@kernel
def _forget_aliases(arrays: FlatArrays, slot: int) -> None:
    """Forgets all names of a slot but the first."""
    alias = np.int64(arrays.first_alias[slot])
    while alias != NO_SLOT:
        following = np.int64(arrays.aliases[alias, 1] & _LOW)
        _give_alias(arrays, alias)
        alias = following
    arrays.first_alias[slot] = np.uint32(NO_SLOT)


@kernel
def key_named(arrays: FlatArrays, name: np.uint64, pod: int, keys: NDArray[np.uint64]) -> bool:
    """Finds the block that a name means, or lately meant, for a pod; writes its key."""
    slot = find_named(arrays, name, pod)
    if slot >= 0:
        keys[0] = arrays.keys[slot, 0]
        return True
    way = find_released(arrays, name, pod)
    if way >= 0:
        keys[0] = released_key(arrays, name, pod, way)
    return way >= 0


@kernel
def holds_named(
    arrays: FlatArrays, pod: int, tier: int, keys: NDArray[np.uint64], names: NDArray[np.uint64]
) -> bool:
    """Whether each name means this key for the pod, which holds it in this tier."""
    for place in range(len(keys)):
        slot = find_named(arrays, names[place], pod)
        if slot < 0 or arrays.keys[slot, 0] != keys[place]:
            return False
        if (held_tiers(arrays, slot, pod) >> tier) & 1 == 0:
            return False
    return True
