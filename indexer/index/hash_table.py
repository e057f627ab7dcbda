"""Kernels of the flat index: find the slot of a key, and keep slots in the order of their use.

Slots are found by open-addressed buckets of (32 bits of hash, number), in the order of the hash.

A table is one array: a few words that say how long it is, then its buckets, then what is reserved for more.
Linear probing with a home that grows with the hash: entries lie sorted but for their displacement. So a
deletion closes its gap without tombstones, and a table grows where it is, from its end and bit by bit: hashes
from a frontier on have their homes in the longer table, those below still in the shorter one. The memory is
outside the heap, which would keep what once was used.
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

# From here on in 2 MiB pages: far reads find them faster, but an array's last one is half empty on average.
_HUGE_FROM_BYTES = 16 << 20


def reserved(shape: tuple[int, ...], dtype: type[_Scalar], *, huge_pages: bool = True) -> NDArray[_Scalar]:
    """An array of zeros that takes memory page by page when it is written to, and gives it back when it goes.

    Args:
        huge_pages: Let the system take it in pages of 2 MiB, each of which takes 0.1 ms to some milliseconds.

    Raises:
        OSError: There is no address space for it.
    """
    count = math.prod(shape)
    size_bytes = count * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, max(1, size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge_pages and size_bytes > _HUGE_FROM_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE, _HUGE_FROM_BYTES)
    return np.frombuffer(memory, dtype, count).reshape(shape)


GOLDEN = np.uint64(0x9E37_79B9_7F4A_7C15)

# The first words of a table: its length in buckets, the one from before it grew, and the frontier.
_LENGTH = 0
_SHORTER = 1
_FRONTIER = 2
# A line of the processor's cache.
_HEADER = 8

_FIRST_LENGTH = 1024
# So many buckets are looked through at a time when a table grows.
_TURN = 512

_HASHES = 1 << 32


def empty_table(entries: int) -> NDArray[np.uint64]:
    """A table that can grow until so many entries fit (see `room_for`); its memory is taken as it grows."""
    buckets = max(_FIRST_LENGTH, 4 * entries // 3 + 1)
    # In small pages: it touches new ones while others wait for it to grow.
    table = reserved((_HEADER + buckets,), np.uint64, huge_pages=False)
    table[[_LENGTH, _SHORTER]] = _FIRST_LENGTH
    return table


@inlined
def hash_bits(value: np.uint64) -> np.uint64:
    """32 bits of a hash of `value`."""
    return (value * GOLDEN) >> HALF


@inlined
def home_of(bits: np.uint64, table: NDArray[np.uint64]) -> int:
    """Where entries with these hash bits begin."""
    length = table[_LENGTH] if bits >= table[_FRONTIER] else table[_SHORTER]
    return _HEADER + np.int64((bits * length) >> HALF)


@inlined
def behind(place: int, table: NDArray[np.uint64]) -> int:
    """The place of the next bucket; behind the last comes the first."""
    return place + 1 if place + 1 < _HEADER + np.int64(table[_LENGTH]) else _HEADER


@inlined
def insert(table: NDArray[np.uint64], bits: np.uint64, number: int) -> None:
    """Enters `number` (> 0, 32 bits); there must be room."""
    place = home_of(bits, table)
    while table[place] != NOTHING:
        place = behind(place, table)
    table[place] = (bits << HALF) | np.uint64(number)


@kernel
def delete(table: NDArray[np.uint64], bits: np.uint64, number: int) -> None:
    """Takes an entry out, and closes the gap; it must be there."""
    # Read once: the compiler cannot know that no entry is written to these words.
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
        # It may move to the gap if its home does not lie behind the gap, seen around the table.
        hashed = entry >> HALF
        home = _HEADER + np.int64((hashed * (length if hashed >= frontier else shorter)) >> HALF)
        distance = place - home
        if distance < 0:
            distance += size
        room = place - gap
        if room < 0:
            room += size
        # Without a branch, which nobody could foresee: what lies in the gap is overwritten at last.
        table[gap] = entry
        gap = place if distance >= room else gap
    table[gap] = NOTHING


@kernel
def room_for(table: NDArray[np.uint64], entries: int, usual: int) -> None:
    """Lets a table grow as far as it must for so many entries.

    It begins to when two thirds are full, and has a quarter more buckets when three quarters would be. In
    between as much of it has moved as entries have come: about ten for each one.

    Args:
        entries: No more than it was made for.
        usual: There will mostly be no more entries than this: it does not grow beyond what they need.
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
    """Moves some entries in front of the frontier to their homes in a table of this length.

    From there to the next empty bucket, which may lie around the table's end, all is taken out and entered
    again: so it does not matter which of these entries are in front of their homes.
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
    # The least hash that has its home there or behind.
    table[_FRONTIER] = ((np.uint64(first) << HALF) + shorter - np.uint64(1)) // shorter
    if first == 0:
        table[_SHORTER] = np.uint64(length)
    for each in range(count):
        insert(table, taken[each] >> HALF, np.int64(taken[each] & LOW))


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
        if entry == NOTHING:
            return -1
        if entry >> HALF == bits:
            slot = np.int64(entry & LOW) - 1
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
