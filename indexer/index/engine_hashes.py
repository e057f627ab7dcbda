"""Kernels of the flat index: map from engines' block hashes to slots, shared by all pods.

A scoped hash mixes an engine's hash with a scope (such as the model) and a part of the engine's block.
Pods whose engines agree on a hash share its entry. One scoped hash may stand for several blocks (two seeds,
two epochs). A pod then refers to the block that it holds, so epochs stay separate without entries per pod.
Hashes of recently removed blocks are kept in a table of fixed size, because later events may refer to them.
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
def scoped_hash(handle: np.uint64, scope: np.uint64, part: int) -> np.uint64:
    """Return the scoped hash of one index block, never 0.

    Args:
        handle: The engine's hash.
        scope: Hashes of different scopes are independent.
        part: Index of the index block within the engine's block.
    """
    mixed = (handle ^ scope) * _ODD
    mixed = (mixed ^ (mixed >> HALF)) + np.uint64(part) * _STEP
    return mixed if mixed != NOTHING else ONE


@inlined
def scope_hashes(handles: NDArray[np.uint64], scope: np.uint64, split: int, out: NDArray[np.uint64]) -> None:
    """Write the scoped hashes of the `split` index blocks of each engine block: [len(handles) * split]."""
    for block in range(len(handles)):
        for part in range(split):
            out[block * split + part] = scoped_hash(handles[block], scope, part)


_EPOCH_ODD = np.uint64(0xD6E8_FEB8_6659_FD93)
_SET_STEP = np.uint64(0xA076_1D64_78BD_642F)


@inlined
def _with_epoch(arrays: FlatArrays, scoped: np.uint64, pod: int) -> np.uint64:
    """Mix a scoped hash with the epoch of the pod that used it."""
    mixed = (scoped ^ (arrays.epochs[pod] * _EPOCH_ODD)) * _EPOCH_ODD
    return mixed ^ (mixed >> HALF)


@inlined
def _removed_set(arrays: FlatArrays, scoped: np.uint64, pod: int) -> int:
    """Return the set of `removed` that may contain a scoped hash."""
    bits = hash_bits(scoped + arrays.epochs[pod] * _SET_STEP)
    return np.int64((bits * np.uint64(len(arrays.removed))) >> HALF)


@inlined
def remember_removed(arrays: FlatArrays, scoped: np.uint64, pod: int, key: np.uint64) -> None:
    """Record the key of a block that a pod removed, until newer entries overwrite it."""
    mixed = _with_epoch(arrays, scoped, pod)
    ways = arrays.removed[_removed_set(arrays, scoped, pod)]
    turn = arrays.counters[layout.REMOVED_TURN]
    arrays.counters[layout.REMOVED_TURN] = turn + 1
    place = turn % layout.REMOVED_WAYS
    # No early exit: its branch would be mispredicted. Runs backwards, so that the first match wins.
    for way in range(layout.REMOVED_WAYS - 1, -1, -1):
        remembered = ways[layout.REMOVED_HASH, way]
        place = way if remembered in (mixed, NOTHING) else place
    ways[layout.REMOVED_HASH, place] = mixed
    ways[layout.REMOVED_KEY, place] = key


@kernel
def _removed_key(arrays: FlatArrays, scoped: np.uint64, pod: int, keys: NDArray[np.uint64]) -> bool:
    """Write the key of the block that a pod recently removed under this hash; return whether it is known."""
    mixed = _with_epoch(arrays, scoped, pod)
    ways = arrays.removed[_removed_set(arrays, scoped, pod)]
    for way in range(layout.REMOVED_WAYS):
        if ways[layout.REMOVED_HASH, way] == mixed:
            keys[0] = ways[layout.REMOVED_KEY, way]
            return True
    return False


# Maximum of aliases per block; one more replaces the oldest.
ALIASES_MAX = 64

_ALIAS_BIT = 0x8000_0000
_NUMBER = 0x7FFF_FFFF


@inlined
def find_by_hash(arrays: FlatArrays, scoped: np.uint64, pod: int) -> int:
    """Return the slot of the block that a pod holds under this hash, or -1."""
    bits = hash_bits(scoped)
    place = home_of(bits, arrays.hash_buckets)
    while True:
        entry = arrays.hash_buckets[place]
        if entry == NOTHING:
            return -1
        if entry >> HALF == bits:
            slot = _slot_with_hash(arrays, np.int64(entry & LOW), scoped)
            if slot >= 0 and held_tiers(arrays, slot, pod):
                return slot
        place = behind(place, arrays.hash_buckets)


@inlined
def _slot_with_hash(arrays: FlatArrays, number: int, scoped: np.uint64) -> int:
    """Return the slot that a bucket's number refers to if it has this hash, else -1."""
    if number & _ALIAS_BIT:
        if arrays.aliases[(number & _NUMBER) - 1, 0] == scoped:
            return np.int64(arrays.aliases[(number & _NUMBER) - 1, 1] >> HALF)
    elif arrays.hashes[number - 1] == scoped:
        return number - 1
    return -1


@inlined
def add_hash(arrays: FlatArrays, slot: int, scoped: np.uint64) -> None:
    """Add a hash to a slot. The caller ensures room for one more bucket and alias."""
    if arrays.hashes[slot] == scoped:
        return
    if arrays.hashes[slot] == NOTHING:
        arrays.hashes[slot] = scoped
        insert(arrays.hash_buckets, hash_bits(scoped), slot + 1)
        arrays.counters[layout.HASHES] += 1
        return
    aliases = 0
    last = np.int64(layout.NO_SLOT)
    before_last = last
    alias = np.int64(arrays.first_alias[slot])
    while alias != layout.NO_SLOT:
        if arrays.aliases[alias, 0] == scoped:
            return
        aliases += 1
        before_last = last
        last = alias
        alias = np.int64(arrays.aliases[alias, 1] & LOW)
    if aliases >= ALIASES_MAX:
        arrays.aliases[before_last, 1] |= LOW
        _free_alias(arrays, last)
    _add_alias(arrays, slot, scoped)


@kernel
def _add_alias(arrays: FlatArrays, slot: int, scoped: np.uint64) -> None:
    counters = arrays.counters
    alias = counters[layout.ALIAS_FREE]
    if alias == layout.NO_SLOT:
        alias = counters[layout.ALIASES_USED]
        counters[layout.ALIASES_USED] = alias + 1
    else:
        counters[layout.ALIAS_FREE] = np.int64(arrays.aliases[alias, 1])
    arrays.aliases[alias, 0] = scoped
    arrays.aliases[alias, 1] = (np.uint64(slot) << HALF) | np.uint64(arrays.first_alias[slot])
    arrays.first_alias[slot] = np.uint32(alias)
    insert(arrays.hash_buckets, hash_bits(scoped), _ALIAS_BIT | (alias + 1))
    counters[layout.ALIASES] += 1
    counters[layout.HASHES] += 1


@kernel
def _free_alias(arrays: FlatArrays, alias: int) -> None:
    """Free an alias that is no longer in its slot's list."""
    delete(arrays.hash_buckets, hash_bits(arrays.aliases[alias, 0]), _ALIAS_BIT | (alias + 1))
    arrays.aliases[alias, 1] = np.uint64(arrays.counters[layout.ALIAS_FREE])
    arrays.counters[layout.ALIAS_FREE] = alias
    arrays.counters[layout.ALIASES] -= 1
    arrays.counters[layout.HASHES] -= 1


@inlined
def delete_hashes(arrays: FlatArrays, slot: int) -> None:
    """Delete all hashes of a slot."""
    if arrays.hashes[slot] == NOTHING:
        return
    delete(arrays.hash_buckets, hash_bits(arrays.hashes[slot]), slot + 1)
    arrays.hashes[slot] = NOTHING
    arrays.counters[layout.HASHES] -= 1
    if arrays.first_alias[slot] != np.uint32(layout.NO_SLOT):
        _free_aliases(arrays, slot)


@kernel
def _free_aliases(arrays: FlatArrays, slot: int) -> None:
    """Delete all hashes of a slot except the first."""
    alias = np.int64(arrays.first_alias[slot])
    while alias != layout.NO_SLOT:
        following = np.int64(arrays.aliases[alias, 1] & LOW)
        _free_alias(arrays, alias)
        alias = following
    arrays.first_alias[slot] = np.uint32(layout.NO_SLOT)


@kernel
def key_by_hash(arrays: FlatArrays, scoped: np.uint64, pod: int, keys: NDArray[np.uint64]) -> bool:
    """Write the key of the block that a pod holds, or recently held, under this hash; False if unknown."""
    slot = find_by_hash(arrays, scoped, pod)
    if slot >= 0:
        keys[0] = arrays.keys[slot, 0]
        return True
    return _removed_key(arrays, scoped, pod, keys)


@kernel
def keys_by_hash(arrays: FlatArrays, pod: int, hashes: NDArray[np.uint64], keys: NDArray[np.uint64]) -> bool:
    """Write the keys of several hashes as `key_by_hash` does; return whether all of them are known."""
    known = 0
    for place in range(len(hashes)):
        known += key_by_hash(arrays, hashes[place], pod, keys[place:])
    return known == len(hashes)
