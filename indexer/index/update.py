"""Kernels of the flat index: store and remove blocks, evict the least recently used ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.jit import inlined, kernel
from indexer.index import layout
from indexer.index.engine_hashes import add_hash, delete_hashes, find_by_hash, remember_removed
from indexer.index.hash_table import (
    allocate_slot,
    delete,
    find,
    free_slot,
    grow_table,
    hash_bits,
    insert,
    link,
    unlink,
    use,
)
from indexer.index.holders import (
    add_holder,
    drop_holders,
    held_tiers,
    in_row,
    lowest_bit,
    remember_lost,
    remove_copy,
)
from indexer.index.layout import NOTHING, ONE, FlatArrays


@inlined
def used_bytes(arrays: FlatArrays) -> int:
    """Return the memory of all blocks, rows, aliases and extra copies in bytes."""
    counters = arrays.counters
    row_bytes = counters[layout.TIERS_USED] * arrays.rows.shape[2] * 8
    return (
        counters[layout.BLOCKS] * layout.BLOCK_BYTES
        + counters[layout.ROWS] * row_bytes
        + counters[layout.ALIASES] * layout.ALIAS_BYTES
        + counters[layout.EXTRA_COPIES] * layout.EXTRA_BYTES
    )


@kernel
def free_block_out_of_line(arrays: FlatArrays, slot: int) -> None:
    """Call `free_block`, compiled as a function of its own for callers that rarely need it."""
    free_block(arrays, slot)


@inlined
def free_block(arrays: FlatArrays, slot: int) -> None:
    """Delete a block that has no holder."""
    delete_hashes(arrays, slot)
    delete(arrays.buckets, hash_bits(arrays.keys[slot, 0]), slot + 1)
    unlink(arrays, slot, slot)
    free_slot(arrays, slot)
    arrays.counters[layout.BLOCKS] -= 1


@kernel
def evict_oldest(arrays: FlatArrays) -> bool:
    """Evict the least recently used block; return whether there was one."""
    slot = arrays.counters[layout.OLDEST]
    if slot == layout.NO_SLOT:
        return False
    drop_holders(arrays, slot, False)
    free_block_out_of_line(arrays, slot)
    arrays.counters[layout.EVICTED] += 1
    return True


@inlined
def insert_block(arrays: FlatArrays, key: np.uint64, before: int) -> int:
    """Create a slot for a new block after `before` in the LRU list. The caller adds a holder."""
    if arrays.counters[layout.BLOCKS] >= arrays.counters[layout.CAPACITY]:
        evict_oldest(arrays)
    slot = allocate_slot(arrays)
    arrays.keys[slot, 0] = key
    for column in range(layout.HOLDER, layout.LAST_HOLDER + 1):
        arrays.slots[slot, column] = np.uint32(0)
    arrays.hashes[slot] = NOTHING
    arrays.first_alias[slot] = np.uint32(layout.NO_SLOT)
    insert(arrays.buckets, hash_bits(key), slot + 1)
    link(arrays, slot, slot, before)
    arrays.counters[layout.BLOCKS] += 1
    return slot


@inlined
def place_blocks(arrays: FlatArrays, keys: NDArray[np.uint64], chain: NDArray[np.int64]) -> None:
    """Find or create the slots of a run of blocks and make them the most recently used, the first the most.

    Args:
        keys: uint64 [blocks], at most the capacity, so that blocks of the run never evict one another.
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
    # The new blocks must fit into the byte limit; those of this run are the most recently used ones.
    room_bytes = arrays.counters[layout.BYTES_MAX] - (blocks - known) * layout.BLOCK_BYTES
    while arrays.counters[layout.BLOCKS] > known and used_bytes(arrays) > room_bytes:
        evict_oldest(arrays)
    before = np.int64(layout.NO_SLOT)
    for place in range(blocks):
        slot = chain[place]
        if slot < 0:
            # An earlier place of this run may have the same key.
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
    hashes: NDArray[np.uint64],
    chain: NDArray[np.int64],
) -> int:
    """Add one copy of each block under its scoped hash.

    Args:
        hashes: uint64 [blocks]; empty for blocks without hashes.
        chain: int64 [blocks], written.

    Returns:
        How many hashes stood for other blocks; these are removed.
    """
    reused = 0
    for place in range(len(hashes)):
        slot = find_by_hash(arrays, hashes[place], pod)
        if slot >= 0 and arrays.keys[slot, 0] != keys[place]:
            remove_pod(arrays, slot, pod)
            reused += 1
    place_blocks(arrays, keys, chain)
    for place in range(len(keys)):
        add_holder(arrays, chain[place], pod, tier, 1)
        if len(hashes):
            add_hash(arrays, chain[place], hashes[place])
    return reused


@kernel
def store_with_room(
    arrays: FlatArrays,
    pod: int,
    tier: int,
    keys: NDArray[np.uint64],
    hashes: NDArray[np.uint64],
    chain: NDArray[np.int64],
) -> int:
    """Call `ensure_room` and `store_blocks` at once: passing the arrays costs as much as a few blocks."""
    ensure_room(arrays, len(keys))
    return store_blocks(arrays, pod, tier, keys, hashes, chain)


@kernel
def remove_pod(arrays: FlatArrays, slot: int, pod: int) -> None:
    """Remove all of a pod's copies of a block."""
    for tier in range(arrays.counters[layout.TIERS_USED]):
        left = 0
        while left == 0:
            left = remove_copy(arrays, slot, pod, tier)
        if left == 2:
            free_block_out_of_line(arrays, slot)
            return


@kernel
def remove_blocks(arrays: FlatArrays, pod: int, tier: int, keys: NDArray[np.uint64]) -> int:
    """Remove one copy of each block; return how many were the pod's last in this tier."""
    ended = 0
    guess = np.int64(-1)
    for place in range(len(keys)):
        slot = find(arrays, keys[place], guess)
        if slot < 0:
            continue
        guess = slot + 1
        outcome = remove_copy(arrays, slot, pod, tier)
        if outcome > 0:
            ended += 1
        if outcome == 2:
            free_block_out_of_line(arrays, slot)
    return ended


@inlined
def remove_by_hash(arrays: FlatArrays, pod: int, tier: int, hashes: NDArray[np.uint64]) -> int:
    """Remove one copy of the blocks that a pod holds under these hashes; return the highest `remove_copy`."""
    most = -1
    for place in range(len(hashes)):
        slot = find_by_hash(arrays, hashes[place], pod)
        if slot < 0:
            continue
        key = arrays.keys[slot, 0]
        outcome = remove_copy(arrays, slot, pod, tier)
        most = max(most, outcome)
        if outcome > 0 and (outcome == 2 or held_tiers(arrays, slot, pod) == 0):
            remember_removed(arrays, hashes[place], pod, key)
            remember_lost(arrays, key, arrays.counters[layout.NOW_S])
        if outcome == 2:
            free_block(arrays, slot)
    return most


@kernel
def sweep(arrays: FlatArrays, start: int, stop: int) -> None:
    """Remove the holders of these slots whose pods are gone."""
    for slot in range(start, min(stop, arrays.counters[layout.SLOTS_USED])):
        if arrays.slots[slot, layout.PREVIOUS] != np.uint32(layout.FREE_SLOT) and drop_holders(
            arrays, slot, True
        ):
            free_block_out_of_line(arrays, slot)


@kernel
def count_holders(arrays: FlatArrays, start: int, stop: int, blocks: NDArray[np.int64]) -> None:
    """Add the blocks of these slots to `blocks`, [pods, tiers]; numbers of pods beyond it are left out."""
    for slot in range(start, min(stop, arrays.counters[layout.SLOTS_USED])):
        if arrays.slots[slot, layout.PREVIOUS] == np.uint32(layout.FREE_SLOT):
            continue
        for tier in range(arrays.counters[layout.TIERS_USED]):
            if in_row(arrays, slot):
                row = np.int64(arrays.slots[slot, layout.HOLDER])
                for word in range(arrays.rows.shape[2]):
                    bits = arrays.rows[tier, row, word]
                    while bits != NOTHING:
                        pod = (word << 6) + lowest_bit(bits)
                        bits &= bits - ONE
                        if pod < len(blocks):
                            blocks[pod, tier] += 1
                continue
            for column in range(layout.HOLDER, layout.LAST_HOLDER + 1):
                holder = np.int64(arrays.slots[slot, column])
                pod = holder & layout.POD_MASK
                if (holder >> (layout.TIER_SHIFT + tier)) & 1 and pod < len(blocks):
                    blocks[pod, tier] += 1


@kernel
def ensure_room(arrays: FlatArrays, blocks: int) -> None:
    """Ensure room in all tables for a run of this many blocks, each with a hash and extra copies.

    Earlier runs may have exceeded the byte limit by adding hashes, holders and copies to existing blocks;
    the least recently used blocks are evicted for it.
    """
    counters = arrays.counters
    while used_bytes(arrays) > counters[layout.BYTES_MAX] and evict_oldest(arrays):
        pass
    capacity = counters[layout.CAPACITY]
    grow_table(arrays.buckets, min(counters[layout.BLOCKS] + blocks, capacity), capacity)
    grow_table(arrays.hash_buckets, counters[layout.HASHES] + blocks, capacity + layout.RUN_MAX)
    grow_table(arrays.extra_copy_buckets, counters[layout.EXTRA_COPIES] + blocks, capacity + layout.RUN_MAX)
