"""Attention with torch operators on any device: gather blocks, mask, softmax.

On a CPU, single tokens (decodes) can use a compiled kernel instead.
"""

from collections.abc import Sequence
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
    slots_of,
    to_device,
)
from model_server.shapes.shape import AttentionShape

# Query rows per call: a small number wastes less on masked positions, a large number uses all cores.
_TILE_ROWS = 256


@dataclass(frozen=True, slots=True)
class _Gathered:
    """Span whose blocks are gathered."""

    rows: slice  # rows of the tokens in the batch
    blocks: Tensor  # pool rows to read
    start: int  # position of the first token
    base: int  # position of the first token read


@dataclass(frozen=True, slots=True)
class _Reads:
    """Reads of the layers of one view."""

    kernel: Job | None  # single tokens of the compiled kernel; None: gathered
    gathered: Sequence[_Gathered]  # other spans


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
        for span in reads.gathered:
            self._attend_span(query, plane, span, window, output)
        return output.flatten(1)

    def block_tensors(self) -> Sequence[Tensor]:
        return self._pool.block_tensors()

    def _attend_span(
        self, query: Tensor, plane: int, call: _Gathered, window: int | None, output: Tensor
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
            # The columns that a single row reads are those that it sees.
            mask = None
            if last > first:
                mask = _causal_mask(query, range(first, last + 1), range(first_read, last + 1), window)
            attended = functional.scaled_dot_product_attention(
                tile,
                key[:, columns].expand(tile.shape[0], -1, -1, -1),
                value[:, columns].expand(tile.shape[0], -1, -1, -1),
                attn_mask=mask,
                scale=self._shape.scale,
            )
            output[start:stop] = attended.permute(2, 1, 0, 3).flatten(1, 2)

    def _reads(self, view: View, spans: Sequence[Span]) -> _Reads:
        firsts = list(accumulate((span.length for span in spans), initial=0))[:-1]
        singles = 0 if self.kernel is None else sum(span.length == 1 for span in spans)
        job = self.kernel.plan(view, spans[:singles], firsts[:singles]) if self.kernel and singles else None
        others = zip(spans[singles:], firsts[singles:], strict=True)
        return _Reads(job, [self._gathered(view, span, first) for span, first in others])

    def _gathered(self, view: View, span: Span, first_row: int) -> _Gathered:
        block_tokens = self._layout.block_tokens
        first = view.first_position(span.start) // block_tokens
        last = -(-span.stop // block_tokens)
        block_ids = np.array([span.block_tables[view.group][first:last]], dtype=np.int64)
        return _Gathered(
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
