"""Rotation of queries and keys, and the writes of keys and values to the paged pool, in one Triton kernel.

It replaces, per layer, two norms, two rotations, a concatenation and two indexed copies. In 8-bit pools it
keeps one scale per block and KV head, as `Fp8KvPool` does: powers of two, which grow while a block fills.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_server.attention.gpu_kernel.attend import Plane, Sequences
from model_server.attention.heads import HeadNorms, Rotation

_FP8_LARGEST = tl.constexpr(448.0)
_SCALE_MIN = tl.constexpr(2.0**-60)  # that of `Fp8KvPool`
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_NORMAL_MIN = tl.constexpr(2.0**-6)  # smallest normal number of e4m3; smaller ones are multiples of 2 ** -9
_ROUNDER = tl.constexpr(1.5 * 2.0**14)  # float32 numbers of this size are multiples of 2 ** -9


@triton.jit
def _power_of_two_above(number):
    """Return the smallest power of two that is at least `number`, a positive normal float32."""
    bits = number.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _to_fp8(numbers, kind: tl.constexpr):
    """Round to the nearest 8-bit float, ties to even."""
    if _INTERPRETED:
        # The interpreter's conversion loses carries into the exponent, so give it numbers without rounding.
        bits = numbers.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        numbers = tl.where(tl.abs(numbers) < _NORMAL_MIN, (numbers + _ROUNDER) - _ROUNDER, rounded)
    return numbers.to(kind)


@triton.jit
def _rotated(low, high, norm_ptr, cosine_ptr, sine_ptr, angles, dims, mask, epsilon, offset,
             DIM: tl.constexpr, NORMS: tl.constexpr):  # fmt: skip
    """Return both halves of normalised and rotated heads, float32 [rows, half]."""
    half: tl.constexpr = DIM // 2
    if NORMS:
        square = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        factor = tl.rsqrt(square / DIM + epsilon)[:, None]
        there = dims < half
        low *= factor * (tl.load(norm_ptr + dims, mask=there, other=0.0).to(tl.float32) + offset)[None, :]
        high *= (
            factor * (tl.load(norm_ptr + half + dims, mask=there, other=0.0).to(tl.float32) + offset)[None, :]
        )
    at = angles[:, None] * DIM + dims[None, :]
    cosine = tl.load(cosine_ptr + at, mask=mask, other=0.0).to(tl.float32)
    # The second half of the signed sines is positive.
    sine = tl.load(sine_ptr + half + at, mask=mask, other=0.0).to(tl.float32)
    return low * cosine - high * sine, high * cosine + low * sine


@triton.jit
def _store_fp8(pool_ptr, scales_ptr, low, high, live, block, head, fresh, offsets, dims, kv_block, kv_stride,
               KV_HEADS: tl.constexpr, DIM: tl.constexpr):  # fmt: skip
    """Write rows of one block in 8 bits; if `fresh` is false, scale its earlier rows to the new scale."""
    half: tl.constexpr = DIM // 2
    largest = tl.max(tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1), 0)
    scale = tl.maximum(_power_of_two_above(tl.maximum(largest / _FP8_LARGEST, _SCALE_MIN)), _SCALE_MIN)
    rows = pool_ptr + block * kv_block + head * kv_stride + (offsets * DIM)[:, None] + dims[None, :]
    inside = (dims < half)[None, :]
    if not fresh:
        old = tl.load(scales_ptr + block * KV_HEADS + head)
        scale = tl.maximum(scale, old)
        if scale > old:
            # Rows before the step's own; later rows hold nothing.
            earlier = (offsets < tl.min(tl.where(live, offsets, 1 << 30), 0))[:, None] & inside
            first = tl.load(rows, mask=earlier, other=0.0).to(tl.float32) * (old / scale)
            second = tl.load(rows + half, mask=earlier, other=0.0).to(tl.float32) * (old / scale)
            tl.store(rows, _to_fp8(first, pool_ptr.dtype.element_ty), mask=earlier)
            tl.store(rows + half, _to_fp8(second, pool_ptr.dtype.element_ty), mask=earlier)
    written = live[:, None] & inside
    tl.store(rows, _to_fp8(low / scale, pool_ptr.dtype.element_ty), mask=written)
    tl.store(rows + half, _to_fp8(high / scale, pool_ptr.dtype.element_ty), mask=written)
    tl.store(scales_ptr + block * KV_HEADS + head, scale)


@triton.jit
def rotate_and_store(
    projected_ptr, query_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr,
    cosine_ptr, sine_ptr, norm_ptr,
    starts_ptr, contexts_ptr, tables_ptr, table_starts_ptr,
    epsilon, offset, projected_token, kv_block, kv_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, FP8: tl.constexpr, NORMS: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Handle one head of the step's tokens in one block. Grid: [blocks, sequences, heads + kv_heads]."""
    sequence, head = tl.program_id(1), tl.program_id(2)
    half: tl.constexpr = DIM // 2
    first = tl.load(starts_ptr + sequence)
    length = tl.load(starts_ptr + sequence + 1) - first
    context = tl.load(contexts_ptr + sequence)
    start = context - length
    index = tl.maximum(start, 0) // BLOCK + tl.program_id(0)
    if index * BLOCK < context:  # not of padding rows, whose context is 0
        row = tl.arange(0, ROWS)
        # Of a single token in a pool without scales, only its own row is needed.
        position = context - 1 + row if SINGLE else index * BLOCK + row
        live = (position >= start) & (position < context) & (SINGLE | (row < BLOCK))
        token = (first + position - start).to(tl.int64)
        dims = tl.arange(0, PAD)
        mask = live[:, None] & (dims < half)[None, :]
        source = projected_ptr + (token * projected_token + head * DIM)[:, None] + dims[None, :]
        low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(source + half, mask=mask, other=0.0).to(tl.float32)
        kv_head = head - HEADS
        norm = norm_ptr + (kv_head >= 0).to(tl.int32) * DIM
        low, high = _rotated(
            low, high, norm, cosine_ptr, sine_ptr, token, dims, mask, epsilon, offset, DIM, NORMS
        )
        if kv_head < 0:
            target = query_ptr + ((token * HEADS + head) * DIM)[:, None] + dims[None, :]
            tl.store(target, low.to(query_ptr.dtype.element_ty), mask=mask)
            tl.store(target + half, high.to(query_ptr.dtype.element_ty), mask=mask)
        else:
            value_source = source + KV_HEADS * DIM
            value_low = tl.load(value_source, mask=mask, other=0.0).to(tl.float32)
            value_high = tl.load(value_source + half, mask=mask, other=0.0).to(tl.float32)
            block = tl.load(tables_ptr + tl.load(table_starts_ptr + sequence) + index).to(tl.int64)
            offsets = position - index * BLOCK
            if FP8:
                fresh = start <= index * BLOCK
                _store_fp8(
                    keys_ptr, key_scales_ptr, low, high, live, block, kv_head, fresh, offsets, dims,
                    kv_block, kv_stride, KV_HEADS, DIM,
                )  # fmt: skip
                _store_fp8(
                    values_ptr, value_scales_ptr, value_low, value_high, live, block, kv_head, fresh, offsets,
                    dims, kv_block, kv_stride, KV_HEADS, DIM,
                )  # fmt: skip
            else:
                at = block * kv_block + kv_head * kv_stride + (offsets * DIM)[:, None] + dims[None, :]
                kind = keys_ptr.dtype.element_ty
                tl.store(keys_ptr + at, low.to(kind), mask=mask)
                tl.store(keys_ptr + half + at, high.to(kind), mask=mask)
                tl.store(values_ptr + at, value_low.to(kind), mask=mask)
                tl.store(values_ptr + half + at, value_high.to(kind), mask=mask)


def run_rotate_and_store(
    projected: Tensor, plane: Plane, sequences: Sequences, rotation: Rotation, norms: HeadNorms | None
) -> Tensor:
    """Write the step's keys and values to the pool, and return its rotated queries.

    Args:
        projected: [tokens, heads + 2 * kv_heads, head_dim]: queries, keys and values before the rotation.
        plane: Keys and values of the layer; written.
        sequences: All sequences of the step.
        rotation: Angles of the tokens.
        norms: Norms of the heads before the rotation; None: there are none.

    Returns:
        [tokens, heads, head_dim].
    """
    _, kv_heads, block_tokens, head_dim = plane.keys.shape
    heads = projected.shape[1] - 2 * kv_heads
    query = torch.empty((projected.shape[0], heads, head_dim), dtype=projected.dtype, device=projected.device)
    single = sequences.max_query == 1
    blocks = 1 if single else (sequences.max_query - 2) // block_tokens + 2
    alone = single and plane.scales is None
    weights, epsilon, offset = norms or (projected, 0.0, 0.0)
    key_scales, value_scales = plane.scales or (projected, projected)
    rotate_and_store[(blocks, len(sequences.contexts), heads + kv_heads)](
        projected, query, plane.keys, plane.values, key_scales, value_scales, rotation.cosine, rotation.sine,
        weights, sequences.starts, sequences.contexts, sequences.tables, sequences.table_starts,
        epsilon, offset, projected.stride(0), plane.keys.stride(0), plane.keys.stride(1),
        heads, kv_heads, head_dim, triton.next_power_of_2(head_dim // 2), block_tokens,
        1 if alone else triton.next_power_of_2(block_tokens),
        FP8=plane.scales is not None, NORMS=norms is not None, SINGLE=alone,
    )  # fmt: skip
    return query
