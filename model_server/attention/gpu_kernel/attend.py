"""Attention over a paged KV pool in Triton: split-KV decodes, and tiled prefills.

Both read blocks in place by ragged block tables. The query heads of a KV head are the rows of one tile, so
that keys and values are read once per KV head. Softmax is online, in float32 and base 2. Prefills follow
FlashAttention-2 (arXiv 2307.08691), decodes Flash-Decoding: each program reads a part of the context, and
`_merge_parts` combines the parts by their log-sum-exps.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows of a product's left side, at least: the tensor cores' smallest tile.
_ROWS_MIN = 16
_PREFILL_ROWS = 128
_PARTS_MAX = 64
# Programs of a decode launch, at least: two for each multiprocessor of the largest cards. The interpreter
# runs one after the other.
DECODE_PROGRAMS = 1 if triton.knobs.runtime.interpret else 288


class Sequences(NamedTuple):
    """Sequences of one launch, as tensors of the device, int32."""

    starts: Tensor  # [sequences + 1], first row of each sequence in the batch, then the end
    contexts: Tensor  # [sequences], tokens of each sequence including the step's own; 0: a padding row
    tables: Tensor  # block tables, one after another
    table_starts: Tensor  # [sequences], index of each sequence's table in `tables`
    max_query: int  # maximum of rows per sequence


class Plane(NamedTuple):
    """Keys and values of one layer in the pool."""

    keys: Tensor  # [blocks, kv_heads, block_tokens, head_dim]
    values: Tensor  # same
    scales: tuple[Tensor, Tensor] | None  # float32 [blocks, kv_heads] of keys and values in 8 bits


@triton.jit
def _attend_tile(
    q, acc, total, top, at, lowest, end, positions, live, table, kv_head, scale, window,
    tables_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, kv_block, kv_stride,
    dims, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    FP8: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys and values to the running softmax of a tile of query rows."""
    key = at + tl.arange(0, TILE)
    exists = key < end
    if WINDOW:
        exists &= key >= lowest
    block = tl.load(tables_ptr + table + key // BLOCK, mask=exists, other=0).to(tl.int64)
    offsets = (block * kv_block + kv_head * kv_stride + key % BLOCK * DIM)[:, None] + dims[None, :]
    # Rows that do not exist are read as 0: what lies there might be NaN, and NaN * 0 is NaN.
    mask = exists[:, None] & (dims < DIM)[None, :]
    keys = tl.load(keys_ptr + offsets, mask=mask, other=0.0).to(q.dtype)
    scores = tl.dot(q, tl.trans(keys)) * scale
    if FP8:
        scores *= tl.load(key_scales_ptr + block * KV_HEADS + kv_head, mask=exists, other=0.0)[None, :]
    if MASKED:
        seen = (key[None, :] <= positions[:, None]) & exists[None, :] & live[:, None]
        if WINDOW:
            seen &= key[None, :] > positions[:, None] - window
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # A row that sees nothing yet: subtracting its maximum, -inf, would give NaN.
    floor = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - floor[:, None])
    shrink = tl.exp2(top - floor)
    total = total * shrink + tl.sum(weights, 1)
    if FP8:
        weights *= tl.load(value_scales_ptr + block * KV_HEADS + kv_head, mask=exists, other=0.0)[None, :]
    values = tl.load(values_ptr + offsets, mask=mask, other=0.0).to(q.dtype)
    acc = tl.dot(weights.to(q.dtype), values, acc * shrink[:, None])
    return acc, total, new_top


@triton.jit
def attend_prefills(
    query_ptr, output_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr,
    starts_ptr, contexts_ptr, tables_ptr, table_starts_ptr,
    scale, window, query_token, query_head, output_token, kv_block, kv_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr, FP8: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Attend a tile of ROWS tokens of one sequence, for one KV head. Grid: [tiles, kv_heads, sequences]."""
    sequence, kv_head = tl.program_id(2), tl.program_id(1)
    first = tl.load(starts_ptr + sequence)
    length = tl.load(starts_ptr + sequence + 1) - first
    context = tl.load(contexts_ptr + sequence)
    # The last tiles take the longest; started first, they do not end last.
    tile_start = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    if tile_start < length:
        lane, dims = tl.arange(0, LANES), tl.arange(0, PAD)
        token, head = tile_start + lane // GROUP, kv_head * GROUP + lane % GROUP
        live = (token < length) & (lane < ROWS * GROUP)
        mask = live[:, None] & (dims < DIM)[None, :]
        rows = (first + token).to(tl.int64)
        q = tl.load(
            query_ptr + (rows * query_token + head * query_head)[:, None] + dims[None, :],
            mask=mask,
            other=0.0,
        )
        positions = context - length + token
        first_position = context - length + tile_start
        end = tl.minimum(context, first_position + ROWS)
        lowest = 0
        if WINDOW:
            lowest = tl.maximum(0, first_position + 1 - window)
        begin = lowest // TILE * TILE
        top = tl.full([LANES], float("-inf"), tl.float32)
        total = tl.zeros([LANES], tl.float32)
        acc = tl.zeros([LANES, PAD], tl.float32)
        table = tl.load(table_starts_ptr + sequence)
        if not WINDOW:
            # All rows see all keys of a tile that ends at the first row's position or before.
            unmasked_end = (first_position + 1) // TILE * TILE
            for at in range(begin, unmasked_end, TILE):
                acc, total, top = _attend_tile(
                    q, acc, total, top, at, lowest, end, positions, live, table, kv_head, scale, window,
                    tables_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, kv_block, kv_stride,
                    dims, KV_HEADS, DIM, BLOCK, TILE, FP8, WINDOW, False,
                )  # fmt: skip
            begin = unmasked_end
        for at in range(begin, end, TILE):
            acc, total, top = _attend_tile(
                q, acc, total, top, at, lowest, end, positions, live, table, kv_head, scale, window,
                tables_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, kv_block, kv_stride,
                dims, KV_HEADS, DIM, BLOCK, TILE, FP8, WINDOW, True,
            )  # fmt: skip
        attended = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(
            output_ptr + (rows * output_token + head * DIM)[:, None] + dims[None, :],
            attended.to(output_ptr.dtype.element_ty),
            mask=mask,
        )


@triton.jit
def attend_decodes(
    query_ptr, output_ptr, parts_ptr, logs_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr,
    contexts_ptr, tables_ptr, table_starts_ptr,
    scale, window, query_token, query_head, output_token, kv_block, kv_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr, TILE: tl.constexpr, FP8: tl.constexpr, WINDOW: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Attend a part of the context of a single token, for one KV head. Grid: [sequences, kv_heads, PARTS]."""
    sequence, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts_ptr + sequence)
    lane, dims = tl.arange(0, LANES), tl.arange(0, PAD)
    live = lane < GROUP
    head = kv_head * GROUP + lane
    mask = live[:, None] & (dims < DIM)[None, :]
    q = tl.load(
        query_ptr + sequence.to(tl.int64) * query_token + (head * query_head)[:, None] + dims[None, :],
        mask=mask,
        other=0.0,
    )
    lowest = 0
    if WINDOW:
        lowest = tl.maximum(0, context - window)
    first = lowest // TILE * TILE
    length = tl.cdiv(tl.cdiv(context - first, PARTS), TILE) * TILE
    begin = first + part * length
    end = tl.minimum(context, begin + length)
    positions = tl.zeros([LANES], tl.int32) + context - 1
    top = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    acc = tl.zeros([LANES, PAD], tl.float32)
    table = tl.load(table_starts_ptr + sequence)
    for at in range(begin, end, TILE):
        acc, total, top = _attend_tile(
            q, acc, total, top, at, lowest, end, positions, live, table, kv_head, scale, window,
            tables_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, kv_block, kv_stride,
            dims, KV_HEADS, DIM, BLOCK, TILE, FP8, WINDOW, True,
        )  # fmt: skip
    divisor = tl.where(total > 0.0, total, 1.0)
    attended = acc / divisor[:, None]
    if PARTS == 1:
        tl.store(
            output_ptr + sequence.to(tl.int64) * output_token + (head * DIM)[:, None] + dims[None, :],
            attended.to(output_ptr.dtype.element_ty),
            mask=mask,
        )
    else:
        slot = (sequence * KV_HEADS * GROUP + head) * PARTS + part
        tl.store(parts_ptr + slot[:, None] * DIM + dims[None, :], attended, mask=mask)
        # A part without visible tokens weighs nothing.
        tl.store(logs_ptr + slot, tl.where(total > 0.0, top + tl.log2(divisor), float("-inf")), mask=live)


@triton.jit
def _merge_parts(
    parts_ptr, logs_ptr, output_ptr, output_token,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Combine the parts of one head of a token. Grid: [sequences, heads]."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    part, dims = tl.arange(0, PARTS), tl.arange(0, PAD)
    slot = (sequence * HEADS + head) * PARTS + part
    logs = tl.load(logs_ptr + slot)
    top = tl.max(logs, 0)
    weights = tl.exp2(logs - tl.where(top == float("-inf"), 0.0, top))
    parts = tl.load(parts_ptr + slot[:, None] * DIM + dims[None, :], mask=(dims < DIM)[None, :], other=0.0)
    total = tl.sum(weights, 0)
    merged = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(
        output_ptr + sequence.to(tl.int64) * output_token + head * DIM + dims,
        merged.to(output_ptr.dtype.element_ty),
        mask=dims < DIM,
    )


def run_prefills(
    query: Tensor, output: Tensor, plane: Plane, sequences: Sequences, scale: float, window: int | None
) -> None:
    """Attend sequences of several tokens each.

    Args:
        query: [tokens, heads, head_dim], rows of the whole batch; elements of a head are contiguous.
        output: [tokens, heads, head_dim], contiguous; the rows of the sequences are written.
        plane: Keys and values of the layer.
        sequences: Sequences to attend.
        scale: Factor of scores before the softmax.
        window: Sliding window in tokens; None: full attention.
    """
    _, kv_heads, block_tokens, head_dim = plane.keys.shape
    group = query.shape[1] // kv_heads
    rows, lanes = prefill_tile(group)
    grid = (triton.cdiv(sequences.max_query, rows), kv_heads, len(sequences.contexts))
    attend_prefills[grid](
        query, output, *_pool_arguments(plane, query), sequences.starts, sequences.contexts,
        sequences.tables, sequences.table_starts, scale * math.log2(math.e), window or 0,
        query.stride(0), query.stride(1), output.stride(0), plane.keys.stride(0), plane.keys.stride(1),
        kv_heads, group, head_dim, triton.next_power_of_2(head_dim), block_tokens, rows, lanes,
        FP8=plane.scales is not None, WINDOW=window is not None,
        **prefill_options(head_dim, window, query.dtype),
    )  # fmt: skip


def run_decodes(
    query: Tensor, output: Tensor, plane: Plane, sequences: Sequences, scale: float, window: int | None
) -> None:
    """Attend single tokens: row n of the batch is the token of sequence n. Arguments as `run_prefills`."""
    _, kv_heads, block_tokens, head_dim = plane.keys.shape
    heads, pad = query.shape[1], triton.next_power_of_2(head_dim)
    count = len(sequences.contexts)
    parts = decode_parts(count * kv_heads)
    kept = (count, heads, parts) if parts > 1 else (0, 0, 0)
    sums = torch.empty((*kept, head_dim), dtype=torch.float32, device=query.device)
    logs = torch.empty(kept, dtype=torch.float32, device=query.device)
    attend_decodes[(count, kv_heads, parts)](
        query, output, sums, logs, *_pool_arguments(plane, query), sequences.contexts, sequences.tables,
        sequences.table_starts, scale * math.log2(math.e), window or 0, query.stride(0), query.stride(1),
        output.stride(0), plane.keys.stride(0), plane.keys.stride(1),
        kv_heads, heads // kv_heads, head_dim, pad, block_tokens,
        max(_ROWS_MIN, triton.next_power_of_2(heads // kv_heads)),
        FP8=plane.scales is not None, WINDOW=window is not None, PARTS=parts, **decode_options(head_dim),
    )  # fmt: skip
    if parts > 1:
        _merge_parts[(count, heads)](sums, logs, output, output.stride(0), heads, head_dim, pad, parts)


def _pool_arguments(plane: Plane, unused: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return plane.keys, plane.values, *(plane.scales or (unused, unused))


def prefill_tile(group: int) -> tuple[int, int]:
    """Return the tokens of a prefill tile, and its rows: query heads of a KV head by token, padded."""
    tokens = max(1, _PREFILL_ROWS // group)
    return tokens, max(_ROWS_MIN, triton.next_power_of_2(tokens * group))


def decode_parts(programs: int) -> int:
    """Return into how many parts each context is divided, for `programs` sequences times KV heads.

    It does not depend on contexts, which a captured graph does not know.
    """
    return min(_PARTS_MAX, int(triton.next_power_of_2(triton.cdiv(DECODE_PROGRAMS, programs))))


def prefill_options(head_dim: int, window: int | None, dtype: torch.dtype) -> dict[str, int]:
    """Return the tile of keys, warps and stages of `attend_prefills`: the largest without register spills."""
    if head_dim > 128 or dtype.itemsize > 2 or (head_dim > 64 and window is not None):
        return {"TILE": 32, "num_warps": 8, "num_stages": 2}
    return {"TILE": 64, "num_warps": 8, "num_stages": 3 if head_dim <= 64 else 2}


def decode_options(head_dim: int) -> dict[str, int]:
    """Return the tile of keys, warps and stages of `attend_decodes`."""
    return {"TILE": 64 if head_dim <= 128 else 32, "num_warps": 4, "num_stages": 3 if head_dim <= 128 else 2}
