"""Kernels of the flat index: pods that hold a block, their tiers and numbers of copies.

A slot has room for four holders. The fifth moves them to a row of bitsets of pods, one per tier. Copies
beyond the first are counted in a separate table by (slot, pod, tier), because few blocks have any.
"""

from __future__ import annotations

import numpy as np

from common.jit import inlined, kernel
from indexer.index import layout
from indexer.index.hash_table import behind, delete, hash_bits, home_of, insert
from indexer.index.layout import HALF, LOW, NOTHING, ONE, FlatArrays


@inlined
def _copy_id(slot: int, pod: int, tier: int) -> np.uint64:
    return (np.uint64(slot) << np.uint64(20)) | (np.uint64(pod) << np.uint64(4)) | np.uint64(tier)


@inlined
def _find_entry(arrays: FlatArrays, copy_id: np.uint64) -> int:
    """Return the place of an entry in `extra_copies`, or -1."""
    if arrays.counters[layout.EXTRA_COPIES] == 0:
        return -1
    buckets = arrays.extra_copy_buckets
    bits = hash_bits(copy_id)
    place = home_of(bits, buckets)
    while buckets[place] != NOTHING:
        if buckets[place] >> HALF == bits:
            entry = np.int64(buckets[place] & LOW) - 1
            if arrays.extra_copies[entry, 0] == copy_id:
                return entry
        place = behind(place, buckets)
    return -1


@inlined
def count_extra_copies(arrays: FlatArrays, slot: int, pod: int, tier: int) -> int:
    """Return the number of copies beyond the first."""
    entry = _find_entry(arrays, _copy_id(slot, pod, tier))
    return np.int64(arrays.extra_copies[entry, 1]) if entry >= 0 else 0


@inlined
def add_extra_copies(arrays: FlatArrays, slot: int, pod: int, tier: int, copies: int) -> None:
    """Add copies beyond the first. The caller ensures room for one more entry."""
    copy_id = _copy_id(slot, pod, tier)
    entry = _find_entry(arrays, copy_id)
    if entry < 0:
        entry = _allocate_entry(arrays)
        arrays.extra_copies[entry, 0] = copy_id
        arrays.extra_copies[entry, 1] = NOTHING
        insert(arrays.extra_copy_buckets, hash_bits(copy_id), entry + 1)
    arrays.extra_copies[entry, 1] += np.uint64(copies)


@inlined
def drop_extra_copy(arrays: FlatArrays, slot: int, pod: int, tier: int) -> int:
    """Remove one copy beyond the first; return how many of them are left, or -1 if there were none."""
    entry = _find_entry(arrays, _copy_id(slot, pod, tier))
    if entry < 0:
        return -1
    left = np.int64(arrays.extra_copies[entry, 1]) - 1
    arrays.extra_copies[entry, 1] = np.uint64(left)
    if left == 0:
        _free_entry(arrays, entry)
    return left


@kernel
def clear_extra_copies(arrays: FlatArrays, slot: int, pod: int, tier: int) -> None:
    """Remove all copies beyond the first."""
    entry = _find_entry(arrays, _copy_id(slot, pod, tier))
    if entry >= 0:
        _free_entry(arrays, entry)


@inlined
def _allocate_entry(arrays: FlatArrays) -> int:
    counters = arrays.counters
    counters[layout.EXTRA_COPIES] += 1
    entry = counters[layout.EXTRA_FREE]
    if entry == layout.NO_SLOT:
        entry = counters[layout.EXTRA_USED]
        counters[layout.EXTRA_USED] = entry + 1
    else:
        counters[layout.EXTRA_FREE] = np.int64(arrays.extra_copies[entry, 1])
    return entry


@kernel
def _free_entry(arrays: FlatArrays, entry: int) -> None:
    delete(arrays.extra_copy_buckets, hash_bits(arrays.extra_copies[entry, 0]), entry + 1)
    arrays.extra_copies[entry, 1] = np.uint64(arrays.counters[layout.EXTRA_FREE])
    arrays.counters[layout.EXTRA_FREE] = entry
    arrays.counters[layout.EXTRA_COPIES] -= 1


_WORD_BITS = np.uint64(63)
# A de Bruijn sequence: any six consecutive bits are unique, so the upper six bits after a shift identify the
# shift (Leiserson, Prokop, Randall: "Using de Bruijn sequences to index a 1 in a computer word", 1998).
_DE_BRUIJN = np.uint64(0x03F7_9D71_B4CB_0A89)
_PLACES = np.zeros(64, np.int64)
for _place in range(64):
    _PLACES[(int(_DE_BRUIJN) << _place & 0xFFFF_FFFF_FFFF_FFFF) >> 58] = _place


@inlined
def in_row(arrays: FlatArrays, slot: int) -> bool:
    """Return whether a slot's holders are in a row."""
    return arrays.slots[slot, layout.LAST_HOLDER] == np.uint32(layout.IN_ROW)


@inlined
def lowest_bit(bits: np.uint64) -> int:
    """Return the place of the lowest set bit of `bits`, which is not 0."""
    return _PLACES[((bits & (~bits + ONE)) * _DE_BRUIJN) >> np.uint64(58)]


@inlined
def held_tiers(arrays: FlatArrays, slot: int, pod: int) -> int:
    """Return a bit for each tier in which a pod holds the block."""
    slots = arrays.slots
    if in_row(arrays, slot):
        row = np.int64(slots[slot, layout.HOLDER])
        bit = np.uint64(pod) & _WORD_BITS
        tiers = 0
        for tier in range(arrays.counters[layout.TIERS_USED]):
            if (arrays.rows[tier, row, pod >> 6] >> bit) & ONE != NOTHING:
                tiers |= 1 << tier
        return tiers
    for column in range(layout.HOLDER, layout.LAST_HOLDER + 1):
        holder = np.int64(slots[slot, column])
        if holder & layout.POD_MASK == pod and holder >> layout.TIER_SHIFT != 0:
            return (holder >> layout.TIER_SHIFT) & layout.TIER_MASK
    return 0


@inlined
def add_holder(arrays: FlatArrays, slot: int, pod: int, tier: int, copies: int) -> None:
    """Add a pod's copies of a block in one tier."""
    slots = arrays.slots
    if tier >= arrays.counters[layout.TIERS_USED]:
        arrays.counters[layout.TIERS_USED] = tier + 1
    empty = -1
    if not in_row(arrays, slot):
        for column in range(layout.HOLDER, layout.LAST_HOLDER + 1):
            holder = np.int64(slots[slot, column])
            if holder >> layout.TIER_SHIFT == 0:
                if empty < 0:
                    empty = column
            elif holder & layout.POD_MASK == pod:
                _add_to_holder(arrays, slot, column, pod, tier, copies)
                return
        if empty >= 0:
            slots[slot, empty] = np.uint32(pod)
            _add_to_holder(arrays, slot, empty, pod, tier, copies)
            arrays.pod_blocks[pod] += 1
            return
        _move_to_row(arrays, slot)
    if held_tiers(arrays, slot, pod) == 0:
        arrays.pod_blocks[pod] += 1
    row = np.int64(slots[slot, layout.HOLDER])
    bit = ONE << (np.uint64(pod) & _WORD_BITS)
    if arrays.rows[tier, row, pod >> 6] & bit != NOTHING:
        add_extra_copies(arrays, slot, pod, tier, copies)
    else:
        arrays.rows[tier, row, pod >> 6] |= bit
        if copies > 1:
            add_extra_copies(arrays, slot, pod, tier, copies - 1)


@inlined
def _add_to_holder(arrays: FlatArrays, slot: int, column: int, pod: int, tier: int, copies: int) -> None:
    """Add copies for a pod whose number is in a slot's holder."""
    holder = np.int64(arrays.slots[slot, column])
    beyond_first = copies - 1
    if (holder >> (layout.TIER_SHIFT + tier)) & 1:
        beyond_first = copies
    holder |= 1 << (layout.TIER_SHIFT + tier)
    if beyond_first:
        holder |= 1 << (layout.EXTRA_SHIFT + tier)
        add_extra_copies(arrays, slot, pod, tier, beyond_first)
    arrays.slots[slot, column] = np.uint32(holder)


@kernel
def _move_to_row(arrays: FlatArrays, slot: int) -> None:
    slots = arrays.slots
    counters = arrays.counters
    row = counters[layout.ROW_FREE]
    if row == layout.NO_SLOT:
        row = counters[layout.ROWS_USED]
        counters[layout.ROWS_USED] = row + 1
    else:
        counters[layout.ROW_FREE] = np.int64(arrays.rows[0, row, 0])
        arrays.rows[0, row, 0] = NOTHING
    counters[layout.ROWS] += 1
    for column in range(layout.HOLDER, layout.LAST_HOLDER + 1):
        holder = np.int64(slots[slot, column])
        pod = holder & layout.POD_MASK
        for tier in range(counters[layout.TIERS_USED]):
            if (holder >> (layout.TIER_SHIFT + tier)) & 1:
                arrays.rows[tier, row, pod >> 6] |= ONE << (np.uint64(pod) & _WORD_BITS)
    slots[slot, layout.HOLDER] = np.uint32(row)
    slots[slot, layout.LAST_HOLDER] = np.uint32(layout.IN_ROW)


@inlined
def remove_copy(arrays: FlatArrays, slot: int, pod: int, tier: int) -> int:
    """Remove one of a pod's copies of a block in one tier.

    Returns:
        -1: the pod held none; 0: other copies remain; 1: it was the pod's last copy in this tier; 2: the slot
            has no holder left.
    """
    if (held_tiers(arrays, slot, pod) >> tier) & 1 == 0:
        return -1
    if in_row(arrays, slot):
        if drop_extra_copy(arrays, slot, pod, tier) >= 0:
            return 0
        row = np.int64(arrays.slots[slot, layout.HOLDER])
        arrays.rows[tier, row, pod >> 6] &= ~(ONE << (np.uint64(pod) & _WORD_BITS))
        if held_tiers(arrays, slot, pod):
            return 1
        arrays.pod_blocks[pod] -= 1
        return 2 if drop_empty_row(arrays, slot) else 1
    for column in range(layout.HOLDER, layout.LAST_HOLDER + 1):
        holder = np.int64(arrays.slots[slot, column])
        if holder & layout.POD_MASK != pod or holder >> layout.TIER_SHIFT == 0:
            continue
        if (holder >> (layout.EXTRA_SHIFT + tier)) & 1:
            if drop_extra_copy(arrays, slot, pod, tier) == 0:
                arrays.slots[slot, column] = np.uint32(holder & ~(1 << (layout.EXTRA_SHIFT + tier)))
            return 0
        holder &= ~(1 << (layout.TIER_SHIFT + tier))
        if (holder >> layout.TIER_SHIFT) & layout.TIER_MASK:
            arrays.slots[slot, column] = np.uint32(holder)
            return 1
        arrays.slots[slot, column] = np.uint32(0)
        arrays.pod_blocks[pod] -= 1
        break
    return 2 if is_unheld(arrays, slot) else 1


@inlined
def is_unheld(arrays: FlatArrays, slot: int) -> bool:
    """Return whether a slot without a row has no holder."""
    held = np.uint32(0)
    for column in range(layout.HOLDER, layout.LAST_HOLDER + 1):
        held |= arrays.slots[slot, column]
    return held == np.uint32(0)


@kernel
def drop_empty_row(arrays: FlatArrays, slot: int) -> bool:
    """Free a slot's row if it has no holder; return whether it was freed."""
    row = np.int64(arrays.slots[slot, layout.HOLDER])
    for tier in range(arrays.counters[layout.TIERS_USED]):
        for word in range(arrays.rows.shape[2]):
            if arrays.rows[tier, row, word] != NOTHING:
                return False
    _free_row(arrays, slot)
    return True


@kernel
def _free_row(arrays: FlatArrays, slot: int) -> None:
    row = np.int64(arrays.slots[slot, layout.HOLDER])
    arrays.rows[0, row, 0] = np.uint64(arrays.counters[layout.ROW_FREE])
    arrays.counters[layout.ROW_FREE] = row
    arrays.counters[layout.ROWS] -= 1
    for column in range(layout.HOLDER, layout.LAST_HOLDER + 1):
        arrays.slots[slot, column] = np.uint32(0)


@inlined
def remember_lost(arrays: FlatArrays, key: np.uint64, lost_s: int) -> None:
    """Record that a pod lost a block, until another key overwrites it."""
    place = key & np.uint64(layout.LOST_KEYS - 1)
    arrays.lost[place, 0] = key
    arrays.lost[place, 1] = np.uint64(lost_s)


@inlined
def lost_s(arrays: FlatArrays, slot: int) -> int:
    """Return the last second at which a holder was removed, 0 for none; -1 if a pod's lead group holds it."""
    last_s = 0
    if in_row(arrays, slot):
        row = np.int64(arrays.slots[slot, layout.HOLDER])
        for word in range(arrays.rows.shape[2]):
            held = NOTHING
            for tier in range(arrays.counters[layout.TIERS_USED]):
                held |= arrays.rows[tier, row, word]
            while held != NOTHING:
                pod = (word << 6) + lowest_bit(held)
                held &= held - ONE
                if arrays.gone[pod] == 0 and arrays.epochs[pod] < layout.GROUP_BIT:
                    return -1
                last_s = max(last_s, arrays.gone[pod])
        return last_s
    for column in range(layout.HOLDER, layout.LAST_HOLDER + 1):
        holder = np.int64(arrays.slots[slot, column])
        pod = holder & layout.POD_MASK
        if holder >> layout.TIER_SHIFT:
            if arrays.gone[pod] == 0 and arrays.epochs[pod] < layout.GROUP_BIT:
                return -1
            last_s = max(last_s, arrays.gone[pod])
    return last_s


@kernel
def drop_holders(arrays: FlatArrays, slot: int, only_gone: bool) -> bool:
    """Remove all holders, or only those whose pods are gone; return whether none is left."""
    if in_row(arrays, slot):
        row = np.int64(arrays.slots[slot, layout.HOLDER])
        for word in range(arrays.rows.shape[2]):
            held = NOTHING
            for tier in range(arrays.counters[layout.TIERS_USED]):
                held |= arrays.rows[tier, row, word]
            while held != NOTHING:
                bit = held & (~held + ONE)
                held ^= bit
                pod = (word << 6) + lowest_bit(bit)
                if not only_gone or arrays.gone[pod]:
                    _drop_from_row(arrays, slot, row, pod, bit)
        return drop_empty_row(arrays, slot)
    for column in range(layout.HOLDER, layout.LAST_HOLDER + 1):
        holder = np.int64(arrays.slots[slot, column])
        pod = holder & layout.POD_MASK
        if holder >> layout.TIER_SHIFT and (not only_gone or arrays.gone[pod]):
            for tier in range(arrays.counters[layout.TIERS_USED]):
                if (holder >> (layout.EXTRA_SHIFT + tier)) & 1:
                    clear_extra_copies(arrays, slot, pod, tier)
            arrays.slots[slot, column] = np.uint32(0)
            _lose(arrays, slot, pod)
    return is_unheld(arrays, slot)


@kernel
def _drop_from_row(arrays: FlatArrays, slot: int, row: int, pod: int, bit: np.uint64) -> None:
    for tier in range(arrays.counters[layout.TIERS_USED]):
        if arrays.rows[tier, row, pod >> 6] & bit != NOTHING:
            arrays.rows[tier, row, pod >> 6] &= ~bit
            clear_extra_copies(arrays, slot, pod, tier)
    _lose(arrays, slot, pod)


@inlined
def _lose(arrays: FlatArrays, slot: int, pod: int) -> None:
    arrays.pod_blocks[pod] -= 1
    gone_s = arrays.gone[pod]
    remember_lost(arrays, arrays.keys[slot, 0], gone_s if gone_s else arrays.counters[layout.NOW_S])
