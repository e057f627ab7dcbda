"""Kernels of the flat index: find the slot of a key, and keep slots in the order of their use."""

from __future__ import annotations

import numpy as np

from compiled.jit import inlined, kernel
from indexer import flat_layout as layout
from indexer.flat_buckets import behind, hash_bits, home_of
from indexer.flat_layout import FlatArrays

_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFF_FFFF)
_NOTHING = np.uint64(0)


@inlined
def find(arrays: FlatArrays, key: np.uint64, guess: int) -> int:
    """The slot of a key; -1 if it has none.

    Args:
        guess: A slot to try first. Blocks of a chain mostly lie side by side, and a guess that is right saves
            the way through the buckets.
    """
    if (
        0 <= guess < arrays.counters[layout.SLOTS_USED]
        and arrays.keys[guess, 0] == key
        and arrays.slots[guess, layout.PREVIOUS] != np.uint32(layout.FREE_SLOT)
    ):
        return guess
    bits = hash_bits(key)
    place = home_of(bits, arrays.buckets)
    while True:
        entry = arrays.buckets[place]
        if entry == _NOTHING:
            return -1
        if entry >> _HALF == bits:
            slot = np.int64(entry & _LOW) - 1
            if arrays.keys[slot, 0] == key:
                return slot
        place = behind(place, arrays.buckets)


@inlined
def take_slot(arrays: FlatArrays) -> int:
    """A free slot, out of the order of use; there must be one."""
    counters = arrays.counters
    slot = counters[layout.FREE]
    if slot == layout.NO_SLOT:
        slot = counters[layout.SLOTS_USED]
        counters[layout.SLOTS_USED] = slot + 1
        return slot
    counters[layout.FREE] = np.int64(arrays.slots[slot, layout.NEXT])
    return slot


@inlined
def give_slot(arrays: FlatArrays, slot: int) -> None:
    """Frees a slot that is out of the order of use."""
    arrays.slots[slot, layout.PREVIOUS] = np.uint32(layout.FREE_SLOT)
    arrays.slots[slot, layout.NEXT] = np.uint32(arrays.counters[layout.FREE])
    arrays.counters[layout.FREE] = slot


@inlined
def unlink(arrays: FlatArrays, slot: int) -> None:
    """Takes a slot out of the order of use."""
    slots = arrays.slots
    before = np.int64(slots[slot, layout.PREVIOUS])
    after = np.int64(slots[slot, layout.NEXT])
    if before == layout.NO_SLOT:
        arrays.counters[layout.NEWEST] = after
    else:
        slots[before, layout.NEXT] = np.uint32(after)
    if after == layout.NO_SLOT:
        arrays.counters[layout.OLDEST] = before
    else:
        slots[after, layout.PREVIOUS] = np.uint32(before)


@inlined
def link(arrays: FlatArrays, first: int, last: int, before: int) -> None:
    """Puts slots that are linked with each other, from `first` to `last`, behind `before`.

    Args:
        before: A slot in the order of use; NO_SLOT: they become the most recently used.
    """
    slots = arrays.slots
    after = (
        arrays.counters[layout.NEWEST] if before == layout.NO_SLOT else np.int64(slots[before, layout.NEXT])
    )
    slots[first, layout.PREVIOUS] = np.uint32(before)
    slots[last, layout.NEXT] = np.uint32(after)
    if before == layout.NO_SLOT:
        arrays.counters[layout.NEWEST] = first
    else:
        slots[before, layout.NEXT] = np.uint32(first)
    if after == layout.NO_SLOT:
        arrays.counters[layout.OLDEST] = last
    else:
        slots[after, layout.PREVIOUS] = np.uint32(last)


@kernel
def use(arrays: FlatArrays, chain: np.ndarray, length: int) -> None:
    """Makes the slots of a chain the most recently used ones, its first the very most.

    Mostly they follow one another already, and are moved together; -1 is passed over.

    Args:
        chain: int64 [length or more], slots.
        length: How many of them.
    """
    slots = arrays.slots
    end = length
    while end > 0:
        last = chain[end - 1]
        start = end - 1
        if last < 0:
            end = start
            continue
        while (
            start > 0
            and chain[start - 1] >= 0
            and np.int64(slots[chain[start - 1], layout.NEXT]) == chain[start]
        ):
            start -= 1
        first = chain[start]
        before = np.int64(slots[first, layout.PREVIOUS])
        if before != layout.NO_SLOT:
            after = np.int64(slots[last, layout.NEXT])
            slots[before, layout.NEXT] = np.uint32(after)
            if after == layout.NO_SLOT:
                arrays.counters[layout.OLDEST] = before
            else:
                slots[after, layout.PREVIOUS] = np.uint32(before)
            link(arrays, first, last, layout.NO_SLOT)
        end = start
