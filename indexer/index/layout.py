"""Memory layout of the flat index: its arrays and the constants that describe them.

A slot is one block in 32 bytes: key, LRU neighbours and four holders. A holder is a pod's number, a bit per
tier that holds the block, and a bit per tier with more than one copy. A fifth holder moves all of them to a
row: one bitset of pods per tier. Copies beyond the first are counted in a separate table. Three hash tables
find the slot of a key, the slot of a scoped engine hash, and a count of extra copies. Their buckets hold 32
bits of a hash and a number, so they can be moved without reading a slot. A slot keeps one engine hash; hashes
of engines that hash differently are aliases. Each array is reserved for the maximum that the byte limit
allows, but takes only the memory that is used.
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

# Bits of a holder: pod's number, one bit per tier, one bit per tier with extra copies.
POD_MASK = 0xFFFF
TIER_SHIFT = 16
TIER_MASK = 0xFF
EXTRA_SHIFT = 24
# Value of the last holder if the holders are in a row, whose number is the first holder.
IN_ROW = 0xFFFF_FFFF
# Values of PREVIOUS: no previous slot; the slot is free.
NO_SLOT = 0xFFFF_FFFF
FREE_SLOT = 0xFFFF_FFFE
PODS_MAX = 0xFFFF
# In the name of a holder, and in its epoch: a cache group other than the pod's lead group.
GROUP_MARK = "#"
GROUP_BIT = np.uint64(1 << 63)

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
EXTRA_COPIES = 9
ALIAS_FREE = 10
ALIASES_USED = 11
ALIASES = 12
HASHES = 13
CAPACITY = 14
BYTES_MAX = 15
REMOVED_TURN = 16
# Number of leading tiers that have ever held a block.
TIERS_USED = 17
EXTRA_FREE = 18
EXTRA_USED = 19
# Time of the changes that follow, in seconds; 0 before the first.
NOW_S = 20
# Results of the last match, see `contract.Behind`.
BEHIND_HELD = 21
BEHIND_KNOWN = 22
BEHIND_LOST_S = 23
COUNTERS = 24

# A slot, its first hash, its first alias, and its share of both hash tables at their usual load.
BLOCK_BYTES = 32 + 8 + 4 + 2 * 12
ALIAS_BYTES = 16 + 12
EXTRA_BYTES = 16 + 12

# A set of removed hashes: one cache line of hashes and one of keys.
REMOVED_WAYS = 8
REMOVED_HASH = 0
REMOVED_KEY = 1
# Places for keys of lost blocks, a power of two.
LOST_KEYS = 1 << 18
# Maximum of blocks, hashes or extra copies that one run may add.
RUN_MAX = 1 << 15
# Maximum of blocks per part of an exported view: exporting or restoring it takes less than a millisecond.
PART_BLOCKS = 2048


class FlatArrays(NamedTuple):
    """Arrays of one index."""

    slots: NDArray[np.uint32]  # [capacity, 8]
    keys: NDArray[np.uint64]  # [capacity, 4], view of `slots`: column 0 is the key
    buckets: NDArray[np.uint64]  # table (see `hash_table`): key -> slot + 1
    rows: NDArray[np.uint64]  # [tiers, rows, words]: bitsets of pods; an unused tier takes no memory
    hashes: NDArray[np.uint64]  # [capacity]: first scoped hash of each slot; 0: none
    first_alias: NDArray[np.uint32]  # [capacity]: first alias of each slot; NO_SLOT: none
    hash_buckets: NDArray[np.uint64]  # table: scoped hash -> slot + 1 or ALIAS_BIT | alias + 1
    aliases: NDArray[np.uint64]  # [n, 2]: scoped hash, slot << 32 | the slot's next alias
    extra_copies: NDArray[np.uint64]  # [n, 2]: (slot, pod, tier), number of copies beyond the first
    extra_copy_buckets: NDArray[np.uint64]  # table: (slot, pod, tier) -> place in `extra_copies` + 1
    # [sets, 2, REMOVED_WAYS]: scoped hashes of removed blocks, mixed with their pod's epoch, and their keys
    removed: NDArray[np.uint64]
    lost: NDArray[np.uint64]  # [LOST_KEYS, 2]: keys of blocks that pods lost lately, and when, in seconds
    pod_blocks: NDArray[np.int64]  # [PODS_MAX + 1]: blocks that each pod holds
    # [PODS_MAX + 1]: second at which a pod was removed, until it was swept; 0 for others.
    gone: NDArray[np.int64]
    # [PODS_MAX + 1]: epoch of the pod that has this number; with GROUP_BIT for another cache group of a pod
    epochs: NDArray[np.uint64]
    counters: NDArray[np.int64]  # [COUNTERS]


class HeldBlocks(NamedTuple):
    """Blocks held by one KV cache group of a pod, as columns."""

    keys: NDArray[np.uint64]  # [blocks]
    tiers: NDArray[np.uint8]  # [blocks]: a bit per tier that holds the block
    hash_counts: NDArray[np.uint8]  # [blocks]: how many of `hashes` belong to the block
    hashes: NDArray[np.uint64]  # [hashes], scoped, block after block
    copies: NDArray[np.int64]  # [copies, 3]: place of a block, tier, number of copies beyond the first
