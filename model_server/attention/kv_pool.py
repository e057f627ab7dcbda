"""Paged KV pool, and the interface of attention backends.

The pool stores keys and values by plane, block, head, token and element, in the model's type or as 8-bit
floats. A slot is block * block_tokens + offset. A plane stores one layer of each KV cache group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model_server.attention.heads import HeadNorms, Rotation
from model_server.shapes.shape import AttentionShape, KvGroupSpec

Numbers: TypeAlias = npt.NDArray[np.int64]
# Takes numbers of a step, and returns their tensor on the device: filled at once, or with the next upload.
Upload: TypeAlias = Callable[[npt.NDArray[Any]], Tensor]


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Layout of the KV pool."""

    groups: tuple[KvGroupSpec, ...]  # KV cache groups; spans have a block table per group
    num_blocks: int  # blocks of the pool, shared by all groups
    block_tokens: int  # tokens per block

    @property
    def num_planes(self) -> int:
        """Number of layers that one block stores."""
        return max(len(group.layers) for group in self.groups)

    def places(self) -> dict[int, tuple[int, int]]:
        """Return (group, plane) by layer."""
        return {
            layer: (index, plane)
            for index, group in enumerate(self.groups)
            for plane, layer in enumerate(group.layers)
        }


class Span(msgspec.Struct, frozen=True, gc=False):
    """Consecutive tokens of one sequence in a token batch."""

    start: int  # tokens before the span, whose KV is in the pool
    length: int  # tokens of the span
    # Blocks of all its tokens, int32, per KV cache group.
    block_tables: Sequence[Sequence[int]] | npt.NDArray[np.int32]

    @property
    def stop(self) -> int:
        """Position after the last token of the span."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class View:
    """Group and window of layers that read the same blocks."""

    group: int
    window: int | None

    def first_position(self, position: int) -> int:
        """Return the first position that the token at `position` attends to."""
        return 0 if self.window is None else max(0, position + 1 - self.window)


@dataclass(frozen=True, slots=True)
class StepMeta:
    """Layout of one step, shared by all layers."""

    positions: Tensor  # int64 [tokens], positions in their sequences


class Attention(Protocol):
    """KV pool of all layers, with attention over it."""

    is_capturable: bool  # whether steps upload and allocate nothing by their numbers after `prepare`

    def prepare(self, spans: Sequence[Span], upload: Upload | None = None) -> StepMeta:
        """Return the layout of one step; `upload` moves its numbers to the device, by default at once.

        Single tokens must come first; for speed, by ascending context length.
        """

    def rotate_and_store(
        self, layer: int, projected: Tensor, rotation: Rotation, norms: HeadNorms | None, meta: StepMeta
    ) -> Tensor:
        """Write the KV of all tokens of the step, and return the rotated queries, [tokens, heads, head_dim].

        Call it before `attend` of the same layer.

        Args:
            layer: Layer of the model.
            projected: [tokens, heads + 2 * kv_heads, head_dim]: queries, keys and values, not rotated.
            rotation: Angles of the tokens.
            norms: Norms of the heads, applied before the rotation; None: there are none.
            meta: Layout of the step.
        """

    def attend(self, query: Tensor, layer: int, meta: StepMeta) -> Tensor:
        """Return causal attention of each token over its sequence, within the layer's window.

        Args:
            query: [tokens, heads, head_dim], rotated.

        Returns:
            [tokens, heads * head_dim].
        """

    def block_tensors(self) -> Sequence[Tensor]:
        """Return the tensors of the pool, [planes, num_blocks, ...] each."""


def positions_of(spans: Sequence[Span]) -> Numbers:
    """Return the position of each token in its sequence, int64 [tokens]."""
    return np.array([position for span in spans for position in range(span.start, span.stop)], np.int64)


def slots_of(spans: Sequence[Span], positions: Numbers, group: int, block_tokens: int) -> Numbers:
    """Return the slot of each token, int64 [tokens]."""
    blocks = np.empty(len(positions), np.int64)
    first = 0
    for span in spans:
        table, last = span.block_tables[group], first + span.length
        if span.length == 1:
            blocks[first] = table[span.start // block_tokens]
        else:
            blocks[first:last] = np.asarray(table)[positions[first:last] // block_tokens]
        first = last
    return blocks * block_tokens + positions % block_tokens


def reads_of(view: View, spans: Sequence[Span], block_tokens: int) -> tuple[Numbers, Numbers, Numbers]:
    """Return the blocks and positions that the tokens of each span attend to.

    Returns:
        Block ids [spans, blocks], padded with block 0; first position and end position, [spans] each, counted
        from the start of the first block.
    """
    first_read = [view.first_position(span.start) for span in spans]
    first = [position // block_tokens for position in first_read]
    last = [-(-span.stop // block_tokens) for span in spans]
    table = np.zeros((len(spans), max(map(int.__sub__, last, first))), np.int64)
    for row, span, begin, end in zip(table, spans, first, last, strict=True):
        row[: end - begin] = span.block_tables[view.group][begin:end]
    skipped = np.array(first, np.int64) * block_tokens
    return table, np.array(first_read) - skipped, np.array([span.stop for span in spans]) - skipped


def to_device(numbers: object, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return a tensor of numbers on a device."""
    return torch.as_tensor(numbers, dtype=dtype).to(device)


_FP8 = torch.float8_e4m3fn  # 4 bits of exponent, 3 of mantissa
_LARGEST = 448.0
_SMALLEST_SCALE = 2.0**-60  # of blocks with zeros only


@dataclass(frozen=True, slots=True)
class Write:
    """Destinations of the tokens of one step."""

    # int64 [tokens * kv_heads], rows of a plane seen as [blocks * kv_heads * block_tokens, head_dim].
    rows: Tensor


@dataclass(frozen=True, slots=True)
class Fp8Write(Write):
    """Destinations of the tokens of one step, with the blocks whose scales may change."""

    blocks: Tensor  # int64 [touched], written blocks
    touched: Tensor  # int64 [tokens], index in `blocks` of each token's block
    continued: Tensor  # int64, indices in `blocks` of blocks that keep earlier tokens


class KvPool:
    """Pool of keys and values in the model's type."""

    stored_dtype: torch.dtype | None = None  # None: the model's type

    def __init__(
        self, shape: AttentionShape, layout: KvLayout, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._size = (2 * layout.num_planes, layout.num_blocks, shape.kv_heads)
        self._num_planes = layout.num_planes
        self._kv_heads = shape.kv_heads
        self._block_tokens = layout.block_tokens
        self._dtype = dtype
        self._device = device
        # Initialized with zeros: masked positions are multiplied by 0, and NaN * 0 is NaN.
        size = *self._size, layout.block_tokens, shape.head_dim
        self._content = torch.zeros(size, dtype=self.stored_dtype or dtype, device=device)

    def plane(self, plane: int) -> tuple[Tensor, Tensor]:
        """Return stored keys and values of a plane, [blocks, kv_heads, block_tokens, head_dim] each."""
        return self._content[plane], self._content[self._num_planes + plane]

    def plan_write(self, slots: Numbers) -> Write:
        block, offset = np.divmod(slots, self._block_tokens)
        rows = (block[:, None] * self._kv_heads + np.arange(self._kv_heads)) * self._block_tokens
        return Write(to_device((rows + offset[:, None]).ravel(), self._device))

    def write(self, plane: int, key: Tensor, value: Tensor, plan: Write) -> None:
        """Write keys and values, [tokens, kv_heads, head_dim] each, to a plane."""
        self._write(plane, key, plan)
        self._write(self._num_planes + plane, value, plan)

    def plan_read(self, block_ids: Numbers) -> Tensor:
        """Return the rows that `read` needs for block ids [sequences, blocks], by sequence and head."""
        heads = np.arange(self._kv_heads)[:, None]
        return to_device((block_ids[:, None, :] * self._kv_heads + heads).ravel(), self._device)

    def read(self, plane: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of keys and values, [rows, block_tokens, head_dim] each, in the model's type."""
        return self._read(plane, rows), self._read(self._num_planes + plane, rows)

    def block_tensors(self) -> list[Tensor]:
        return [self._content]

    def _write(self, row: int, new: Tensor, plan: Write) -> None:
        self._content[row].view(-1, new.shape[-1]).index_copy_(0, plan.rows, new.reshape(-1, new.shape[-1]))

    def _read(self, row: int, rows: Tensor) -> Tensor:
        # On a CPU index_select is 20 times as fast as advanced indexing.
        return self._content[row].flatten(0, 1).index_select(0, rows)


class Fp8KvPool(KvPool):
    """Pool of keys and values as scaled 8-bit floats (e4m3).

    Each block has, per head, one scale for keys and one for values; a value is content * scale. Scales are
    powers of two, so when a scale grows while its block fills, only numbers below the new range are rounded
    again.
    """

    stored_dtype = _FP8

    def __init__(
        self, shape: AttentionShape, layout: KvLayout, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(shape, layout, dtype, device)
        self._scales = torch.full(self._size, _SMALLEST_SCALE, dtype=torch.float32, device=device)

    def scales(self, plane: int) -> tuple[Tensor, Tensor]:
        """Return the scales of keys and values of a plane, float32 [blocks, kv_heads] each."""
        return self._scales[plane], self._scales[self._num_planes + plane]

    def plan_write(self, slots: Numbers) -> Fp8Write:
        """Plan the writes of one step. A block written from its first slot is treated as empty."""
        block, offset = np.divmod(slots, self._block_tokens)
        blocks, touched = np.unique(block, return_inverse=True)
        continued = np.flatnonzero(~np.isin(blocks, block[offset == 0]))
        indices = [to_device(numbers, self._device) for numbers in (blocks, touched, continued)]
        return Fp8Write(super().plan_write(slots).rows, *indices)

    def block_tensors(self) -> list[Tensor]:
        return [self._content, self._scales]

    def _write(self, row: int, new: Tensor, plan: Write) -> None:
        assert isinstance(plan, Fp8Write)
        new = new.float()
        wanted = torch.full((len(plan.blocks), new.shape[1]), _SMALLEST_SCALE, device=new.device)
        # The smallest power of two with which the largest number of a head fits the range.
        scales = (new.abs().amax(dim=-1) / _LARGEST).log2().ceil().exp2().clamp_(min=_SMALLEST_SCALE)
        wanted.scatter_reduce_(0, plan.touched[:, None].expand_as(scales), scales, "amax")
        if len(plan.continued):
            self._rescale(row, wanted, plan)
        self._scales[row].index_copy_(0, plan.blocks, wanted)
        scaled = (new / wanted.index_select(0, plan.touched)[..., None]).to(_FP8)
        # Copied as bytes: not every device can index 8-bit floats.
        flat = self._content[row].view(torch.uint8).view(-1, new.shape[-1])
        flat.index_copy_(0, plan.rows, scaled.view(torch.uint8).view(-1, new.shape[-1]))

    def _rescale(self, row: int, wanted: Tensor, plan: Fp8Write) -> None:
        """Rescale the content of continued blocks to the larger of their old scale and `wanted`."""
        blocks = plan.blocks.index_select(0, plan.continued)
        old = self._scales[row].index_select(0, blocks)
        new = torch.maximum(old, wanted.index_select(0, plan.continued))
        wanted.index_copy_(0, plan.continued, new)
        stored = self._content[row].view(torch.uint8)
        content = stored.index_select(0, blocks).view(_FP8).float()
        moved = (content * (old / new)[..., None, None]).to(_FP8)
        stored.index_copy_(0, blocks, moved.view(torch.uint8))

    def _read(self, row: int, rows: Tensor) -> Tensor:
        content = self._content[row].view(torch.uint8).flatten(0, 1).index_select(0, rows).view(_FP8)
        scales = self._scales[row].flatten().index_select(0, rows).to(self._dtype)
        return content.to(self._dtype) * scales[:, None, None]
