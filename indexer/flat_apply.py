"""Kernel of the flat index: applies plain events of one pod, row by row, as long as they are plain.

Rows of parsed events come in (see `event_rows`); an event that needs more than the index to be understood
ends the run of the kernel, and is left to `apply.PodView`, as are its neighbours' meanings: this file knows
the plain cases of what `PodView` does, and nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from compiled.jit import inlined, kernel
from indexer import event_rows as rows
from indexer.cache_groups import FULL_ATTENTION
from indexer.flat_holders import held_tiers, hold
from indexer.flat_layout import FlatArrays
from indexer.flat_names import find_named, key_named, name_of
from indexer.flat_update import for_blocks, remove_slot, store_blocks
from indexer.key_kernels import chain_keys

# Of each place in `event_rows.SPEC_KINDS`: whether all blocks of such a group are needed.
_ALL_NEEDED = np.array([kind in FULL_ATTENTION for kind in rows.SPEC_KINDS])

# Why a run of the kernel ended.
ALL_DONE = 0
NOT_PLAIN = 1
NO_ROOM = 2

# Places in `Progress.counts`.
ROW = 0
HASHES_DONE = 1
STORED_BLOCKS = 2
REUSED_NAMES = 3
LAST_COPIES = 4
FURTHER_COPIES = 5
RUNS = 6
COPIED_BLOCKS = 7
REMOVED_BLOCKS = 8
COUNTS = 9


class PlainPod(NamedTuple):
    """What the kernel must know of a pod.

    Attributes:
        number: Its number in the index.
        block_tokens: Tokens of an engine block.
        split: Index blocks of an engine block.
        group: The KV cache group whose blocks these are; -1: the engine names none.
        root: Key in front of a prompt's first block, without adapter and salt.
        scope: See `flat_names`.
    """

    number: int
    block_tokens: int
    split: int
    group: int
    root: np.uint64
    scope: np.uint64


class Progress(NamedTuple):
    """Where the kernel writes.

    Attributes:
        counts: int64 [COUNTS]: the row to go on with, how many of its hashes are removed already, and sums of
            what the last call did.
        keys: uint64 [room]: keys of all blocks stored.
        names: uint64 [room], overwritten.
        chain: int64 [room], overwritten.
        runs: int64 [room, 2]: of each run stored, the places of its first token and of its first key.
        parents: uint64 [room]: the key in front of each run.
    """

    counts: NDArray[np.int64]
    keys: NDArray[np.uint64]
    names: NDArray[np.uint64]
    chain: NDArray[np.int64]
    runs: NDArray[np.int64]
    parents: NDArray[np.uint64]


def progress(room: int) -> Progress:
    """Memory for runs that store so many blocks at most."""
    return Progress(
        counts=np.zeros(COUNTS, np.int64),
        keys=np.empty(room, np.uint64),
        names=np.empty(room, np.uint64),
        chain=np.empty(room, np.int64),
        runs=np.empty((room, 2), np.int64),
        parents=np.empty(room, np.uint64),
    )


@kernel
def apply_rows(
    arrays: FlatArrays,
    pod: PlainPod,
    events: NDArray[np.int64],
    last: int,
    hashes: NDArray[np.uint64],
    tokens: NDArray[np.uint32],
    multipliers: NDArray[np.uint64],
    tiers: NDArray[np.int64],
    awaited: NDArray[np.uint64],
    done: Progress,
) -> int:
    """Applies events from row `done.counts[ROW]` on, up to row `last`.

    A run may end within a removal: its hashes do not depend on one another.

    Args:
        arrays: Room is made for `len(done.keys)` more blocks, and as many further copies.
        tiers: int64 [media]: the tier of each place in `event_rows.MEDIA`.
        awaited: uint64 [any]: hashes that other runs wait for; a store of one of them is not plain.

    Returns:
        ALL_DONE, NOT_PLAIN or NO_ROOM: this run has stored, copied or removed as many blocks as there was
            room for.
    """
    for_blocks(arrays, len(done.keys))
    return _apply_rows(arrays, pod, events, last, hashes, tokens, multipliers, tiers, awaited, done)


@inlined
def _apply_rows(
    arrays: FlatArrays,
    pod: PlainPod,
    events: NDArray[np.int64],
    last: int,
    hashes: NDArray[np.uint64],
    tokens: NDArray[np.uint32],
    multipliers: NDArray[np.uint64],
    tiers: NDArray[np.int64],
    awaited: NDArray[np.uint64],
    done: Progress,
) -> int:
    counts = done.counts
    counts[STORED_BLOCKS:] = 0
    while counts[ROW] < last:
        event = events[counts[ROW]]
        kind = event[rows.KIND]
        if (kind != rows.STORED and kind != rows.REMOVED) or event[rows.GROUP] != pod.group:
            return NOT_PLAIN
        tier = tiers[event[rows.MEDIUM]]
        first = event[rows.HASH_START]
        named = hashes[first : first + event[rows.HASH_COUNT]]
        if kind == rows.REMOVED:
            ended = _remove(arrays, pod, tier, named, done)
            if ended != ALL_DONE:
                return ended
            counts[HASHES_DONE] = 0
        elif event[rows.TOKEN_COUNT] == 0:
            blocks = len(named) * pod.split
            if counts[COPIED_BLOCKS] + blocks > len(done.keys):
                return NO_ROOM if counts[COPIED_BLOCKS] else NOT_PLAIN
            if not _copy(arrays, pod, tier, named):
                return NOT_PLAIN
            counts[COPIED_BLOCKS] += blocks
        else:
            if counts[STORED_BLOCKS] + len(named) * pod.split > len(done.keys):
                return NO_ROOM if counts[STORED_BLOCKS] else NOT_PLAIN
            if not _is_plain_run(event, pod, named, awaited):
                return NOT_PLAIN
            start = event[rows.TOKEN_START]
            run = tokens[start : start + event[rows.TOKEN_COUNT]]
            if not _store(arrays, pod, tier, event, named, run, multipliers, done):
                return NOT_PLAIN
        counts[ROW] += 1
    return ALL_DONE


@inlined
def _is_plain_run(
    event: NDArray[np.int64], pod: PlainPod, named: NDArray[np.uint64], awaited: NDArray[np.uint64]
) -> bool:
    if event[rows.BLOCK_SIZE] != pod.block_tokens or len(named) == 0:
        return False
    if event[rows.TOKEN_COUNT] != len(named) * pod.block_tokens:
        return False
    if event[rows.HAS_PARENT]:
        if event[rows.PARENT] == 0:
            return False
    elif event[rows.HAS_LORA]:
        return False
    if pod.group < 0 and event[rows.SPEC_KIND] >= 0 and not _ALL_NEEDED[event[rows.SPEC_KIND]]:
        return False
    for place in range(len(awaited)):
        for other in range(len(named)):
            if named[other] == awaited[place]:
                return False
    return True


@inlined
def _store(
    arrays: FlatArrays,
    pod: PlainPod,
    tier: int,
    event: NDArray[np.int64],
    named: NDArray[np.uint64],
    run: NDArray[np.uint32],
    multipliers: NDArray[np.uint64],
    done: Progress,
) -> bool:
    """Stores a run; False, and nothing done, if its parent is unknown or it may have been told before."""
    number = done.counts[RUNS]
    done.parents[number] = pod.root
    if event[rows.HAS_PARENT]:
        parent = name_of(np.uint64(event[rows.PARENT]), pod.scope, pod.split - 1)
        if not key_named(arrays, parent, pod.number, done.parents[number:]):
            return False
    blocks = len(named) * pod.split
    start = done.counts[STORED_BLOCKS]
    keys = done.keys[start : start + blocks]
    names = done.names[:blocks]
    for block in range(len(named)):
        for part in range(pod.split):
            names[block * pod.split + part] = name_of(named[block], pod.scope, part)
    no_extras = keys[:0]
    chain_keys(done.parents[number], run, no_extras, multipliers, keys)
    if not event[rows.HAS_PARENT]:
        slot = find_named(arrays, names[0], pod.number)
        if slot >= 0 and arrays.keys[slot, 0] == keys[0]:
            return False
    done.counts[REUSED_NAMES] += store_blocks(arrays, pod.number, tier, keys, names, done.chain)
    done.counts[STORED_BLOCKS] += blocks
    done.runs[number, 0] = event[rows.TOKEN_START]
    done.runs[number, 1] = start
    done.counts[RUNS] += 1
    return True


@inlined
def _copy(arrays: FlatArrays, pod: PlainPod, tier: int, named: NDArray[np.uint64]) -> bool:
    """Counts one copy more of each block; False, and nothing done, where one is not held."""
    for block in range(len(named)):
        for part in range(pod.split):
            if find_named(arrays, name_of(named[block], pod.scope, part), pod.number) < 0:
                return False
    for block in range(len(named)):
        for part in range(pod.split):
            slot = find_named(arrays, name_of(named[block], pod.scope, part), pod.number)
            hold(arrays, slot, pod.number, tier, 1)
    return True


@inlined
def _remove(
    arrays: FlatArrays,
    pod: PlainPod,
    tier: int,
    named: NDArray[np.uint64],
    done: Progress,
) -> int:
    """Counts one copy less of each block that the row has left, up to one that is not held in the tier."""
    counts = done.counts
    for number in range(counts[HASHES_DONE], len(named)):
        if counts[REMOVED_BLOCKS] + pod.split > len(done.keys):
            return NO_ROOM if counts[REMOVED_BLOCKS] else NOT_PLAIN
        outcome = -1
        for part in range(pod.split):
            name = name_of(named[number], pod.scope, part)
            slot = find_named(arrays, name, pod.number)
            if outcome < 0 and (slot < 0 or (held_tiers(arrays, slot, pod.number) >> tier) & 1 == 0):
                return NOT_PLAIN
            if slot >= 0:
                outcome = max(outcome, remove_slot(arrays, pod.number, tier, name, slot))
        counts[LAST_COPIES if outcome > 0 else FURTHER_COPIES] += 1
        counts[REMOVED_BLOCKS] += pod.split
        counts[HASHES_DONE] += 1
    return ALL_DONE
