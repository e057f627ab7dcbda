"""Memory of the flat index: a few plain arrays, and what lies where in them.

Slots: one block each, 32 bytes: its key, its neighbours in order of use, four holders. A holder is a pod's
number, a bit for each tier that holds the block, and a bit for each tier with more than one copy. A fifth
holder moves all of them to a row: one bitset of pods for each tier. Copies beyond the first are counted
apart. Buckets find the slot of a key, name buckets the slot of an engine's hash ("name"), further buckets a
count of copies; all are open-addressed, and an entry is 32 bits of a hash beside a number, so that they move
without looking at a slot. A slot keeps one name; further ones, of engines that hash otherwise, are aliases.
Each array is reserved for the most that the ceiling of bytes allows, and takes the memory that is used.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NOTHING = np.uint64(0)
ONE = np.uint64(1)
HALF = np.uint64(32)
LOW = np.uint64(0xFFFF_FFFF)

# Columns of a slot, as 32-bit words; 0 and 1 are the key.
PREVIOUS = 2
NEXT = 3
HOLDER = 4
HOLDERS = 4
LAST_HOLDER = HOLDER + HOLDERS - 1

# Of a holder: pod's number, then a bit per tier, then a bit per tier that has further copies.
POD_MASK = 0xFFFF
TIER_SHIFT = 16
TIER_MASK = 0xFF
FURTHER_SHIFT = 24
# In the last holder of a slot whose first one is the number of a row.
IN_ROW = 0xFFFF_FFFF
# As the previous slot: no slot comes before; the slot is free.
NO_SLOT = 0xFFFF_FFFF
FREE_SLOT = 0xFFFF_FFFE
PODS_MAX = 0xFFFF

# Places in `counters`.
NEWEST = 0
OLDEST = 1
FREE = 2
SLOTS_USED = 3
BLOCKS = 4
EVICTED = 5
ROW_FREE = 6
ROWS_USED = 7
ROWS = 8
FURTHER = 9
ALIAS_FREE = 10
ALIASES_USED = 11
ALIASES = 12
NAMES = 13
CAPACITY = 14
BYTES_MAX = 15
RELEASE_TURN = 16
# So many tiers, the best ones, hold anything, or have done so.
TIERS_USED = 17
FURTHER_FREE = 18
FURTHER_USED = 19
COUNTERS = 20

# A slot, its first name, its first alias, and its share of the two kinds of buckets at their usual load.
BLOCK_BYTES = 32 + 8 + 4 + 2 * 12
ALIAS_BYTES = 16 + 12
FURTHER_BYTES = 16 + 12

# A set of released names: a line of the processor's cache each for names and keys.
RELEASED_WAYS = 8
RELEASED_NAME = 0
RELEASED_KEY = 1
# Most blocks, names or further copies that one run may bring.
RUN_MAX = 1 << 15
# Most blocks of one part of a list: applying or listing them takes less than a millisecond.
PART_BLOCKS = 2048


class FlatArrays(NamedTuple):
    """All arrays of one index."""

    slots: NDArray[np.uint32]  # [capacity, 8]
    keys: NDArray[np.uint64]  # [capacity, 4], the same memory: column 0 is the key
    buckets: NDArray[np.uint64]  # see `flat_buckets`: by a key's hash, slot + 1
    rows: NDArray[np.uint64]  # [tiers, rows, words]: bitsets of pods; an unused tier takes no memory
    names: NDArray[np.uint64]  # [capacity]: the first name of each slot; 0: none
    first_alias: NDArray[np.uint32]  # [capacity]: further names of each slot; NO_SLOT: none
    name_buckets: NDArray[np.uint64]  # by a name's hash, slot + 1 or ALIAS_BIT | alias + 1
    aliases: NDArray[np.uint64]  # [n, 2]: a name, and its slot << 32 | the slot's next alias
    further: NDArray[np.uint64]  # [n, 2]: which (slot, pod, tier), and how many copies beyond the first
    further_buckets: NDArray[np.uint64]  # by the hash of (slot, pod, tier), the place in `further` + 1
    # [sets, 2, RELEASED_WAYS]: names mixed with lives of pods' blocks that went, and keys
    released: NDArray[np.uint64]
    pod_blocks: NDArray[np.int64]  # [PODS_MAX + 1]: blocks that each pod holds
    gone: NDArray[np.uint8]  # [PODS_MAX + 1]: 1 where a pod's holdings are void, but not yet swept out
    lives: NDArray[np.uint64]  # [PODS_MAX + 1]: which life each pod's number stands for
    counters: NDArray[np.int64]  # [COUNTERS]


class HeldBlocks(NamedTuple):
    """Blocks that one KV cache group of a pod holds, as columns."""

    keys: NDArray[np.uint64]  # [blocks]
    tiers: NDArray[np.uint8]  # [blocks]: a bit for each tier that holds it
    name_counts: NDArray[np.uint8]  # [blocks]: how many of `names` are its
    names: NDArray[np.uint64]  # [names], block after block
    copies: NDArray[np.int64]  # [copies, 3]: place of a block, tier, and copies beyond the first
