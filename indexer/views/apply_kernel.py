"""Kernel that applies plain events of one pod to the flat index, row by row.

Input: rows of parsed events (see `indexer.wire.columns`). A plain event needs no state but the index. At any
other event the kernel stops, and `PodView` applies that event. The kernel implements only the plain cases of
`PodView`, with the same result.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.jit import inlined, kernel
from indexer.index.engine_hashes import find_by_hash, key_by_hash, keys_by_hash, scope_hashes, scoped_hash
from indexer.index.layout import FlatArrays
from indexer.index.update import ensure_room, remove_by_hash, store_blocks
from indexer.keys import chain_keys
from indexer.views.hybrid import FULL_ATTENTION
from indexer.wire import columns as rows

# Whether a prefix needs all blocks of a group, by the place of the group's kind in `columns.SPEC_KINDS`.
_ALL_NEEDED = np.array([kind in FULL_ATTENTION for kind in rows.SPEC_KINDS])

# Reasons why a run of the kernel ended.
ALL_DONE = 0
NOT_PLAIN = 1
NO_ROOM = 2

# Places in `Progress.counts`.
(
    ROW,  # next row
    HASHES_DONE,  # hashes of that row that are already copied or removed
    # Totals of the last call:
    STORED_BLOCKS,
    REUSED_HASHES,
    LAST_COPIES,
    EXTRA_COPIES,
    RUNS,
    BLOCKS_DONE,  # stored, copied or removed
) = range(8)
COUNTS = 8


class PlainPod(NamedTuple):
    """Facts about a pod that the kernel needs."""

    number: int  # number of the pod in the index
    block_tokens: int  # tokens of an engine block
    split: int  # index blocks per engine block
    group: int  # the lead KV cache group; -1: the engine names no groups
    root: np.uint64  # parent key of a prompt's first block, without adapter and salt
    scope: np.uint64  # see `engine_hashes.scoped_hash`


class Progress(NamedTuple):
    """Arrays written by the kernel."""

    counts: NDArray[np.int64]  # [COUNTS]
    keys: NDArray[np.uint64]  # [room]: keys of all blocks stored, then scratch
    scoped: NDArray[np.uint64]  # [room], scratch: scoped hashes
    chain: NDArray[np.int64]  # [room], scratch: slots
    runs: NDArray[np.int64]  # [room, 2]: start of each run in the tokens and in `keys`
    parents: NDArray[np.uint64]  # [room]: parent key of each run


def progress(room: int) -> Progress:
    """Allocate memory for calls that store, copy or remove at most `room` blocks."""
    return Progress(
        counts=np.zeros(COUNTS, np.int64),
        keys=np.empty(room, np.uint64),
        scoped=np.empty(room, np.uint64),
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
    """Apply plain events from row `done.counts[ROW]` to row `last`, exclusive.

    A run of the kernel may end within a copy or a removal, whose hashes are independent of one another.

    Args:
        arrays: Evicts blocks as needed for `len(done.keys)` more blocks, and as many extra copies.
        tiers: int64 [media]: the tier of each place in `columns.MEDIA`.
        awaited: uint64 [any]: hashes of blocks that orphans wait for; storing one of them is not plain.

    Returns:
        ALL_DONE; NOT_PLAIN if the next row is not plain; NO_ROOM if `done` is full.
    """
    ensure_room(arrays, len(done.keys))
    counts = done.counts
    counts[STORED_BLOCKS:] = 0
    while counts[ROW] < last:
        event = events[counts[ROW]]
        kind = event[rows.KIND]
        if (kind != rows.STORED and kind != rows.REMOVED) or event[rows.GROUP] != pod.group:
            return NOT_PLAIN
        tier = tiers[event[rows.MEDIUM]]
        first = event[rows.HASH_START]
        handles = hashes[first : first + event[rows.HASH_COUNT]]
        if kind == rows.REMOVED or event[rows.TOKEN_COUNT] == 0:
            ended = _change(arrays, pod, tier, kind == rows.REMOVED, handles, done)
            if ended != ALL_DONE:
                return ended
            counts[HASHES_DONE] = 0
        else:
            if counts[BLOCKS_DONE] + len(handles) * pod.split > len(done.keys):
                return NO_ROOM if counts[BLOCKS_DONE] else NOT_PLAIN
            if not _is_plain_run(event, pod, handles, awaited):
                return NOT_PLAIN
            start = event[rows.TOKEN_START]
            run = tokens[start : start + event[rows.TOKEN_COUNT]]
            if not _store(arrays, pod, tier, event, handles, run, multipliers, done):
                return NOT_PLAIN
        counts[ROW] += 1
    return ALL_DONE


@inlined
def _is_plain_run(
    event: NDArray[np.int64], pod: PlainPod, handles: NDArray[np.uint64], awaited: NDArray[np.uint64]
) -> bool:
    if event[rows.BLOCK_SIZE] != pod.block_tokens or len(handles) == 0:
        return False
    if event[rows.TOKEN_COUNT] != len(handles) * pod.block_tokens:
        return False
    if event[rows.HAS_PARENT]:
        if event[rows.PARENT] == 0:
            return False
    elif event[rows.HAS_LORA]:
        return False
    if pod.group < 0 and event[rows.SPEC_KIND] >= 0 and not _ALL_NEEDED[event[rows.SPEC_KIND]]:
        return False
    for place in range(len(awaited)):
        for other in range(len(handles)):
            if handles[other] == awaited[place]:
                return False
    return True


@inlined
def _store(
    arrays: FlatArrays,
    pod: PlainPod,
    tier: int,
    event: NDArray[np.int64],
    handles: NDArray[np.uint64],
    run: NDArray[np.uint32],
    multipliers: NDArray[np.uint64],
    done: Progress,
) -> bool:
    """Store a run; False without effect if its parent is unknown or the run may be a repeated report."""
    number = done.counts[RUNS]
    done.parents[number] = pod.root
    if event[rows.HAS_PARENT]:
        parent = scoped_hash(np.uint64(event[rows.PARENT]), pod.scope, pod.split - 1)
        if not key_by_hash(arrays, parent, pod.number, done.parents[number:]):
            return False
    blocks = len(handles) * pod.split
    start = done.counts[STORED_BLOCKS]
    keys = done.keys[start : start + blocks]
    scoped = done.scoped[:blocks]
    scope_hashes(handles, pod.scope, pod.split, scoped)
    no_extras = keys[:0]
    chain_keys(done.parents[number], run, no_extras, multipliers, keys)
    if not event[rows.HAS_PARENT]:
        slot = find_by_hash(arrays, scoped[0], pod.number)
        if slot >= 0 and arrays.keys[slot, 0] == keys[0]:
            return False
    done.counts[REUSED_HASHES] += store_blocks(arrays, pod.number, tier, keys, scoped, done.chain)
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
    handles: NDArray[np.uint64],
    done: Progress,
) -> int:
    """Remove or add one copy of each remaining block of the row, up to the first unknown block."""
    counts = done.counts
    scoped = done.scoped[: pod.split]
    for number in range(counts[HASHES_DONE], len(handles)):
        if counts[BLOCKS_DONE] + pod.split > len(done.keys):
            return NO_ROOM if counts[BLOCKS_DONE] else NOT_PLAIN
        scope_hashes(handles[number : number + 1], pod.scope, pod.split, scoped)
        if is_removal:
            outcome = remove_by_hash(arrays, pod.number, tier, scoped)
            if outcome < 0:
                return NOT_PLAIN
            counts[LAST_COPIES if outcome > 0 else EXTRA_COPIES] += 1
        else:
            start = counts[STORED_BLOCKS]
            keys = done.keys[start : start + pod.split]
            if not keys_by_hash(arrays, pod.number, scoped, keys):
                return NOT_PLAIN
            store_blocks(arrays, pod.number, tier, keys, scoped, done.chain)
        counts[BLOCKS_DONE] += pod.split
        counts[HASHES_DONE] += 1
    return ALL_DONE
