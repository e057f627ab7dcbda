"""Kernels of the flat index: longest cached prefix of many pods, in one pass over the prompt's blocks.

A pod's blocks are counted in intervals: it enters a tier at one block and leaves it at a later one, so blocks
at which nothing changes cost nothing per pod. As long as blocks have rows, the remaining pods are bitsets. At
the first block without a row at most four pods remain, and are followed one by one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.jit import inlined, kernel
from indexer.index import layout
from indexer.index.hash_table import find, use
from indexer.index.holders import count_extra_copies, held_tiers, in_row, lost_s, lowest_bit
from indexer.index.layout import NOTHING, ONE, FlatArrays

# Columns of a followed pod.
_POD = 0
_TIER = 1
_SINCE = 2

_WORD_BITS = np.uint64(63)
# Consecutive unknown blocks after which no later one is looked up: a new prompt has thousands.
_UNKNOWN_MAX = 8


class Scratch(NamedTuple):
    """Scratch memory of a match, reused by all; see `scratch`."""

    racing: NDArray[np.uint64]  # [words]: bitset of the pods that hold all blocks so far
    current: NDArray[np.uint64]  # [tiers, words]: those of `racing` whose best tier is this one
    since: NDArray[np.int64]  # [pods]: block at which the pod entered that tier
    sums: NDArray[np.int32]  # [pods, tiers]: blocks counted so far
    # [HOLDERS, 3]: pods that are followed one by one, their best tier, block at which they entered it.
    followed: NDArray[np.int64]


def scratch(rows: NDArray[np.uint64]) -> Scratch:
    """Allocate scratch memory for an index with these rows."""
    tiers, _, words = rows.shape
    return Scratch(
        racing=np.zeros(words, np.uint64),
        current=np.zeros((tiers, words), np.uint64),
        since=np.zeros(words * 64, np.int64),
        sums=np.zeros((words * 64, tiers), np.int32),
        followed=np.zeros((layout.HOLDERS, 3), np.int64),
    )


@kernel
def match_blocks(
    arrays: FlatArrays,
    memory: Scratch,
    keys: NDArray[np.uint64],
    pods: NDArray[np.int64],
    chain: NDArray[np.int64],
    counts: NDArray[np.int32],
    blocks: NDArray[np.int32],
) -> int:
    """Count each pod's longest cached prefix, and mark the blocks of the longest one as used.

    Args:
        keys: uint64 [blocks].
        pods: int64 [pods], numbers; -1 for a pod that holds nothing.
        chain: int64 [blocks or more], written: slots.
        counts: int32 [pods, tiers], zeros, written: blocks of the prefix by their best tier.
        blocks: int32 [pods], written: their sums.

    Returns:
        Length of the longest prefix in blocks.
    """
    tiers = arrays.counters[layout.TIERS_USED]
    # Without pods no block counts as used.
    longest = len(keys) if _start_race(memory, pods, tiers) else 0
    # Number of followed pods; -1 while the pods are bitsets.
    followers = -1
    guess = np.int64(-1)
    for place in range(longest):
        slot = find(arrays, keys[place], guess)
        if slot < 0:
            longest = place
            break
        guess = slot + 1
        chain[place] = slot
        if followers >= 0:
            followers = _follow(arrays, slot, place, memory, followers)
        elif not in_row(arrays, slot):
            followers = _begin_following(arrays, slot, place, memory, tiers)
        elif not _all_in_best(arrays, slot, memory) and not _race(arrays, slot, place, memory, tiers):
            followers = 0
        if followers == 0:
            longest = place
            break
    _finish(longest, memory, followers, tiers)
    _write_sums(memory, pods, tiers, counts, blocks)
    use(arrays, chain, longest)
    _look_behind(arrays, keys, longest)
    return longest


@inlined
def _look_behind(arrays: FlatArrays, keys: NDArray[np.uint64], start: int) -> None:
    """Write to the counters how far the blocks from `start` on are held by any pod, and were ever held.

    A block implies those before it: keys are chained.
    """
    held = start
    known = start
    first_lost_s = 0
    place = start
    while place < min(len(keys), known + _UNKNOWN_MAX):
        slot = find(arrays, keys[place], np.int64(-1))
        seen_s = lost_s(arrays, slot) if slot >= 0 else 0
        entry = keys[place] & np.uint64(layout.LOST_KEYS - 1)
        is_lost = arrays.lost[entry, 0] == keys[place]
        if seen_s == 0 and is_lost:
            seen_s = np.int64(arrays.lost[entry, 1])
        if seen_s < 0 and held == place:
            held += 1
        elif first_lost_s == 0:
            first_lost_s = max(0, seen_s)
        place += 1
        if slot >= 0 or is_lost:
            known = place
    arrays.counters[layout.BEHIND_HELD] = held
    arrays.counters[layout.BEHIND_KNOWN] = known
    arrays.counters[layout.BEHIND_LOST_S] = first_lost_s


@inlined
def _write_sums(
    memory: Scratch,
    pods: NDArray[np.int64],
    tiers: int,
    counts: NDArray[np.int32],
    blocks: NDArray[np.int32],
) -> None:
    """Write the counts of each queried pod."""
    for place in range(len(pods)):
        total = np.int32(0)
        for tier in range(tiers):
            if pods[place] >= 0:
                counts[place, tier] = memory.sums[pods[place], tier]
                total += memory.sums[pods[place], tier]
        blocks[place] = total


@inlined
def _start_race(memory: Scratch, pods: NDArray[np.int64], tiers: int) -> bool:
    """Reset the scratch memory for these pods; return whether any of them has a number."""
    anybody = False
    for word in range(len(memory.racing)):
        memory.racing[word] = NOTHING
        for tier in range(tiers):
            memory.current[tier, word] = NOTHING
    for place in range(len(pods)):
        pod = pods[place]
        if pod >= 0:
            anybody = True
            memory.racing[pod >> 6] |= ONE << (np.uint64(pod) & _WORD_BITS)
            for tier in range(tiers):
                memory.sums[pod, tier] = 0
    return anybody


@inlined
def _all_in_best(arrays: FlatArrays, slot: int, memory: Scratch) -> bool:
    """Return whether all racing pods hold this block and the one before in the best tier."""
    row = np.int64(arrays.slots[slot, layout.HOLDER])
    others = NOTHING
    for word in range(len(memory.racing)):
        racing = memory.racing[word]
        others |= racing & ~(memory.current[0, word] & arrays.rows[0, row, word])
    return others == NOTHING


@inlined
def _race(arrays: FlatArrays, slot: int, place: int, memory: Scratch, tiers: int) -> bool:
    """Drop pods that lack this block, record tier changes of the others; return whether any is left."""
    row = np.int64(arrays.slots[slot, layout.HOLDER])
    left_any = NOTHING
    for word in range(len(memory.racing)):
        racing = memory.racing[word]
        if racing & ~(memory.current[0, word] & arrays.rows[0, row, word]):
            racing = _change_tiers(arrays, row, word, place, memory, tiers)
        left_any |= racing
    return left_any != NOTHING


@inlined
def _change_tiers(
    arrays: FlatArrays, row: int, word: int, place: int, memory: Scratch, tiers: int
) -> np.uint64:
    """Record the tier changes of 64 pods at this block; return the bitset of those that hold it."""
    racing = memory.racing[word]
    held = NOTHING
    for tier in range(tiers):
        here = arrays.rows[tier, row, word] & racing & ~held
        held |= here
        old = memory.current[tier, word]
        memory.current[tier, word] = here
        _leave(memory, tier, word, old & ~here, place)
        _enter(memory, tier, tiers, word, here & ~old, place)
    memory.racing[word] = held
    return held


@inlined
def _leave(memory: Scratch, tier: int, word: int, bits: np.uint64, place: int) -> None:
    """Count the intervals of pods that leave this tier."""
    while bits != NOTHING:
        pod = (word << 6) + lowest_bit(bits)
        bits &= bits - ONE
        memory.sums[pod, tier] += np.int32(place - memory.since[pod])


@inlined
def _enter(memory: Scratch, tier: int, tiers: int, word: int, bits: np.uint64, place: int) -> None:
    """Start the intervals of pods that enter this tier."""
    for slower in range(tier + 1, tiers):
        # A pod that moves up from a slower tier has not been counted there yet.
        moved = memory.current[slower, word] & bits
        memory.current[slower, word] ^= moved
        _leave(memory, slower, word, moved, place)
    while bits != NOTHING:
        memory.since[(word << 6) + lowest_bit(bits)] = place
        bits &= bits - ONE


@inlined
def _begin_following(arrays: FlatArrays, slot: int, place: int, memory: Scratch, tiers: int) -> int:
    """Switch from bitsets to following the pods that hold this block; return their number."""
    followed = memory.followed
    followers = 0
    for column in range(layout.HOLDER, layout.LAST_HOLDER + 1):
        holder = np.int64(arrays.slots[slot, column])
        pod = holder & layout.POD_MASK
        word = pod >> 6
        bit = ONE << (np.uint64(pod) & _WORD_BITS)
        if (
            holder >> layout.TIER_SHIFT == 0
            or word >= len(memory.racing)
            or memory.racing[word] & bit == NOTHING
        ):
            continue
        tier = lowest_bit(np.uint64(holder >> layout.TIER_SHIFT))
        followed[followers, _POD] = pod
        followed[followers, _TIER] = tier
        followed[followers, _SINCE] = place
        if memory.current[tier, word] & bit != NOTHING:
            followed[followers, _SINCE] = memory.since[pod]
            memory.current[tier, word] ^= bit
        followers += 1
    _end_intervals(memory, place, tiers)
    return followers


@inlined
def _end_intervals(memory: Scratch, place: int, tiers: int) -> None:
    """Count the open intervals of all bitset pods up to this block."""
    for word in range(len(memory.racing)):
        for tier in range(tiers):
            _leave(memory, tier, word, memory.current[tier, word], place)


@inlined
def _follow(arrays: FlatArrays, slot: int, place: int, memory: Scratch, followers: int) -> int:
    """Update the followed pods at this block; return how many of them hold it."""
    followed = memory.followed
    follower = 0
    while follower < followers:
        pod = followed[follower, _POD]
        tiers = held_tiers(arrays, slot, pod)
        old = followed[follower, _TIER]
        if tiers & ((2 << old) - 1) == 1 << old:
            follower += 1
            continue
        memory.sums[pod, old] += np.int32(place - followed[follower, _SINCE])
        if tiers:
            followed[follower, _TIER] = lowest_bit(np.uint64(tiers))
            followed[follower, _SINCE] = place
            follower += 1
        else:
            followers -= 1
            for column in range(3):
                followed[follower, column] = followed[followers, column]
    return followers


@inlined
def _finish(longest: int, memory: Scratch, followers: int, tiers: int) -> None:
    """Count the intervals that are open at the end."""
    if followers < 0:
        _end_intervals(memory, longest, tiers)
    for follower in range(max(0, followers)):
        pod, tier, since = memory.followed[follower]
        memory.sums[pod, tier] += np.int32(longest - since)


@kernel
def held_blocks(arrays: FlatArrays, keys: NDArray[np.uint64], pod: int, tiers: NDArray[np.uint8]) -> None:
    """Write, per key, a bit for each tier in which the pod holds it."""
    guess = np.int64(-1)
    for place in range(len(keys)):
        slot = find(arrays, keys[place], guess)
        if slot >= 0:
            guess = slot + 1
            tiers[place] = np.uint8(held_tiers(arrays, slot, pod))


@kernel
def count_copies(
    arrays: FlatArrays, keys: NDArray[np.uint64], pod: int, tier: int, copies: NDArray[np.int32]
) -> None:
    """Write, per key, the number of copies that the pod holds in this tier."""
    for place in range(len(keys)):
        slot = find(arrays, keys[place], np.int64(-1))
        copies[place] = 0
        if slot >= 0 and (held_tiers(arrays, slot, pod) >> tier) & 1:
            copies[place] = 1 + count_extra_copies(arrays, slot, pod, tier)


@kernel
def cut_to_served(
    blocks: NDArray[np.int32],
    blocks_by_tier: NDArray[np.int32],
    strides: NDArray[np.int32],
    drops: NDArray[np.int32],
    servable: int,
) -> None:
    """Cut each row's blocks to what its engine serves: whole blocks of its own, less those that it drops.

    Engines evict the end of a chain first, so the blocks cut off are taken from the slowest tiers.

    Args:
        drops: int32 [rows], index blocks at the end of a hit that the engine computes again.
        servable: Most blocks that an engine without a drop serves of the prompt.
    """
    for row in range(len(blocks)):
        over = blocks[row] % strides[row]
        if drops[row] > 0:
            most = min(blocks[row] - over, servable - servable % strides[row])
            over = blocks[row] - max(0, most - drops[row])
        blocks[row] -= over
        for tier in range(blocks_by_tier.shape[1] - 1, -1, -1):
            taken = min(over, blocks_by_tier[row, tier])
            blocks_by_tier[row, tier] -= taken
            over -= taken
