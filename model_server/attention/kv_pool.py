"""The KV pool, and the plain descriptions of a step that engine, models and attention backends share.

The pool has keys and values by plane, block, head, token and element; as they are, or as 8-bit floats. A slot
is block * block_tokens + offset; a plane serves one layer of each group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model_server.shapes import AttentionShape, KvGroupSpec

Numbers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Memory for the KV of all layers."""

    groups: tuple[KvGroupSpec, ...]  # of the layers; each has a block table of its own in every span
    num_blocks: int  # blocks in the pool, shared by all groups
    block_tokens: int  # tokens in one block

    @property
    def num_planes(self) -> int:
        """Layers that one block holds."""
        return max(len(group.layers) for group in self.groups)

    def places(self) -> dict[int, tuple[int, int]]:
        """Return (group, plane) of each layer."""
        return {
            layer: (index, plane)
            for index, group in enumerate(self.groups)
            for plane, layer in enumerate(group.layers)
        }


class Span(msgspec.Struct, frozen=True, gc=False):
    """One sequence's part of a flat token batch."""

    start: int  # tokens of the sequence whose KV is in the pool already
    length: int  # tokens in this batch, the next ones of the sequence
    # Per KV group, the sequence's blocks, long enough for all of its tokens.
    block_tables: Sequence[Sequence[int]]

    @property
    def stop(self) -> int:
        """Tokens of the sequence once the batch is computed."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class View:
    """Inputs that the layers of one group and one window share: they read the same blocks."""

    group: int
    window: int | None

    def first_position(self, position: int) -> int:
        """Return the first position that a token sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window)


@dataclass(frozen=True, slots=True)
class StepMeta:
    """One step as a backend has laid it out; the same for all layers."""

    positions: Tensor  # int64 [tokens], each token's place in its sequence


class Attention(Protocol):
    """The KV pool of all layers, and attention over it."""

    def prepare(self, spans: Sequence[Span]) -> StepMeta:
        """Lay out one step.

        Args:
            spans: In the order of the flat batch. Single tokens that follow one another are attended
                together: put them first, by rising context length.
        """

    def store(self, layer: int, key: Tensor, value: Tensor, meta: StepMeta) -> None:
        """Write the KV of all tokens of the step; must come before `attend` of the same layer.

        Args:
            key: [tokens, kv_heads, head_dim], rotated.
            value: The same shape.
        """

    def attend(self, query: Tensor, layer: int, meta: StepMeta) -> Tensor:
        """Attend causally, each token to its own sequence and within the layer's window.

        Args:
            query: [tokens, heads, head_dim], rotated.

        Returns:
            [tokens, heads * head_dim].
        """

    def block_tensors(self) -> Sequence[Tensor]:
        """Return all that the pool keeps, [planes, num_blocks, ...] each; a block is a row of each plane."""


def positions_of(spans: Sequence[Span]) -> Numbers:
    """Return the place of each token in its sequence, int64 [tokens]."""
    return np.array([position for span in spans for position in range(span.start, span.stop)], np.int64)


def slots_of(spans: Sequence[Span], positions: Numbers, group: int, block_tokens: int) -> Numbers:
    """Return where the KV of each token goes: block * block_tokens + offset, int64 [tokens]."""
    blocks: list[int] = []
    for span in spans:
        table = span.block_tables[group]
        if span.length == 1:
            blocks.append(table[span.start // block_tokens])
        else:
            blocks.extend([table[position // block_tokens] for position in range(span.start, span.stop)])
    return np.array(blocks, np.int64) * block_tokens + positions % block_tokens


def reads_of(view: View, spans: Sequence[Span], block_tokens: int) -> tuple[Numbers, Numbers, Numbers]:
    """Return the blocks that spans of one token read, [spans, most blocks] padded with block 0, and bounds.

    The bounds are the first position that each sees and the one behind its last, [spans], counted from its
    first block.
    """
    first_seen = [view.first_position(span.start) for span in spans]
    first = [position // block_tokens for position in first_seen]
    last = [span.start // block_tokens + 1 for span in spans]
    table = np.zeros((len(spans), max(map(int.__sub__, last, first))), np.int64)
    for row, span, begin, end in zip(table, spans, first, last, strict=True):
        row[: end - begin] = span.block_tables[view.group][begin:end]
    skipped = np.array(first, np.int64) * block_tokens
    return table, np.array(first_seen) - skipped, np.array([span.stop for span in spans]) - skipped


def to_device(numbers: object, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Make an index tensor from Python numbers or a numpy array."""
    return torch.as_tensor(numbers, dtype=dtype).to(device)


_FP8 = torch.float8_e4m3fn  # 4 bits of exponent, 3 of mantissa
_LARGEST = 448.0
_SMALLEST_SCALE = 2.0**-60  # of blocks that hold zeros alone


@dataclass(frozen=True, slots=True)
class Write:
    """Where the tokens of one step go."""

    # int64 [tokens * kv_heads], rows of a plane seen as [blocks * kv_heads * block_tokens, head_dim].
    rows: Tensor


@dataclass(frozen=True, slots=True)
class Fp8Write(Write):
    """The same, with what scales depend on."""

    blocks: Tensor  # int64 [touched], the blocks that are written to
    touched: Tensor  # int64 [tokens], the place in `blocks` of each token's block
    continued: Tensor  # int64, places in `blocks` of those that hold earlier tokens of their sequence


class KvPool:
    """Keys and values in the type that the model computes in."""

    stored_dtype: torch.dtype | None = None  # None: the model's

    def __init__(
        self, shape: AttentionShape, layout: KvLayout, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._size = (2 * layout.num_planes, layout.num_blocks, shape.kv_heads)
        self._num_planes = layout.num_planes
        self._kv_heads = shape.kv_heads
        self._block_tokens = layout.block_tokens
        self._dtype = dtype
        self._device = device
        # Zeros, not garbage: masked positions are multiplied by 0, which a NaN would survive.
        size = *self._size, layout.block_tokens, shape.head_dim
        self._content = torch.zeros(size, dtype=self.stored_dtype or dtype, device=device)

    def plane(self, plane: int) -> tuple[Tensor, Tensor]:
        """Return a plane's keys and values as they are stored, [blocks, kv_heads, block_tokens, head_dim]."""
        return self._content[plane], self._content[self._num_planes + plane]

    def plan_write(self, slots: Numbers) -> Write:
        block, offset = np.divmod(slots, self._block_tokens)
        rows = (block[:, None] * self._kv_heads + np.arange(self._kv_heads)) * self._block_tokens
        return Write(to_device((rows + offset[:, None]).ravel(), self._device))

    def write(self, plane: int, key: Tensor, value: Tensor, plan: Write) -> None:
        """Write [tokens, kv_heads, head_dim] of keys and values."""
        self._write(plane, key, plan)
        self._write(self._num_planes + plane, value, plan)

    def plan_read(self, block_ids: Numbers) -> Tensor:
        """Return the rows that reading [sequences, blocks] block ids takes: head by head, blocks in order."""
        heads = np.arange(self._kv_heads)[:, None]
        return to_device((block_ids[:, None, :] * self._kv_heads + heads).ravel(), self._device)

    def read(self, plane: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Copy blocks of keys and of values: [rows, block_tokens, head_dim] each, in the model's type."""
        return self._read(plane, rows), self._read(self._num_planes + plane, rows)

    def block_tensors(self) -> list[Tensor]:
        return [self._content]

    def _write(self, row: int, new: Tensor, plan: Write) -> None:
        self._content[row].view(-1, new.shape[-1]).index_copy_(0, plan.rows, new.reshape(-1, new.shape[-1]))

    def _read(self, row: int, rows: Tensor) -> Tensor:
        # Whole blocks by index_select: advanced indexing takes twenty times as long on a CPU.
        return self._content[row].flatten(0, 1).index_select(0, rows)


class Fp8KvPool(KvPool):
    """Keys and values as scaled 8-bit floats, half the bytes of 16-bit ones.

    Each block has, per head, a scale for its keys and one for its values; a number is content * scale.
    Scales are powers of two: one that has to grow while its block fills moves exponents, and rounds nothing
    again but numbers too small for the new range.
    """

    stored_dtype = _FP8

    def __init__(
        self, shape: AttentionShape, layout: KvLayout, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(shape, layout, dtype, device)
        self._scales = torch.full(self._size, _SMALLEST_SCALE, dtype=torch.float32, device=device)

    def plan_write(self, slots: Numbers) -> Fp8Write:
        """Lay out the writes of one step; a block written from its first slot on forgets what it held."""
        block, offset = np.divmod(slots, self._block_tokens)
        blocks, touched = np.unique(block, return_inverse=True)
        continued = np.flatnonzero(~np.isin(blocks, block[offset == 0]))
        places = [to_device(numbers, self._device) for numbers in (blocks, touched, continued)]
        return Fp8Write(super().plan_write(slots).rows, *places)

    def block_tensors(self) -> list[Tensor]:
        return [self._content, self._scales]

    def _write(self, row: int, new: Tensor, plan: Write) -> None:
        assert isinstance(plan, Fp8Write)
        new = new.float()
        wanted = torch.full((len(plan.blocks), new.shape[1]), _SMALLEST_SCALE, device=new.device)
        scales = _scale_of(new.abs().amax(dim=-1))
        wanted.scatter_reduce_(0, plan.touched[:, None].expand_as(scales), scales, "amax")
        if len(plan.continued):
            self._rescale(row, wanted, plan)
        self._scales[row].index_copy_(0, plan.blocks, wanted)
        scaled = (new / wanted.index_select(0, plan.touched)[..., None]).to(_FP8)
        # Copied as bytes: indexing is not defined for 8-bit floats on every device.
        flat = self._content[row].view(torch.uint8).view(-1, new.shape[-1])
        flat.index_copy_(0, plan.rows, scaled.view(torch.uint8).view(-1, new.shape[-1]))

    def _rescale(self, row: int, wanted: Tensor, plan: Fp8Write) -> None:
        """Raise `wanted` to the scales that the continued blocks have, or bring their content to `wanted`."""
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


def _scale_of(largest: Tensor) -> Tensor:
    """Return the least power of two that brings numbers up to `largest` into the range."""
    return torch.exp2(torch.ceil(torch.log2(largest / _LARGEST))).clamp_(min=_SMALLEST_SCALE)
