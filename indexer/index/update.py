"""Kernels of the flat index: blocks in, blocks out, and the least recently used out when there is no room."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.jit import inlined, kernel
from indexer.index import layout
from indexer.index.engine_hashes import find_named, forget_names, give_name, remember_released
from indexer.index.hash_table import (
    delete,
    find,
    give_slot,
    hash_bits,
    insert,
    link,
    room_for,
    take_slot,
    unlink,
    use,
)
from indexer.index.holders import drop_holders, held_tiers, hold, release
from indexer.index.layout import NOTHING, FlatArrays


@inlined
def used_bytes(arrays: FlatArrays) -> int:
    """Memory of what is held."""
    counters = arrays.counters
    row_bytes = counters[layout.TIERS_USED] * arrays.rows.shape[2] * 8
    return (
        counters[layout.BLOCKS] * layout.BLOCK_BYTES
        + counters[layout.ROWS] * row_bytes
        + counters[layout.ALIASES] * layout.ALIAS_BYTES
        + counters[layout.FURTHER] * layout.FURTHER_BYTES
    )


@kernel
def drop_slot(arrays: FlatArrays, slot: int) -> None:
    """As `forget_slot`, compiled by itself: for where it is rarely called."""
    forget_slot(arrays, slot)


@inlined
def forget_slot(arrays: FlatArrays, slot: int) -> None:
    """Forgets a block that nobody holds."""
    forget_names(arrays, slot)
    delete(arrays.buckets, hash_bits(arrays.keys[slot, 0]), slot + 1)
    unlink(arrays, slot)
    give_slot(arrays, slot)
    arrays.counters[layout.BLOCKS] -= 1


@kernel
def evict_oldest(arrays: FlatArrays, blocks: int) -> int:
    """Drops so many of the least recently used blocks with all their holders; tells how many there were."""
    for dropped in range(blocks):
        slot = arrays.counters[layout.OLDEST]
        if slot == layout.NO_SLOT:
            return dropped
        drop_holders(arrays, slot, False)
        drop_slot(arrays, slot)
        arrays.counters[layout.EVICTED] += 1
    return blocks


@inlined
def make_room(arrays: FlatArrays, blocks: int, spared: int) -> None:
    """Evicts until so many more blocks fit in the bytes, but spares the most recently used ones."""
    counters = arrays.counters
    while (
        counters[layout.BLOCKS] > spared
        and used_bytes(arrays) + blocks * layout.BLOCK_BYTES > counters[layout.BYTES_MAX]
    ):
        evict_oldest(arrays, 1)


@inlined
def insert_block(arrays: FlatArrays, key: np.uint64, before: int) -> int:
    """Makes a slot for a new block, behind `before` in the order of use; it must be given a holder."""
    if arrays.counters[layout.BLOCKS] >= arrays.counters[layout.CAPACITY]:
        evict_oldest(arrays, 1)
    slot = take_slot(arrays)
    arrays.keys[slot, 0] = key
    for column in range(layout.HOLDER, layout.LAST_HOLDER + 1):
        arrays.slots[slot, column] = np.uint32(0)
    arrays.names[slot] = NOTHING
    arrays.first_alias[slot] = np.uint32(layout.NO_SLOT)
    insert(arrays.buckets, hash_bits(key), slot + 1)
    link(arrays, slot, slot, before)
    arrays.counters[layout.BLOCKS] += 1
    return slot


@inlined
def place_blocks(arrays: FlatArrays, keys: NDArray[np.uint64], chain: NDArray[np.int64]) -> None:
    """Finds or makes the slots of a run of blocks, and makes them the most recently used, the first the most.

    Args:
        keys: uint64 [blocks], no more than the capacity: those of the run never evict one another.
        chain: int64 [blocks], written: their slots.
    """
    blocks = len(keys)
    guess = np.int64(-1)
    known = 0
    for place in range(blocks):
        slot = find(arrays, keys[place], guess)
        chain[place] = slot
        if slot >= 0:
            guess = slot + 1
            known += 1
    if known:
        use(arrays, chain, blocks)
        if known == blocks:
            return
    make_room(arrays, blocks - known, known)
    before = np.int64(layout.NO_SLOT)
    for place in range(blocks):
        slot = chain[place]
        if slot < 0:
            # The call itself may name a key twice.
            slot = find(arrays, keys[place], -1) if place else -1
            if slot < 0:
                slot = insert_block(arrays, keys[place], before)
            chain[place] = slot
        before = slot


@kernel
def store_blocks(
    arrays: FlatArrays,
    pod: int,
    tier: int,
    keys: NDArray[np.uint64],
    names: NDArray[np.uint64],
    chain: NDArray[np.int64],
) -> int:
    """Count one copy of each block, found by its name from now on.

    Args:
        names: uint64 [blocks], or empty: the blocks get no names.
        chain: int64 [blocks], written.

    Returns:
        How many names meant other blocks.
    """
    reused = 0
    for place in range(len(names)):
        slot = find_named(arrays, names[place], pod)
        if slot >= 0 and arrays.keys[slot, 0] != keys[place]:
            forget_pod(arrays, slot, pod)
            reused += 1
    place_blocks(arrays, keys, chain)
    for place in range(len(keys)):
        hold(arrays, chain[place], pod, tier, 1)
        if len(names):
            give_name(arrays, chain[place], names[place])
    return reused


@kernel
def store_with_room(
    arrays: FlatArrays,
    pod: int,
    tier: int,
    keys: NDArray[np.uint64],
    names: NDArray[np.uint64],
    chain: NDArray[np.int64],
) -> int:
    """`for_blocks` and `store_blocks` in one call: to hand the arrays over costs as much as a few blocks."""
    for_blocks(arrays, len(keys))
    return store_blocks(arrays, pod, tier, keys, names, chain)


@kernel
def forget_pod(arrays: FlatArrays, slot: int, pod: int) -> None:
    """Takes all of a pod's copies of a block away."""
    for tier in range(arrays.counters[layout.TIERS_USED]):
        left = 0
        while left == 0:
            left = release(arrays, slot, pod, tier)
        if left == 2:
            drop_slot(arrays, slot)
            return


@kernel
def remove_blocks(arrays: FlatArrays, pod: int, tier: int, keys: NDArray[np.uint64]) -> int:
    """Counts a copy less of each block; tells how many holdings ended with it."""
    ended = 0
    guess = np.int64(-1)
    for place in range(len(keys)):
        slot = find(arrays, keys[place], guess)
        if slot < 0:
            continue
        guess = slot + 1
        outcome = release(arrays, slot, pod, tier)
        if outcome > 0:
            ended += 1
        if outcome == 2:
            drop_slot(arrays, slot)
    return ended


@inlined
def remove_named(arrays: FlatArrays, pod: int, tier: int, names: NDArray[np.uint64]) -> int:
    """Count one copy less of the blocks that a pod holds under these names; answers as `release` at most."""
    most = -1
    for place in range(len(names)):
        slot = find_named(arrays, names[place], pod)
        if slot < 0:
            continue
        key = arrays.keys[slot, 0]
        outcome = release(arrays, slot, pod, tier)
        most = max(most, outcome)
        if outcome > 0 and (outcome == 2 or held_tiers(arrays, slot, pod) == 0):
            remember_released(arrays, names[place], pod, key)
        if outcome == 2:
            forget_slot(arrays, slot)
    return most


@kernel
def sweep(arrays: FlatArrays, start: int, stop: int) -> None:
    """Takes the holdings of pods that are gone out of these slots."""
    for slot in range(start, min(stop, arrays.counters[layout.SLOTS_USED])):
        if arrays.slots[slot, layout.PREVIOUS] != np.uint32(layout.FREE_SLOT) and drop_holders(
            arrays, slot, True
        ):
            drop_slot(arrays, slot)


@kernel
def count_blocks(arrays: FlatArrays, pod: int, tier: int, start: int, stop: int) -> int:
    """Counts the blocks that a pod holds in one tier in these slots."""
    found = 0
    for slot in range(start, min(stop, arrays.counters[layout.SLOTS_USED])):
        if arrays.slots[slot, layout.PREVIOUS] != np.uint32(layout.FREE_SLOT):
            found += (held_tiers(arrays, slot, pod) >> tier) & 1
    return found


@kernel
def for_blocks(arrays: FlatArrays, blocks: int) -> None:
    """Makes room for a run of so many blocks, each with a name and further copies.

    What runs before this one brought for blocks that were known already (names, holders, copies) may have
    gone beyond the ceiling: the least recently used blocks leave for it.
    """
    counters = arrays.counters
    while used_bytes(arrays) > counters[layout.BYTES_MAX] and evict_oldest(arrays, 1):
        pass
    capacity = counters[layout.CAPACITY]
    room_for(arrays.buckets, min(counters[layout.BLOCKS] + blocks, capacity), capacity)
    room_for(arrays.name_buckets, counters[layout.NAMES] + blocks, capacity + layout.RUN_MAX)
    room_for(arrays.further_buckets, counters[layout.FURTHER] + blocks, capacity + layout.RUN_MAX)
