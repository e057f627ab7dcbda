"""Attention with plain torch on any device: gather blocks, then scaled dot product attention.

In: queries, keys and values of a flat token batch, and where each sequence's blocks are. Out: attention
outputs. Knows neither requests nor weights. On a CPU single tokens can be left to a compiled kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from model_server.attention.batch import KvLayout, Span, View, positions_of, slots_of, to_device
from model_server.attention.fp8_pool import Fp8KvPool, Fp8Write
from model_server.attention.gathered_decodes import GatheredDecodes
from model_server.attention.kv_pool import KvPool, SlotWrite
from model_server.attention.masks import CausalMasks
from model_server.attention.paged_decodes import PagedDecodes
from model_server.shapes import AttentionShape

# Query rows per call: few enough that little of the masked half is computed, many enough to fill the cores.
_TILE_ROWS = 256


class _Decodes(Protocol):
    """How single tokens are attended."""

    def plan(self, view: View, spans: Sequence[Span], rows: Sequence[int]) -> Any: ...

    def attend(self, query: Tensor, plane: int, plan: Any, output: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A sequence with several tokens.

    Attributes:
        rows: Its tokens in the flat batch.
        blocks: What the pool reads for it.
        start: Position of its first token in the batch.
        base: Position of the first token that is read.
    """

    rows: slice
    blocks: Tensor
    start: int
    base: int


@dataclass(frozen=True, slots=True)
class _Reads:
    """What one view's layers read.

    Attributes:
        decodes: The plan of all sequences with one token, or None.
        prefills: The others.
    """

    decodes: Any
    prefills: Sequence[_Prefill]


@dataclass(frozen=True, slots=True)
class SdpaMeta:
    """Where the tokens of one step are; the same for all layers.

    Attributes:
        positions: int64 [tokens], each token's place in its sequence.
        writes: Per group, where the KV goes.
        reads: Per view.
    """

    positions: Tensor
    writes: Sequence[SlotWrite | Fp8Write]
    reads: Sequence[_Reads]


class SdpaAttention:
    """The KV pool of all layers, and attention over it; see `Attention` for the methods.

    Args:
        shape: Of the model.
        layout: Of the pool.
        dtype: What the model computes in.
        device: Where the pool goes.
        fp8: Keep keys and values in 8-bit floats.
        paged: Have the blocks of single tokens read where they lie, where `paged_fault` finds none.

    Raises:
        ValueError: `paged` was asked for and cannot be had.
    """

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
        self._pool = (Fp8KvPool if fp8 else KvPool)(shape, layout, dtype, device)
        self._decodes: _Decodes
        if paged:
            if isinstance(self._pool, Fp8KvPool):
                raise ValueError("8-bit pools are gathered: the kernel does not read them")
            self._decodes = PagedDecodes(shape, layout, dtype, self._pool)
        else:
            self._decodes = GatheredDecodes(shape, layout, dtype, device, self._pool)
        self._shape = shape
        self._layout = layout
        self._device = device
        self._places = layout.places()
        layer_views = [View(self._places[layer][0], window) for layer, window in enumerate(shape.windows)]
        self._views = list(dict.fromkeys(layer_views))
        self._view_of = [self._views.index(view) for view in layer_views]
        self._masks = CausalMasks(_TILE_ROWS, dtype, device)

    def prepare(self, spans: Sequence[Span]) -> SdpaMeta:
        """Lay out one step."""
        positions = positions_of(spans)
        slots = [
            slots_of(spans, positions, group, self._layout.block_tokens)
            for group in range(len(self._layout.groups))
        ]
        return SdpaMeta(
            positions=to_device(positions, self._device),
            writes=[self._pool.plan_write(group_slots) for group_slots in slots],
            reads=[self._reads(view, spans) for view in self._views],
        )

    def store(self, layer: int, key: Tensor, value: Tensor, meta: SdpaMeta) -> None:
        """Write the KV of all tokens of the step."""
        group, plane = self._places[layer]
        self._pool.write(plane, key, value, meta.writes[group])  # type: ignore[arg-type]

    def attend(self, query: Tensor, layer: int, meta: SdpaMeta) -> Tensor:
        """Attend causally, each token to its own sequence and within the layer's window."""
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        plane, reads = self._places[layer][1], meta.reads[self._view_of[layer]]
        if reads.decodes is not None:
            self._decodes.attend(query, plane, reads.decodes, output)
        for prefill in reads.prefills:
            self._attend_prefill(query, plane, prefill, self._shape.windows[layer], output)
        return output.flatten(1)

    def block_tensors(self) -> Sequence[Tensor]:
        """Return everything that the pool keeps, [planes, num_blocks, ...] each."""
        return self._pool.block_tensors()

    def _attend_prefill(
        self, query: Tensor, plane: int, call: _Prefill, window: int | None, output: Tensor
    ) -> None:
        kv_heads, head_dim = self._shape.kv_heads, self._shape.head_dim
        key = self._pool.read_keys(plane, call.blocks).view(kv_heads, -1, head_dim)
        value = self._pool.read_values(plane, call.blocks).view(kv_heads, -1, head_dim)
        for start in range(call.rows.start, call.rows.stop, _TILE_ROWS):
            stop = min(start + _TILE_ROWS, call.rows.stop)
            first, last = (call.start + row - call.rows.start for row in (start, stop - 1))
            seen_from = 0 if window is None else max(0, first + 1 - window)
            columns = slice(seen_from - call.base, last + 1 - call.base)
            # [group, kv_heads, rows, head_dim]: all heads of a group see one K and V, without a copy.
            tile = query[start:stop].unflatten(1, (kv_heads, -1)).permute(2, 1, 0, 3)
            attended = functional.scaled_dot_product_attention(
                tile,
                key[:, columns].expand(tile.shape[0], -1, -1, -1),
                value[:, columns].expand(tile.shape[0], -1, -1, -1),
                attn_mask=self._masks.corner(stop - start, columns.stop - columns.start, window),
                scale=self._shape.scale,
            )
            output[start:stop] = attended.permute(2, 1, 0, 3).flatten(1, 2)

    def _reads(self, view: View, spans: Sequence[Span]) -> _Reads:
        singles: list[Span] = []
        rows: list[int] = []
        prefills: list[_Prefill] = []
        row = 0
        for span in spans:
            if span.length == 1:
                singles.append(span)
                rows.append(row)
            else:
                prefills.append(self._prefill(view, span, row))
            row += span.length
        return _Reads(self._decodes.plan(view, singles, rows) if singles else None, prefills)

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
