"""Kernel of the flat index: applies plain events of one pod, row by row, as long as they are plain.

Rows of parsed events come in (see `event_columns`); an event that needs more than the index to be understood
ends the run of the kernel, and is left to `apply.PodView`, as are its neighbours' meanings: this file knows
the plain cases of what `PodView` does, and nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.jit import inlined, kernel
from indexer.index.engine_hashes import find_named, key_named, keys_named, name_blocks, name_of
from indexer.index.layout import FlatArrays
from indexer.index.update import for_blocks, remove_named, store_blocks
from indexer.keys import chain_keys
from indexer.views.hybrid import FULL_ATTENTION
from indexer.wire import columns as rows

# Whether all blocks of a group are needed, by the place of its kind in `event_columns.SPEC_KINDS`.
_ALL_NEEDED = np.array([kind in FULL_ATTENTION for kind in rows.SPEC_KINDS])

# Why a run of the kernel ended.
ALL_DONE = 0
NOT_PLAIN = 1
NO_ROOM = 2

# Places in `Progress.counts`.
(
    ROW,  # to go on with
    HASHES_DONE,  # so many of its hashes are copied or removed already
    # From here on: sums of what the last call did.
    STORED_BLOCKS,
    REUSED_NAMES,
    LAST_COPIES,
    FURTHER_COPIES,
    RUNS,
    BLOCKS_DONE,  # stored, copied or removed
) = range(8)
COUNTS = 8


class PlainPod(NamedTuple):
    """Facts about a pod that the kernel needs."""

    number: int  # its number in the index
    block_tokens: int  # tokens of an engine block
    split: int  # index blocks of an engine block
    group: int  # the KV cache group whose blocks these are; -1: the engine names none
    root: np.uint64  # key in front of a prompt's first block, without adapter and salt
    scope: np.uint64  # see `flat_names.name_of`


class Progress(NamedTuple):
    """Arrays that the kernel writes."""

    counts: NDArray[np.int64]  # [COUNTS]
    keys: NDArray[np.uint64]  # [room]: keys of all blocks stored, then overwritten
    names: NDArray[np.uint64]  # [room], overwritten
    chain: NDArray[np.int64]  # [room], overwritten
    runs: NDArray[np.int64]  # [room, 2]: places of the first token and of the first key of each run
    parents: NDArray[np.uint64]  # [room]: the key in front of each run


def progress(room: int) -> Progress:
    """Memory for calls that store, copy or remove so many blocks at most."""
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

    A run may end within a copy or a removal: its hashes do not depend on one another.

    Args:
        arrays: Room is made for `len(done.keys)` more blocks, and as many further copies.
        tiers: int64 [media]: the tier of each place in `event_columns.MEDIA`.
        awaited: uint64 [any]: hashes that other runs wait for; a store of one of them is not plain.

    Returns:
        ALL_DONE, NOT_PLAIN or NO_ROOM: this run has stored, copied or removed as many blocks as there was
            room for.
    """
    for_blocks(arrays, len(done.keys))
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
        if kind == rows.REMOVED or event[rows.TOKEN_COUNT] == 0:
            ended = _change(arrays, pod, tier, kind == rows.REMOVED, named, done)
            if ended != ALL_DONE:
                return ended
            counts[HASHES_DONE] = 0
        else:
            if counts[BLOCKS_DONE] + len(named) * pod.split > len(done.keys):
                return NO_ROOM if counts[BLOCKS_DONE] else NOT_PLAIN
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
    name_blocks(named, pod.scope, pod.split, names)
    no_extras = keys[:0]
    chain_keys(done.parents[number], run, no_extras, multipliers, keys)
    if not event[rows.HAS_PARENT]:
        slot = find_named(arrays, names[0], pod.number)
        if slot >= 0 and arrays.keys[slot, 0] == keys[0]:
            return False
    done.counts[REUSED_NAMES] += store_blocks(arrays, pod.number, tier, keys, names, done.chain)
    done.counts[STORED_BLOCKS] += blocks
    done.counts[BLOCKS_DONE] += blocks
    done.runs[number, 0] = event[rows.TOKEN_START]
    done.runs[number, 1] = start
    done.counts[RUNS] += 1
    return True


@inlined
def _change(
    arrays: FlatArrays,
    pod: PlainPod,
    tier: int,
    is_removal: bool,
    named: NDArray[np.uint64],
    done: Progress,
) -> int:
    """Count one copy less, or more, of each block that the row has left, up to one that is unknown."""
    counts = done.counts
    names = done.names[: pod.split]
    for number in range(counts[HASHES_DONE], len(named)):
        if counts[BLOCKS_DONE] + pod.split > len(done.keys):
            return NO_ROOM if counts[BLOCKS_DONE] else NOT_PLAIN
        name_blocks(named[number : number + 1], pod.scope, pod.split, names)
        if is_removal:
            outcome = remove_named(arrays, pod.number, tier, names)
            if outcome < 0:
                return NOT_PLAIN
            counts[LAST_COPIES if outcome > 0 else FURTHER_COPIES] += 1
        else:
            start = counts[STORED_BLOCKS]
            keys = done.keys[start : start + pod.split]
            if not keys_named(arrays, pod.number, names, keys):
                return NOT_PLAIN
            store_blocks(arrays, pod.number, tier, keys, names, done.chain)
        counts[BLOCKS_DONE] += pod.split
        counts[HASHES_DONE] += 1
    return ALL_DONE
