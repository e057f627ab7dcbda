"""Attention with torch operators on any device: gather blocks, mask, softmax.

On a CPU, single tokens (decodes) can use a compiled kernel instead.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from model_server.attention.cpu_kernel.decodes import PagedDecodes
from model_server.attention.cpu_kernel.kernel import Job
from model_server.attention.heads import HeadNorms, Rotation, norm_and_rotate
from model_server.attention.kv_pool import (
    Fp8KvPool,
    KvLayout,
    KvPool,
    Span,
    StepMeta,
    Upload,
    View,
    Write,
    positions_of,
    reads_of,
    slots_of,
    to_device,
)
from model_server.shapes.shape import AttentionShape

# Query rows per call: a small number wastes less on masked positions, a large number uses all cores.
_TILE_ROWS = 256
# Bytes of keys gathered per call: on a CPU they should stay in its cache, on a GPU calls should be few.
_GATHERED_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
_MASKED, _VISIBLE = np.float32("-inf"), np.float32(0.0)


@dataclass(frozen=True, slots=True)
class _Singles:
    """Single tokens whose blocks are gathered in one call."""

    rows: Tensor  # int64, rows of the tokens in the batch
    blocks: Tensor  # pool rows to read; padded with block 0
    mask: Tensor  # float32 [sequences, 1, 1, tokens read]; 0 or -inf


@dataclass(frozen=True, slots=True)
class _Prefill:
    """Span of several tokens."""

    rows: slice  # rows of the tokens in the batch
    blocks: Tensor  # pool rows to read
    start: int  # position of the first token
    base: int  # position of the first token read


@dataclass(frozen=True, slots=True)
class _Reads:
    """Reads of the layers of one view."""

    kernel: Job | None  # single tokens of the compiled kernel; None: gathered
    singles: Sequence[_Singles]  # gathered single tokens
    prefills: Sequence[_Prefill]  # spans of several tokens


@dataclass(frozen=True, slots=True)
class SdpaMeta(StepMeta):
    """Layout of one step."""

    writes: Sequence[Write]  # per group
    reads: Sequence[_Reads]  # per view


class SdpaAttention:
    """Attention with torch operators; see `Attention`.

    With `paged`, the compiled kernel computes single tokens; raises a ValueError if it does not support the
    model.
    """

    is_capturable = False

    def __init__(
        self,
        shape: AttentionShape,
        layout: KvLayout,
        dtype: torch.dtype,
        device: torch.device,
        *,
        fp8: bool = False,
        paged: bool = False,
    ) -> None:
        if paged and fp8:
            raise ValueError("the compiled kernel does not support 8-bit pools")
        self._pool = (Fp8KvPool if fp8 else KvPool)(shape, layout, dtype, device)
        self.kernel = PagedDecodes(shape, layout, dtype, self._pool) if paged else None
        self._shape = shape
        self._layout = layout
        self._device = device
        # On a CPU, converting float16 to float32 is faster than torch's float16 products.
        is_slow = dtype == torch.float16 and device.type == "cpu"
        self._multiplied_dtype = torch.float32 if is_slow else dtype
        block_bytes = shape.kv_heads * layout.block_tokens * shape.head_dim * self._multiplied_dtype.itemsize
        self._gathered_blocks = _GATHERED_BYTES[device.type] // block_bytes
        self._places = layout.places()
        layer_views = [View(self._places[layer][0], window) for layer, window in enumerate(shape.windows)]
        self._views = list(dict.fromkeys(layer_views))
        self._view_of = [self._views.index(view) for view in layer_views]

    def prepare(self, spans: Sequence[Span], upload: Upload | None = None) -> SdpaMeta:
        positions = positions_of(spans)
        groups, block_tokens = range(len(self._layout.groups)), self._layout.block_tokens
        return SdpaMeta(
            positions=to_device(positions, self._device) if upload is None else upload(positions),
            writes=[
                self._pool.plan_write(slots_of(spans, positions, group, block_tokens)) for group in groups
            ],
            reads=[self._reads(view, spans) for view in self._views],
        )

    def store(self, layer: int, key: Tensor, value: Tensor, meta: StepMeta) -> None:
        """Write keys (rotated) and values of the step, [tokens, kv_heads, head_dim] each."""
        assert isinstance(meta, SdpaMeta)
        group, plane = self._places[layer]
        self._pool.write(plane, key, value, meta.writes[group])

    def rotate_and_store(
        self, layer: int, projected: Tensor, rotation: Rotation, norms: HeadNorms | None, meta: StepMeta
    ) -> Tensor:
        heads, both = self._shape.heads, self._shape.heads + self._shape.kv_heads
        rotated = norm_and_rotate(projected[:, :both], heads, norms, rotation)
        self.store(layer, rotated[:, heads:], projected[:, both:], meta)
        return rotated[:, :heads]

    def attend(self, query: Tensor, layer: int, meta: StepMeta) -> Tensor:
        assert isinstance(meta, SdpaMeta)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        plane, reads = self._places[layer][1], meta.reads[self._view_of[layer]]
        window = self._shape.windows[layer]
        if reads.kernel is not None:
            assert self.kernel is not None
            self.kernel.attend(query, plane, reads.kernel, output)
        for singles in reads.singles:
            self._attend_singles(query, plane, singles, output)
        for prefill in reads.prefills:
            self._attend_prefill(query, plane, prefill, window, output)
        return output.flatten(1)

    def block_tensors(self) -> Sequence[Tensor]:
        return self._pool.block_tensors()

    def _attend_singles(self, query: Tensor, plane: int, call: _Singles, output: Tensor) -> None:
        kv_heads, head_dim = self._shape.kv_heads, self._shape.head_dim
        # Query heads of a KV head become rows of one query, 10 times as fast as expanding K and V.
        rows = query.index_select(0, call.rows).reshape(len(call.rows) * kv_heads, -1, head_dim)
        rows, key, value = (
            part.view(len(rows), -1, head_dim).to(self._multiplied_dtype)
            for part in (rows, *self._pool.read(plane, call.blocks))
        )
        scores = torch.bmm(rows, key.transpose(1, 2)).unflatten(0, (-1, kv_heads))
        weights = torch.add(call.mask, scores, alpha=self._shape.scale).softmax(dim=-1).to(value.dtype)
        sums = torch.bmm(weights.flatten(0, 1), value).to(query.dtype)
        output.index_copy_(0, call.rows, sums.view(len(call.rows), -1, head_dim))

    def _attend_prefill(
        self, query: Tensor, plane: int, call: _Prefill, window: int | None, output: Tensor
    ) -> None:
        kv_heads, head_dim = self._shape.kv_heads, self._shape.head_dim
        key, value = (part.view(kv_heads, -1, head_dim) for part in self._pool.read(plane, call.blocks))
        for start in range(call.rows.start, call.rows.stop, _TILE_ROWS):
            stop = min(start + _TILE_ROWS, call.rows.stop)
            first, last = (call.start + row - call.rows.start for row in (start, stop - 1))
            first_read = 0 if window is None else max(0, first + 1 - window)
            columns = slice(first_read - call.base, last + 1 - call.base)
            # [group, kv_heads, rows, head_dim]: the query heads of a KV head share K and V without a copy.
            tile = query[start:stop].unflatten(1, (kv_heads, -1)).permute(2, 1, 0, 3)
            attended = functional.scaled_dot_product_attention(
                tile,
                key[:, columns].expand(tile.shape[0], -1, -1, -1),
                value[:, columns].expand(tile.shape[0], -1, -1, -1),
                attn_mask=_causal_mask(query, range(first, last + 1), range(first_read, last + 1), window),
                scale=self._shape.scale,
            )
            output[start:stop] = attended.permute(2, 1, 0, 3).flatten(1, 2)

    def _reads(self, view: View, spans: Sequence[Span]) -> _Reads:
        firsts = list(accumulate((span.length for span in spans), initial=0))[:-1]
        singles = [span for span in spans if span.length == 1]
        rows = [row for row, span in zip(firsts, spans, strict=True) if span.length == 1]
        longer = [(span, row) for row, span in zip(firsts, spans, strict=True) if span.length > 1]
        prefills = [self._prefill(view, span, row) for span, row in longer]
        if self.kernel is not None and singles:
            return _Reads(self.kernel.plan(view, singles, rows), (), prefills)
        return _Reads(None, list(self._singles(view, singles, rows)), prefills)

    def _singles(self, view: View, spans: Sequence[Span], rows: Sequence[int]) -> Iterator[_Singles]:
        block_tokens = self._layout.block_tokens
        blocks = [-(-span.stop // block_tokens) for span in spans]
        first = 0
        while first < len(spans):
            # One call takes as many sequences as fit. Ascending contexts need little padding.
            stop = first + 1
            while stop < len(spans) and (stop + 1 - first) * blocks[stop] <= self._gathered_blocks:
                stop += 1
            table, begins, stops = reads_of(view, spans[first:stop], block_tokens)
            read = np.arange(table.shape[1] * block_tokens)
            hidden = (read >= stops[:, None]) | (read < begins[:, None])
            mask = np.where(hidden, _MASKED, _VISIBLE)
            yield _Singles(
                to_device(rows[first:stop], self._device),
                self._pool.plan_read(table),
                to_device(mask, self._device, torch.float32)[:, None, None, :],
            )
            first = stop

    def _prefill(self, view: View, span: Span, first_row: int) -> _Prefill:
        block_tokens = self._layout.block_tokens
        first = view.first_position(span.start) // block_tokens
        last = -(-span.stop // block_tokens)
        block_ids = np.array([span.block_tables[view.group][first:last]], dtype=np.int64)
        return _Prefill(
            rows=slice(first_row, first_row + span.length),
            blocks=self._pool.plan_read(block_ids),
            start=span.start,
            base=first * block_tokens,
        )


def _causal_mask(like: Tensor, rows: range, columns: range, window: int | None) -> Tensor:
    """Return a mask [rows, columns]: 0 where the row's position attends to the column's, else -inf."""
    row = torch.arange(rows.start, rows.stop, device=like.device)[:, None]
    column = torch.arange(columns.start, columns.stop, device=like.device)
    hidden = column > row
    if window is not None:
        hidden |= column <= row - window
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))
