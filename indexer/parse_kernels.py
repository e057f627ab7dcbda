"""Published payloads to rows of numbers, compiled: the fast path of `decode`.

Comes in: payloads joined to one array of bytes. Goes out: rows of batches and events (see `event_rows`), all
hashes and all tokens. An event that is unusual (see `event_kernels`) gets a row of kind OTHER, which tells
where its bytes are, for `decode.decode_event`: it may be good, of an unknown kind, or broken.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compiled.direct import DirectKernel
from compiled.jit import inlined, kernel_without_gil
from indexer import event_rows as rows
from indexer.event_kernels import blank_event, read_event
from indexer.events import MAX_EVENTS
from indexer.msgpack_kernels import (
    BROKEN,
    FLOAT32,
    FLOAT64,
    NIL,
    as_int,
    big_endian,
    eight_bytes,
    read_array,
    read_number,
    skip_value,
)


@DirectKernel
@kernel_without_gil
def parse_payloads(
    data: NDArray[np.uint8],
    ends: NDArray[np.int64],
    batches: NDArray[np.int64],
    events: NDArray[np.int64],
    hashes: NDArray[np.uint64],
    tokens: NDArray[np.uint32],
    found: NDArray[np.int64],
) -> int:
    """Reads payloads one by one.

    Args:
        data: uint8 [bytes], the payloads.
        ends: int64 [payloads], where each of them ends; it begins where the one before ended.
        batches: int64 [payloads, BATCH_COLUMNS], written.
        events: int64 [any, EVENT_COLUMNS], written.
        hashes: uint64 [as many as data, or more], written.
        tokens: uint32 [as many as data, or more], written.
        found: int64 [FOUND], written.

    Returns:
        The number of events; if there are more than `events` has rows: how many it must have to get further,
        and nothing that was written counts.
    """
    found[:] = 0
    start = 0
    row = 0
    hash_at = 0
    token_at = 0
    for payload in range(len(ends)):
        limit = ends[payload]
        batch = batches[payload]
        batch[:] = -1
        batch[rows.FIRST_EVENT] = row
        at, elements, count = _read_batch_head(data, start, limit, batch)
        if row + count > len(events):
            return row + count
        first_row = row
        for _ in range(count):
            event = events[row]
            end = read_event(data, at, limit, event, hashes, hash_at, tokens, token_at)
            if end == BROKEN:
                end = skip_value(data, at, limit, limit)
                blank_event(event)
            event[rows.START] = at
            event[rows.END] = end
            at = end
            if at == BROKEN:
                break
            if event[rows.KIND] != rows.OTHER:
                hash_at += event[rows.HASH_COUNT]
                token_at += event[rows.TOKEN_COUNT]
            row += 1
        if at != BROKEN:
            at = _read_batch_tail(data, at, limit, elements, batch)
        if at != limit:
            row = first_row
        _end_batch(at == limit, events[first_row:row], batch, found)
        start = limit
    return row


@inlined
def _end_batch(
    is_whole: bool, events: NDArray[np.int64], batch: NDArray[np.int64], found: NDArray[np.int64]
) -> None:
    """Counts what was read of a batch: its events, or that it is broken."""
    if not is_whole:
        found[rows.BROKEN_BATCHES] += 1
    for number in range(len(events)):
        found[events[number, rows.KIND]] += 1
    batch[rows.STATUS] = rows.OK if is_whole else rows.BROKEN_BATCH
    batch[rows.EVENT_COUNT] = len(events)


@inlined
def _read_batch_head(
    data: NDArray[np.uint8], at: int, limit: int, batch: NDArray[np.int64]
) -> tuple[int, int, int]:
    """Where the first event begins, or BROKEN; how many elements the batch and the list of events have."""
    at, elements = read_array(data, at, limit)
    if at == BROKEN or elements < 2:
        return BROKEN, 0, 0
    at, batch[rows.TS_BITS] = _read_time(data, at, limit)
    if at == BROKEN:
        return BROKEN, 0, 0
    at, count = read_array(data, at, limit)
    if at == BROKEN or count > MAX_EVENTS:
        return BROKEN, 0, 0
    return at, elements, count


@inlined
def _read_time(data: NDArray[np.uint8], at: int, limit: int) -> tuple[int, int]:
    """A number's end, or BROKEN, and its bits as a float64."""
    if at < limit and data[at] == FLOAT64 and limit - at > 8:
        return at + 9, as_int(eight_bytes(data, at + 1))
    if at < limit and data[at] == FLOAT32 and limit - at > 4:
        return at + 5, _float_bits(float(np.uint32(big_endian(data, at + 1, limit, 4)).view(np.float32)))
    end, bits, negative = read_number(data, at, limit)
    return end, _float_bits(float(np.int64(bits)) if negative else float(bits))


@inlined
def _float_bits(number: float) -> int:
    return int(np.float64(number).view(np.int64))


@inlined
def _read_batch_tail(
    data: NDArray[np.uint8], at: int, limit: int, elements: int, batch: NDArray[np.int64]
) -> int:
    """What follows the events: the rank, then anything. Returns its end, or BROKEN."""
    if elements < 3:
        return at
    if at < limit and data[at] == NIL:
        at += 1
    else:
        at, bits, negative = read_number(data, at, limit)
        if at == BROKEN:
            return BROKEN
        if not negative:
            # Beyond 2**63 it wraps to less than nothing, as which it is none.
            batch[rows.RANK] = max(np.int64(-1), np.int64(bits))
    for _ in range(elements - 3):
        at = skip_value(data, at, limit, limit)
        if at == BROKEN:
            return BROKEN
    return at
