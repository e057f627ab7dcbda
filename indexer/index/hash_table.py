"""Kernels of the flat index: hash table from keys to slots, and the LRU list of slots.

A table is one array: a header with its length, its buckets, and reserved space for more. A bucket holds 32
bits of a hash and a number (a slot, say). Probing is linear, and a hash's home bucket is proportional to the
hash, so entries lie sorted by hash except for their displacement. Hence a deletion closes its gap without
tombstones, and a table grows in place, incrementally and from its end: hashes from a frontier on have their
homes in the longer table, those below it still in the shorter one. The memory is mapped outside the heap,
which would not return it to the system.
"""

from __future__ import annotations

import math
import mmap
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from common.jit import inlined, kernel, kernel_with_arrays
from indexer.index import layout
from indexer.index.layout import HALF, LOW, NOTHING, FlatArrays

_Scalar = TypeVar("_Scalar", bound=np.generic)

# Arrays above this size use 2 MiB pages: fewer TLB misses, but an array's last page is half empty on average.
_HUGE_FROM_BYTES = 16 << 20


def reserved(shape: tuple[int, ...], dtype: type[_Scalar], *, huge_pages: bool = True) -> NDArray[_Scalar]:
    """Return an array of zeros whose pages are allocated on first write, and unmapped with the array.

    Args:
        huge_pages: Allow pages of 2 MiB; allocating one takes 0.1 ms to a few milliseconds.

    Raises:
        OSError: There is not enough address space.
    """
    count = math.prod(shape)
    size_bytes = count * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, max(1, size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge_pages and size_bytes > _HUGE_FROM_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE, _HUGE_FROM_BYTES)
    return np.frombuffer(memory, dtype, count).reshape(shape)


GOLDEN = np.uint64(0x9E37_79B9_7F4A_7C15)

# Header words of a table: length in buckets, length before it grew, frontier.
_LENGTH = 0
_SHORTER = 1
_FRONTIER = 2
# In words: one cache line.
_HEADER = 8

_FIRST_LENGTH = 1024
# Buckets that are moved per step while a table grows.
_TURN = 512

_HASHES = 1 << 32


def empty_table(entries: int) -> NDArray[np.uint64]:
    """Return an empty table with memory reserved to grow to this many entries, see `grow_table`."""
    buckets = max(_FIRST_LENGTH, 4 * entries // 3 + 1)
    # Small pages: growth touches new pages under the lock, and a huge page takes longer to allocate.
    table = reserved((_HEADER + buckets,), np.uint64, huge_pages=False)
    table[[_LENGTH, _SHORTER]] = _FIRST_LENGTH
    return table


@inlined
def hash_bits(value: np.uint64) -> np.uint64:
    """Return a 32-bit hash of `value`."""
    return (value * GOLDEN) >> HALF


@inlined
def home_of(bits: np.uint64, table: NDArray[np.uint64]) -> int:
    """Return the home bucket of these hash bits."""
    length = table[_LENGTH] if bits >= table[_FRONTIER] else table[_SHORTER]
    return _HEADER + np.int64((bits * length) >> HALF)


@inlined
def behind(place: int, table: NDArray[np.uint64]) -> int:
    """Return the place of the next bucket; the first one follows the last."""
    return place + 1 if place + 1 < _HEADER + np.int64(table[_LENGTH]) else _HEADER


@inlined
def insert(table: NDArray[np.uint64], bits: np.uint64, number: int) -> None:
    """Insert `number` (> 0, 32 bits). The caller ensures an empty bucket."""
    place = home_of(bits, table)
    while table[place] != NOTHING:
        place = behind(place, table)
    table[place] = (bits << HALF) | np.uint64(number)


@kernel
def delete(table: NDArray[np.uint64], bits: np.uint64, number: int) -> None:
    """Delete an entry, which must exist, and close the gap."""
    # Read once: the compiler cannot prove that writes to entries leave the header unchanged.
    length, shorter, frontier = table[_LENGTH], table[_SHORTER], table[_FRONTIER]
    size = np.int64(length)
    wanted = (bits << HALF) | np.uint64(number)
    gap = home_of(bits, table)
    while table[gap] != wanted:
        gap = behind(gap, table)
    place = gap
    while True:
        place = place + 1 if place + 1 < _HEADER + size else _HEADER
        entry = table[place]
        if entry == NOTHING:
            break
        # The entry may move to the gap unless its home lies after the gap, in cyclic order.
        hashed = entry >> HALF
        home = _HEADER + np.int64((hashed * (length if hashed >= frontier else shorter)) >> HALF)
        distance = place - home
        if distance < 0:
            distance += size
        room = place - gap
        if room < 0:
            room += size
        # No branch, because it would be mispredicted: the last value in the gap is overwritten in the end.
        table[gap] = entry
        gap = place if distance >= room else gap
    table[gap] = NOTHING


@kernel
def grow_table(table: NDArray[np.uint64], entries: int, usual: int) -> None:
    """Grow a table incrementally so that it has room for this many entries.

    Growth by a quarter starts at a load of two thirds and is complete before three quarters. In between, the
    moved share follows the number of entries: about ten moves per new entry.

    Args:
        entries: At most the number that the table was created for.
        usual: Usual maximum of entries; up to it the table does not grow beyond what they need.
    """
    while True:
        shorter = np.int64(table[_SHORTER])
        if table[_FRONTIER] == NOTHING:
            if 3 * entries <= 2 * shorter:
                return
            longer = np.int64(max(5 * shorter // 4, 3 * entries // 2 + 1))
            if entries <= usual:
                longer = np.int64(min(longer, 4 * usual // 3 + 1))
            longer = np.int64(min(longer, len(table) - _HEADER))
            if longer <= shorter:
                return
            table[_FRONTIER] = np.uint64(_HASHES)
            _move(table, longer)
        left: float = (9 * shorter - 12 * entries) / shorter
        while table[_FRONTIER] > np.uint64(max(0.0, min(1.0, left)) * _HASHES):
            _move(table, np.int64(table[_LENGTH]))
        if table[_FRONTIER] != NOTHING:
            return


@kernel_with_arrays
def _move(table: NDArray[np.uint64], length: int) -> None:
    """Move some entries before the frontier to their homes in a table of this length.

    All entries from the first of them to the next empty bucket, across the table's end if need be, are taken
    out and inserted again. Hence their displacement does not matter.
    """
    size = np.int64(table[_LENGTH])
    shorter = table[_SHORTER]
    frontier = np.int64((table[_FRONTIER] * shorter) >> HALF)
    first = np.int64(max(0, frontier - _TURN))
    span = frontier - first
    place = _HEADER + frontier % size
    while table[place] != NOTHING and span < size:
        span += 1
        place = behind(place, table)
    taken = np.empty(span, np.uint64)
    count = 0
    place = _HEADER + first
    for _ in range(span):
        if table[place] != NOTHING:
            taken[count] = table[place]
            table[place] = NOTHING
            count += 1
        place = behind(place, table)
    table[_LENGTH] = np.uint64(length)
    # The lowest hash whose home is at `first` or later.
    table[_FRONTIER] = ((np.uint64(first) << HALF) + shorter - np.uint64(1)) // shorter
    if first == 0:
        table[_SHORTER] = np.uint64(length)
    for each in range(count):
        insert(table, taken[each] >> HALF, np.int64(taken[each] & LOW))


@inlined
def find(arrays: FlatArrays, key: np.uint64, guess: int) -> int:
    """Return the slot of a key, or -1.

    Args:
        guess: Slot to try first. Blocks of a chain mostly have consecutive slots, and a correct guess saves
            the lookup in the buckets.
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
        if entry == NOTHING:
            return -1
        if entry >> HALF == bits:
            slot = np.int64(entry & LOW) - 1
            if arrays.keys[slot, 0] == key:
                return slot
        place = behind(place, arrays.buckets)


@inlined
def allocate_slot(arrays: FlatArrays) -> int:
    """Return a free slot, which is not in the LRU list. The caller ensures that there is one."""
    counters = arrays.counters
    slot = counters[layout.FREE]
    if slot == layout.NO_SLOT:
        slot = counters[layout.SLOTS_USED]
        counters[layout.SLOTS_USED] = slot + 1
        return slot
    counters[layout.FREE] = np.int64(arrays.slots[slot, layout.NEXT])
    return slot


@inlined
def free_slot(arrays: FlatArrays, slot: int) -> None:
    """Free a slot that is not in the LRU list."""
    arrays.slots[slot, layout.PREVIOUS] = np.uint32(layout.FREE_SLOT)
    arrays.slots[slot, layout.NEXT] = np.uint32(arrays.counters[layout.FREE])
    arrays.counters[layout.FREE] = slot


@inlined
def unlink(arrays: FlatArrays, first: int, last: int) -> None:
    """Remove the linked slots from `first` to `last` from the LRU list."""
    slots = arrays.slots
    before = np.int64(slots[first, layout.PREVIOUS])
    after = np.int64(slots[last, layout.NEXT])
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
    """Insert the linked slots from `first` to `last` into the LRU list after `before`; NO_SLOT: in front."""
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
    """Make the slots of a chain the most recently used ones, its first slot the most recent.

    Slots that are adjacent in the LRU list, which is the usual case, are moved together.

    Args:
        chain: int64 [length or more], slots; -1 is skipped.
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
        if np.int64(slots[first, layout.PREVIOUS]) != layout.NO_SLOT:
            unlink(arrays, first, last)
            link(arrays, first, last, layout.NO_SLOT)
        end = start
