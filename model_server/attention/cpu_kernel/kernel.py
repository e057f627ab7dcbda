"""Flash-decoding over a paged KV cache on a CPU: one pass over keys and values with SIMD by LLVM vectors.

Results of a sequence are bitwise independent of the other sequences and of the number of threads.
"""

import ctypes
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numba
import numpy as np
from numba import carray  # type: ignore[attr-defined]  # numba lists no names to export
from numpy.typing import NDArray

from common.jit import callback, inlined
from model_server.attention.cpu_kernel.simd import (
    LANES,
    PART,
    at,
    larger,
    largest_of,
    load,
    plus,
    pointer,
    power_of_two,
    prefetch,
    read,
    splat,
    stack,
    store,
    store_sums,
    sum_of,
    take_ticket,
    times,
    times_plus,
    write,
)

TILE_TOKENS = 64  # tokens whose softmax weights are computed together
# Scores of a query head per tile, with padding: they are written four at a time.
SCORES = TILE_TOKENS + 16
_NOTHING = np.float32("-inf")
_ANY = 1 << 40  # number of rows, not checked

_Rows: TypeAlias = NDArray[np.uint16] | NDArray[np.int16] | NDArray[np.float32]
_Floats: TypeAlias = NDArray[np.float32]
_Row: TypeAlias = np.int64 | int
_Four: TypeAlias = tuple[_Row, _Row, _Row, _Row]
_Sums: TypeAlias = tuple[Any, Any, Any, Any]


class Job(ctypes.Structure):
    """Arguments of the kernel for one layer, shared by its threads."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                "ticket",  # number of work items taken; starts at 0
                "keys",  # address of keys, [blocks, kv_heads, block_tokens, head_dim]
                "values",  # address of values, same layout
                "queries",  # address of [tokens, query_rows, head_dim]; query heads come first
                "output",  # address of [tokens, kv_heads * group, head_dim]
                "tables",  # address of block tables, int32 [sequences, width]; longest last
                "rows",  # address of batch rows, int64 [sequences]
                "begins",  # address of int64 [sequences]: first position, from the first block
                "stops",  # address of int64 [sequences]: end position
                "sequences",
                "width",  # columns of the block tables
                "kv_heads",
                "heads_at_once",  # KV heads per work item: 1 or all, which are read sequentially
                "group",  # query heads per KV head
                "head_dim",  # a multiple of 32
                "block_tokens",
                "query_rows",  # rows per token
            )
        ),
        ("scale", ctypes.c_float),  # factor of scores, which are exponents of 2
    )
    arrays: dict[str, np.ndarray]  # memory of those addresses that `PagedDecodes.plan` sets


@cache
def decode_kernel(dtype: type) -> Any:
    """Compile the kernel for a pool, queries and outputs of one of `NUMPY_TYPES`."""
    job_type = numba.from_dtype(np.dtype(Job))

    @callback(numba.void(numba.types.CPointer(job_type)))
    def attend(address: Any) -> None:
        job = carray(address, 1)[0]
        shape = _Shape(job.kv_heads, job.heads_at_once, job.group, job.head_dim, job.block_tokens)
        heads, width = shape.heads * shape.group, shape.head_dim
        scratch = _Scratch(
            queries=carray(stack(4 * heads * width), heads * width, np.float32),
            sums=carray(stack(4 * heads * width), heads * width, np.float32),
            scores=carray(stack(4 * heads * SCORES), heads * SCORES, np.float32),
            totals=carray(stack(4 * heads * LANES), heads * LANES, np.float32),
            shrinks=carray(stack(4 * heads * LANES), heads * LANES, np.float32),
            tops=carray(stack(4 * heads), heads, np.float32),
        )
        keys: _Rows = carray(pointer(job.keys), (_ANY, shape.head_dim), dtype)
        values: _Rows = carray(pointer(job.values), (_ANY, shape.head_dim), dtype)
        queries: _Rows = carray(pointer(job.queries), (_ANY, shape.head_dim), dtype)
        output: _Rows = carray(pointer(job.output), (_ANY, shape.head_dim), dtype)
        tables = carray(pointer(job.tables), (job.sequences, job.width), np.int32)
        rows = carray(pointer(job.rows), (job.sequences,), np.int64)
        begins = carray(pointer(job.begins), (job.sequences,), np.int64)
        stops = carray(pointer(job.stops), (job.sequences,), np.int64)
        divisions = shape.kv_heads // shape.heads
        part = take_ticket(address)
        while part < job.sequences * divisions:
            # Longest first: the last work items are then short, and all threads finish together.
            sequence = job.sequences - 1 - part // divisions
            first_head = part % divisions * shape.heads
            row = first_head * shape.group
            _begin(scratch, queries, rows[sequence] * job.query_rows + row, shape, job.scale)
            position, stop = begins[sequence], stops[sequence]
            while position < stop:
                count = min(TILE_TOKENS, stop - position)
                _score(scratch, keys, values, tables[sequence], position, count, first_head, shape)
                for head in range(shape.heads * shape.group):
                    _weigh(scratch, head, count)
                _sum(scratch, values, tables[sequence], position, count, first_head, shape)
                position += count
            _end(scratch, output, rows[sequence] * shape.kv_heads * shape.group + row, shape)
            part = take_ticket(address)

    return attend


class _Shape(NamedTuple):
    """Dimensions of the attention; `heads` KV heads per work item."""

    kv_heads: int
    heads: int
    group: int
    head_dim: int
    block_tokens: int


class _Scratch(NamedTuple):
    """Memory of one thread, by query head."""

    queries: _Floats  # scaled queries, [heads * head_dim]
    sums: _Floats  # weighted sums of values, [heads * head_dim]
    scores: _Floats  # scores (exponents of 2) of a tile, then its weights
    totals: _Floats  # sums of weights, one vector per head
    shrinks: _Floats  # rescaling factor of earlier weights, one vector per head
    tops: _Floats  # largest score, one number per head


@inlined
def _begin(scratch: _Scratch, queries: _Rows, first_row: _Row, shape: _Shape, scale: np.float32) -> None:
    """Load the scaled queries of a sequence, and reset the sums."""
    lanes = splat(scale)
    for head in range(shape.heads * shape.group):
        scratch.tops[head] = _NOTHING
        store(scratch.totals, head * LANES, splat(0.0))
        for first in range(0, shape.head_dim, PART):
            one, other = read(queries, first_row + head, first)
            place = head * shape.head_dim + first
            store(scratch.queries, place, times(one, lanes))
            store(scratch.queries, place + LANES, times(other, lanes))
            store(scratch.sums, place, splat(0.0))
            store(scratch.sums, place + LANES, splat(0.0))


@inlined
def _score(
    scratch: _Scratch,
    keys: _Rows,
    values: _Rows,
    table: NDArray[np.int32],
    position: int,
    count: int,
    first_head: int,
    shape: _Shape,
) -> None:
    """Compute the scores of a tile, block by block in memory order."""
    done = 0
    while done < count:
        block, offset = divmod(position + done, shape.block_tokens)
        here = min(shape.block_tokens - offset, count - done)
        for head in range(shape.heads):
            row = (table[block] * shape.kv_heads + first_head + head) * shape.block_tokens + offset
            last_row, first = row + here - 1, head * shape.group
            for token in range(0, here, 4):
                # The values of these tokens are read next.
                for ahead in range(row + token, row + token + 4):
                    for element in range(0, shape.head_dim, PART):
                        prefetch(values, ahead, element)
                _score_four(scratch, keys, row + token, last_row, first, done + token, shape)
        done += here


@inlined
def _score_four(
    scratch: _Scratch, keys: _Rows, row: _Row, last_row: _Row, first: int, token: int, shape: _Shape
) -> None:
    """Score four tokens of one block. Scores past the last token are overwritten by the next block's."""
    four = row, min(row + 1, last_row), min(row + 2, last_row), min(row + 3, last_row)
    for head in range(first, first + shape.group):
        sums = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
        for element in range(0, shape.head_dim, PART):
            sums = _score_part(scratch, keys, four, head * shape.head_dim, element, sums)
        store_sums(scratch.scores, head * SCORES + token, sums[0], sums[1], sums[2], sums[3])


@inlined
def _score_part(scratch: _Scratch, keys: _Rows, four: _Four, first: int, element: int, sums: _Sums) -> _Sums:
    """Add the products of one part of a query head with four keys to `sums`."""
    one, other = load(scratch.queries, first + element), load(scratch.queries, first + element + LANES)
    key0, key1 = read(keys, four[0], element), read(keys, four[1], element)
    key2, key3 = read(keys, four[2], element), read(keys, four[3], element)
    return (
        times_plus(other, key0[1], times_plus(one, key0[0], sums[0])),
        times_plus(other, key1[1], times_plus(one, key1[0], sums[1])),
        times_plus(other, key2[1], times_plus(one, key2[0], sums[2])),
        times_plus(other, key3[1], times_plus(one, key3[0], sums[3])),
    )


@inlined
def _weigh(scratch: _Scratch, head: int, count: int) -> None:
    """Turn the scores of a tile into weights relative to the largest score so far (online softmax)."""
    scores, first, lot = scratch.scores, head * SCORES, head * LANES
    filled = (count + LANES - 1) // LANES * LANES
    for token in range(count, filled):
        scores[first + token] = _NOTHING
    tallest = splat(scratch.tops[head])
    for token in range(0, filled, LANES):
        tallest = larger(tallest, load(scores, first + token))
    top = largest_of(tallest)
    shrink = power_of_two(splat(scratch.tops[head] - top))
    total = times(load(scratch.totals, lot), shrink)
    for token in range(0, filled, LANES):
        weight = power_of_two(plus(load(scores, first + token), splat(-top)))
        store(scores, first + token, weight)
        total = plus(total, weight)
    store(scratch.totals, lot, total)
    store(scratch.shrinks, lot, shrink)
    scratch.tops[head] = top


@inlined
def _sum(
    scratch: _Scratch,
    values: _Rows,
    table: NDArray[np.int32],
    position: int,
    count: int,
    first_head: int,
    shape: _Shape,
) -> None:
    """Add the weighted values of a tile to the sums, in the order of `_score`."""
    done = 0
    while done < count:
        block, offset = divmod(position + done, shape.block_tokens)
        here = min(shape.block_tokens - offset, count - done)
        for head in range(shape.heads * shape.group):
            kv_head = first_head + head // shape.group
            row = (table[block] * shape.kv_heads + kv_head) * shape.block_tokens + offset
            score = head * SCORES + done
            shrink = splat(1.0) if done else load(scratch.shrinks, head * LANES)
            for element in range(0, shape.head_dim, PART):
                _sum_part(scratch, values, row, here, score, head * shape.head_dim, element, shrink)
        done += here


@inlined
def _sum_part(
    scratch: _Scratch, values: _Rows, row: _Row, count: int, score: int, place: int, element: int, shrink: Any
) -> None:
    """Add the weighted values of one block's tokens to one part of a query head's sum."""
    one0 = times(load(scratch.sums, place + element), shrink)
    other0 = times(load(scratch.sums, place + element + LANES), shrink)
    one1 = other1 = one2 = other2 = one3 = other3 = splat(0.0)
    fours = count // 4 * 4
    for token in range(0, fours, 4):
        value0 = read(values, row + token, element)
        value1 = read(values, row + token + 1, element)
        value2 = read(values, row + token + 2, element)
        value3 = read(values, row + token + 3, element)
        weight = splat(at(scratch.scores, score + token))
        one0, other0 = times_plus(weight, value0[0], one0), times_plus(weight, value0[1], other0)
        weight = splat(at(scratch.scores, score + token + 1))
        one1, other1 = times_plus(weight, value1[0], one1), times_plus(weight, value1[1], other1)
        weight = splat(at(scratch.scores, score + token + 2))
        one2, other2 = times_plus(weight, value2[0], one2), times_plus(weight, value2[1], other2)
        weight = splat(at(scratch.scores, score + token + 3))
        one3, other3 = times_plus(weight, value3[0], one3), times_plus(weight, value3[1], other3)
    for token in range(fours, count):
        value0 = read(values, row + token, element)
        weight = splat(at(scratch.scores, score + token))
        one0, other0 = times_plus(weight, value0[0], one0), times_plus(weight, value0[1], other0)
    store(scratch.sums, place + element, plus(plus(one0, one1), plus(one2, one3)))
    store(scratch.sums, place + element + LANES, plus(plus(other0, other1), plus(other2, other3)))


@inlined
def _end(scratch: _Scratch, output: _Rows, first_row: _Row, shape: _Shape) -> None:
    """Write the output of a sequence: weighted sums divided by the sums of weights."""
    for head in range(shape.heads * shape.group):
        share = splat(np.float32(1.0) / sum_of(load(scratch.totals, head * LANES)))
        for first in range(0, shape.head_dim, PART):
            place = head * shape.head_dim + first
            both = times(load(scratch.sums, place), share), times(load(scratch.sums, place + LANES), share)
            write(output, first_row + head, first, both)
