"""The KV pool in 8-bit floats (e4m3: 4 bits of exponent, 3 of mantissa), half the bytes of a 16-bit one.

In and out: as `KvPool`, in the model's own type. Each block has, per head, a scale for its keys and one for
its values. Scales are powers of two: one that has to grow while its block fills moves exponents, and rounds
nothing again but numbers too small for the new range.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model_server.attention.batch import KvLayout, Numbers, to_device
from model_server.attention.kv_pool import block_rows, head_rows
from model_server.shapes import AttentionShape

_FP8 = torch.float8_e4m3fn
_LARGEST = 448.0
_SMALLEST_SCALE = 2.0**-60  # of blocks that hold zeros alone


@dataclass(frozen=True, slots=True)
class Fp8Write:
    """Where the tokens of one step go.

    Attributes:
        rows: int64 [tokens * kv_heads], as `SlotWrite.rows`.
        blocks: int64 [touched], the blocks that are written to.
        touched: int64 [tokens], the place in `blocks` of each token's block.
        continued: int64, places in `blocks` of those that hold earlier tokens of their sequence.
    """

    rows: Tensor
    blocks: Tensor
    touched: Tensor
    continued: Tensor


@dataclass(frozen=True, slots=True)
class _Plane:
    """One plane's keys or values.

    Attributes:
        content: float8 [blocks, kv_heads, block_tokens, head_dim].
        scales: float32 [blocks, kv_heads]; a number is content * scale.
    """

    content: Tensor
    scales: Tensor


class Fp8KvPool:
    """Keys and values as scaled 8-bit floats."""

    def __init__(
        self, shape: AttentionShape, layout: KvLayout, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = (2 * layout.num_planes, layout.num_blocks, shape.kv_heads)
        self._content = torch.zeros((*size, layout.block_tokens, shape.head_dim), dtype=_FP8, device=device)
        self._scales = torch.full(size, _SMALLEST_SCALE, dtype=torch.float32, device=device)
        planes = [_Plane(*both) for both in zip(self._content, self._scales, strict=True)]
        self._keys, self._values = planes[: layout.num_planes], planes[layout.num_planes :]
        self._kv_heads = shape.kv_heads
        self._device = device
        self._block_tokens = layout.block_tokens
        self._dtype = dtype

    def plan_write(self, slots: Numbers) -> Fp8Write:
        """Lay out the writes of one step; a block written from its first slot on forgets what it held."""
        written, offsets = (part.tolist() for part in np.divmod(slots, self._block_tokens))
        places: dict[int, int] = {}
        touched = [places.setdefault(block, len(places)) for block in written]
        fresh = {block for block, offset in zip(written, offsets, strict=True) if offset == 0}
        device = self._device
        return Fp8Write(
            rows=to_device(head_rows(slots, self._kv_heads, self._block_tokens), device),
            blocks=to_device(list(places), device),
            touched=to_device(touched, device),
            continued=to_device([place for block, place in places.items() if block not in fresh], device),
        )

    def write(self, plane: int, key: Tensor, value: Tensor, plan: Fp8Write) -> None:
        """Write [tokens, kv_heads, head_dim] of keys and values."""
        self._write_one(self._keys[plane], key.float(), plan)
        self._write_one(self._values[plane], value.float(), plan)

    def plan_read(self, block_ids: Numbers) -> Tensor:
        """Return the rows that reading [sequences, blocks] block ids takes: head by head, blocks in order."""
        return to_device(block_rows(block_ids, self._kv_heads), self._device)

    def read_keys(self, plane: int, rows: Tensor) -> Tensor:
        """Copy blocks of keys: [rows, block_tokens, head_dim]."""
        return self._read_one(self._keys[plane], rows)

    def read_values(self, plane: int, rows: Tensor) -> Tensor:
        """Copy blocks of values: [rows, block_tokens, head_dim]."""
        return self._read_one(self._values[plane], rows)

    def plan_sum(self, block_ids: Numbers) -> Tensor:
        """Return what `sum_values` takes for [sequences, blocks] block ids."""
        return self.plan_read(block_ids)

    def sum_values(self, plane: int, weights: Tensor, plan: Tensor) -> Tensor:
        """Return weighted sums of values, as `KvPool.sum_values`."""
        values = self.read_values(plane, plan)
        return torch.bmm(weights, values.view(len(weights), -1, values.shape[-1]))

    def block_tensors(self) -> list[Tensor]:
        """Return all that is kept, [planes, blocks, ...] each."""
        return [self._content, self._scales]

    def _write_one(self, plane: _Plane, new: Tensor, plan: Fp8Write) -> None:
        wanted = torch.full((len(plan.blocks), new.shape[1]), _SMALLEST_SCALE, device=new.device)
        scales = _scale_of(new.abs().amax(dim=-1))
        wanted.scatter_reduce_(0, plan.touched[:, None].expand_as(scales), scales, "amax")
        if len(plan.continued):
            self._rescale(plane, wanted, plan)
        plane.scales.index_copy_(0, plan.blocks, wanted)
        scaled = (new / wanted.index_select(0, plan.touched)[..., None]).to(_FP8)
        # Copied as bytes: indexing is not defined for 8-bit floats on every device.
        flat = plane.content.view(torch.uint8).view(-1, new.shape[-1])
        flat.index_copy_(0, plan.rows, scaled.view(torch.uint8).view(-1, new.shape[-1]))

    def _rescale(self, plane: _Plane, wanted: Tensor, plan: Fp8Write) -> None:
        """Raise `wanted` to the scales that the continued blocks have, or bring their content to `wanted`."""
        blocks = plan.blocks.index_select(0, plan.continued)
        old = plane.scales.index_select(0, blocks)
        new = torch.maximum(old, wanted.index_select(0, plan.continued))
        wanted.index_copy_(0, plan.continued, new)
        stored = plane.content.view(torch.uint8)
        content = stored.index_select(0, blocks).view(_FP8).float()
        moved = (content * (old / new)[..., None, None]).to(_FP8)
        stored.index_copy_(0, blocks, moved.view(torch.uint8))

    def _read_one(self, plane: _Plane, rows: Tensor) -> Tensor:
        content = plane.content.view(torch.uint8).flatten(0, 1).index_select(0, rows).view(_FP8)
        scales = plane.scales.flatten().index_select(0, rows).to(self._dtype)
        return content.to(self._dtype) * scales[:, None, None]


def _scale_of(largest: Tensor) -> Tensor:
    """Return the least power of two that brings numbers up to `largest` into the range."""
    return torch.exp2(torch.ceil(torch.log2(largest / _LARGEST))).clamp_(min=_SMALLEST_SCALE)
