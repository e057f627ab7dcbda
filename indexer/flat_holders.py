"""Kernels of the flat index: who holds a block, in which tiers, in how many copies.

A slot has room for four holders; with the fifth they move to a row of bitsets, one for each tier.
"""

from __future__ import annotations

import numpy as np

from compiled.jit import inlined, kernel
from indexer.flat_further import add_further, drop_further, forget_further
from indexer.flat_layout import (
    FURTHER_SHIFT,
    HOLDER,
    IN_ROW,
    LAST_HOLDER,
    NO_SLOT,
    POD_MASK,
    ROW_FREE,
    ROWS,
    ROWS_USED,
    TIER_MASK,
    TIER_SHIFT,
    TIERS_USED,
    FlatArrays,
)

_ONE = np.uint64(1)
_NOTHING = np.uint64(0)
_SIX = np.uint64(6)
_WORD_BITS = np.uint64(63)
# Each six bits in a row of this number are different, so that the upper six of a shifted one tell the shift
# (Leiserson, Prokop, Randall: "Using de Bruijn sequences to index a 1 in a computer word", 1998).
_DE_BRUIJN = np.uint64(0x03F7_9D71_B4CB_0A89)
_PLACES = np.zeros(64, np.int64)
for _place in range(64):
    _PLACES[(int(_DE_BRUIJN) << _place & 0xFFFF_FFFF_FFFF_FFFF) >> 58] = _place


@inlined
def in_row(arrays: FlatArrays, slot: int) -> bool:
    """Whether a slot's holders have moved to a row."""
    return arrays.slots[slot, LAST_HOLDER] == np.uint32(IN_ROW)


@inlined
def lowest_bit(bits: np.uint64) -> int:
    """Place of the lowest bit set; `bits` is not 0."""
    return _PLACES[((bits & (~bits + _ONE)) * _DE_BRUIJN) >> np.uint64(58)]


@inlined
def held_tiers(arrays: FlatArrays, slot: int, pod: int) -> int:
    """A bit for each tier in which a pod holds the block."""
    slots = arrays.slots
    if in_row(arrays, slot):
        row = np.int64(slots[slot, HOLDER])
        bit = np.uint64(pod) & _WORD_BITS
        tiers = 0
        for tier in range(arrays.counters[TIERS_USED]):
            if (arrays.rows[tier, row, pod >> 6] >> bit) & _ONE != _NOTHING:
                tiers |= 1 << tier
        return tiers
    for column in range(HOLDER, LAST_HOLDER + 1):
        holder = np.int64(slots[slot, column])
        if holder & POD_MASK == pod and holder >> TIER_SHIFT != 0:
            return (holder >> TIER_SHIFT) & TIER_MASK
    return 0


@inlined
def hold(arrays: FlatArrays, slot: int, pod: int, tier: int, copies: int) -> None:
    """Counts copies more of a block that has a slot."""
    slots = arrays.slots
    if tier >= arrays.counters[TIERS_USED]:
        arrays.counters[TIERS_USED] = tier + 1
    empty = -1
    if not in_row(arrays, slot):
        for column in range(HOLDER, LAST_HOLDER + 1):
            holder = np.int64(slots[slot, column])
            if holder >> TIER_SHIFT == 0:
                if empty < 0:
                    empty = column
            elif holder & POD_MASK == pod:
                _hold_again(arrays, slot, column, pod, tier, copies)
                return
        if empty >= 0:
            holder = pod | (1 << (TIER_SHIFT + tier))
            if copies > 1:
                holder |= 1 << (FURTHER_SHIFT + tier)
                add_further(arrays, slot, pod, tier, copies - 1)
            slots[slot, empty] = np.uint32(holder)
            arrays.pod_blocks[pod] += 1
            return
        _move_to_row(arrays, slot)
    if held_tiers(arrays, slot, pod) == 0:
        arrays.pod_blocks[pod] += 1
    row = np.int64(slots[slot, HOLDER])
    bit = _ONE << (np.uint64(pod) & _WORD_BITS)
    if arrays.rows[tier, row, pod >> 6] & bit != _NOTHING:
        add_further(arrays, slot, pod, tier, copies)
    else:
        arrays.rows[tier, row, pod >> 6] |= bit
        if copies > 1:
            add_further(arrays, slot, pod, tier, copies - 1)


@inlined
def _hold_again(arrays: FlatArrays, slot: int, column: int, pod: int, tier: int, copies: int) -> None:
    """Counts copies more for a pod that is among a slot's holders."""
    holder = np.int64(arrays.slots[slot, column])
    beyond_first = copies - 1
    if (holder >> (TIER_SHIFT + tier)) & 1:
        beyond_first = copies
    holder |= 1 << (TIER_SHIFT + tier)
    if beyond_first:
        holder |= 1 << (FURTHER_SHIFT + tier)
        add_further(arrays, slot, pod, tier, beyond_first)
    arrays.slots[slot, column] = np.uint32(holder)


@kernel
def _move_to_row(arrays: FlatArrays, slot: int) -> None:
    slots = arrays.slots
    counters = arrays.counters
    row = counters[ROW_FREE]
    if row == NO_SLOT:
        row = counters[ROWS_USED]
        counters[ROWS_USED] = row + 1
    else:
        counters[ROW_FREE] = np.int64(arrays.rows[0, row, 0])
        arrays.rows[0, row, 0] = _NOTHING
    counters[ROWS] += 1
    for column in range(HOLDER, LAST_HOLDER + 1):
        holder = np.int64(slots[slot, column])
        pod = holder & POD_MASK
        for tier in range(counters[TIERS_USED]):
            if (holder >> (TIER_SHIFT + tier)) & 1:
                arrays.rows[tier, row, pod >> 6] |= _ONE << (np.uint64(pod) & _WORD_BITS)
    slots[slot, HOLDER] = np.uint32(row)
    slots[slot, LAST_HOLDER] = np.uint32(IN_ROW)


@inlined
def release(arrays: FlatArrays, slot: int, pod: int, tier: int) -> int:
    """Counts a copy less.

    Returns:
        -1: none was held; 0: further copies stay; 1: it was the last in this tier; 2: the slot has no holder
        any more.
    """
    if (held_tiers(arrays, slot, pod) >> tier) & 1 == 0:
        return -1
    if in_row(arrays, slot):
        if drop_further(arrays, slot, pod, tier) >= 0:
            return 0
        row = np.int64(arrays.slots[slot, HOLDER])
        arrays.rows[tier, row, pod >> 6] &= ~(_ONE << (np.uint64(pod) & _WORD_BITS))
        if held_tiers(arrays, slot, pod):
            return 1
        arrays.pod_blocks[pod] -= 1
        return 2 if drop_empty_row(arrays, slot) else 1
    for column in range(HOLDER, LAST_HOLDER + 1):
        holder = np.int64(arrays.slots[slot, column])
        if holder & POD_MASK != pod or holder >> TIER_SHIFT == 0:
            continue
        if (holder >> (FURTHER_SHIFT + tier)) & 1:
            if drop_further(arrays, slot, pod, tier) == 0:
                arrays.slots[slot, column] = np.uint32(holder & ~(1 << (FURTHER_SHIFT + tier)))
            return 0
        holder &= ~(1 << (TIER_SHIFT + tier))
        if (holder >> TIER_SHIFT) & TIER_MASK:
            arrays.slots[slot, column] = np.uint32(holder)
            return 1
        arrays.slots[slot, column] = np.uint32(0)
        arrays.pod_blocks[pod] -= 1
        break
    return 2 if is_unheld(arrays, slot) else 1


@inlined
def is_unheld(arrays: FlatArrays, slot: int) -> bool:
    """Whether a slot that has no row has no holder."""
    held = np.uint32(0)
    for column in range(HOLDER, LAST_HOLDER + 1):
        held |= arrays.slots[slot, column]
    return held == np.uint32(0)


@kernel
def drop_empty_row(arrays: FlatArrays, slot: int) -> bool:
    """Gives a row back if it has no holder."""
    row = np.int64(arrays.slots[slot, HOLDER])
    for tier in range(arrays.counters[TIERS_USED]):
        for word in range(arrays.rows.shape[2]):
            if arrays.rows[tier, row, word] != _NOTHING:
                return False
    _give_row(arrays, slot)
    return True


@kernel
def _give_row(arrays: FlatArrays, slot: int) -> None:
    row = np.int64(arrays.slots[slot, HOLDER])
    arrays.rows[0, row, 0] = np.uint64(arrays.counters[ROW_FREE])
    arrays.counters[ROW_FREE] = row
    arrays.counters[ROWS] -= 1
    for column in range(HOLDER, LAST_HOLDER + 1):
        arrays.slots[slot, column] = np.uint32(0)


@kernel
def drop_holders(arrays: FlatArrays, slot: int, only_gone: bool) -> bool:
    """Takes away all holders, or those whose pods are gone; tells whether none is left."""
    if in_row(arrays, slot):
        row = np.int64(arrays.slots[slot, HOLDER])
        for word in range(arrays.rows.shape[2]):
            held = _NOTHING
            for tier in range(arrays.counters[TIERS_USED]):
                held |= arrays.rows[tier, row, word]
            while held != _NOTHING:
                bit = held & (~held + _ONE)
                held ^= bit
                pod = (word << 6) + lowest_bit(bit)
                if not only_gone or arrays.gone[pod]:
                    _drop_from_row(arrays, slot, row, pod, bit)
        return drop_empty_row(arrays, slot)
    for column in range(HOLDER, LAST_HOLDER + 1):
        holder = np.int64(arrays.slots[slot, column])
        pod = holder & POD_MASK
        if holder >> TIER_SHIFT and (not only_gone or arrays.gone[pod]):
            for tier in range(arrays.counters[TIERS_USED]):
                if (holder >> (FURTHER_SHIFT + tier)) & 1:
                    forget_further(arrays, slot, pod, tier)
            arrays.slots[slot, column] = np.uint32(0)
            arrays.pod_blocks[pod] -= 1
    return is_unheld(arrays, slot)


@kernel
def _drop_from_row(arrays: FlatArrays, slot: int, row: int, pod: int, bit: np.uint64) -> None:
    for tier in range(arrays.counters[TIERS_USED]):
        if arrays.rows[tier, row, pod >> 6] & bit != _NOTHING:
            arrays.rows[tier, row, pod >> 6] &= ~bit
            forget_further(arrays, slot, pod, tier)
    arrays.pod_blocks[pod] -= 1
