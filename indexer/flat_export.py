"""Kernels of the flat index: all that one pod holds, slot by slot, out of one index and into another.

Slots come in, columns of blocks with their tiers, names and further copies go out (see `Listed`), and the
other way round.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from compiled.jit import inlined, kernel
from indexer import flat_layout as layout
from indexer.flat_holders import count_further, held_tiers, hold
from indexer.flat_layout import FlatArrays
from indexer.flat_names import ALIASES_MAX, give_name
from indexer.flat_update import place_blocks
from indexer.tiers import TIERS_MAX

# Places in `Listed.counts`.
BLOCKS_LISTED = 0
NAMES_LISTED = 1
COPIES_LISTED = 2

NAMES_MAX = 1 + ALIASES_MAX

_LOW = np.uint64(0xFFFF_FFFF)
_NOTHING = np.uint64(0)


class Listed(NamedTuple):
    """Where `list_held` writes; see `listed`.

    Attributes:
        counts: int64 [3]: how many blocks, names and further copies.
        keys: uint64 [blocks].
        tiers: uint8 [blocks]: a bit for each tier that holds it.
        name_counts: uint8 [blocks]: how many of `names` are its.
        names: uint64 [names], block after block.
        copies: int64 [copies, 3]: place of a block, tier, and how many copies beyond the first.
    """

    counts: NDArray[np.int64]
    keys: NDArray[np.uint64]
    tiers: NDArray[np.uint8]
    name_counts: NDArray[np.uint8]
    names: NDArray[np.uint64]
    copies: NDArray[np.int64]


def listed(blocks: int) -> Listed:
    """Memory for so many blocks with one name each, or fewer with more."""
    return Listed(
        counts=np.zeros(3, np.int64),
        keys=np.empty(blocks, np.uint64),
        tiers=np.empty(blocks, np.uint8),
        name_counts=np.empty(blocks, np.uint8),
        names=np.empty(blocks + NAMES_MAX, np.uint64),
        copies=np.empty((blocks + TIERS_MAX, 3), np.int64),
    )


@kernel
def list_held(arrays: FlatArrays, pod: int, left_out: int, start: int, stop: int, found: Listed) -> int:
    """Writes what a pod holds in these slots, until there is no more room.

    Args:
        left_out: A tier that does not count.
        found: Overwritten.

    Returns:
        The slot to go on with.
    """
    found.counts[:] = 0
    end: int = min(stop, arrays.counters[layout.SLOTS_USED])
    for slot in range(start, end):
        if arrays.slots[slot, layout.PREVIOUS] == np.uint32(layout.FREE_SLOT):
            continue
        tiers = held_tiers(arrays, slot, pod) & ~(1 << left_out)
        if tiers == 0:
            continue
        if (
            found.counts[BLOCKS_LISTED] == len(found.keys)
            or found.counts[NAMES_LISTED] + NAMES_MAX > len(found.names)
            or found.counts[COPIES_LISTED] + TIERS_MAX > len(found.copies)
        ):
            return slot
        _list_slot(arrays, slot, pod, tiers, found)
    return end


@inlined
def _list_slot(arrays: FlatArrays, slot: int, pod: int, tiers: int, found: Listed) -> None:
    place = found.counts[BLOCKS_LISTED]
    found.keys[place] = arrays.keys[slot, 0]
    found.tiers[place] = np.uint8(tiers)
    first = found.counts[NAMES_LISTED]
    name = first
    if arrays.names[slot] != _NOTHING:
        found.names[name] = arrays.names[slot]
        name += 1
        alias = np.int64(arrays.first_alias[slot])
        while alias != layout.NO_SLOT:
            found.names[name] = arrays.aliases[alias, 0]
            name += 1
            alias = np.int64(arrays.aliases[alias, 1] & _LOW)
    found.name_counts[place] = np.uint8(name - first)
    for tier in range(arrays.counters[layout.TIERS_USED]):
        further = count_further(arrays, slot, pod, tier) if (tiers >> tier) & 1 else 0
        if further > 0:
            copy = found.counts[COPIES_LISTED]
            found.copies[copy, 0] = place
            found.copies[copy, 1] = tier
            found.copies[copy, 2] = further
            found.counts[COPIES_LISTED] = copy + 1
    found.counts[NAMES_LISTED] = name
    found.counts[BLOCKS_LISTED] = place + 1


@kernel
def take_held(
    arrays: FlatArrays,
    pod: int,
    keys: NDArray[np.uint64],
    tiers: NDArray[np.uint8],
    name_counts: NDArray[np.uint8],
    names: NDArray[np.uint64],
    copies: NDArray[np.int64],
    chain: NDArray[np.int64],
) -> None:
    """Adds what `list_held` wrote of another index; there must be room for so many blocks and names.

    Args:
        chain: int64 [blocks], written.
    """
    place_blocks(arrays, keys, chain)
    name = 0
    for place in range(len(keys)):
        slot = chain[place]
        for tier in range(arrays.rows.shape[0]):
            if (tiers[place] >> tier) & 1:
                hold(arrays, slot, pod, tier, 1)
        for _ in range(name_counts[place]):
            give_name(arrays, slot, names[name])
            name += 1
    for copy in range(len(copies)):
        hold(arrays, chain[copies[copy, 0]], pod, copies[copy, 1], copies[copy, 2])
