"""Attention with plain torch on any device: gather blocks, then scaled dot product attention.

In: queries, keys and values of a flat token batch, and where each sequence's blocks are. Out: attention
outputs. Knows neither requests nor weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from model_server.attention.batch import KvLayout, Span, positions_of, slots_of, to_device
from model_server.attention.fp8_pool import Fp8KvPool, Fp8Write
from model_server.attention.kv_pool import KvPool, SlotWrite
from model_server.attention.masks import CausalMasks
from model_server.shapes import AttentionShape

# Query rows per call: few enough that little of the masked half is computed, many enough to fill the cores.
_TILE_ROWS = 256
# Keys that are gathered for single tokens in one call: they should still be in the processor's cache when
# they are read.
_GATHERED_BYTES = 8 << 20
_HIDDEN, _SEEN = np.float32("-inf"), np.float32(0.0)


@dataclass(frozen=True, slots=True)
class _View:
    """What the layers of one group and one window share: they read the same blocks by the same masks."""

    group: int
    window: int | None

    def first_position(self, position: int) -> int:
        """Return the first position that a token sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window)


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Sequences with one token each and about as many blocks to read, attended in one padded call.

    Attributes:
        rows: Their tokens in the flat batch.
        blocks: Whose keys the pool reads for them; padded with block 0.
        sums: What the pool sums their values by.
        mask: float32 [sequences, 1, 1, padded tokens]; 0 where a token attends, else -inf.
    """

    rows: slice
    blocks: Tensor
    sums: Tensor
    mask: Tensor


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
class SdpaMeta:
    """Where the tokens of one step are; the same for all layers.

    Attributes:
        positions: int64 [tokens], each token's place in its sequence.
        writes: Per group, where the KV goes.
        calls: Per view, what is attended together.
    """

    positions: Tensor
    writes: Sequence[SlotWrite | Fp8Write]
    calls: Sequence[Sequence[_Decodes | _Prefill]]


class SdpaAttention:
    """The KV pool of all layers, and attention over it; see `Attention` for the methods."""

    def __init__(
        self,
        shape: AttentionShape,
        layout: KvLayout,
        dtype: torch.dtype,
        device: torch.device,
        *,
        fp8: bool = False,
    ) -> None:
        self._pool = (Fp8KvPool if fp8 else KvPool)(shape, layout, dtype, device)
        self._shape = shape
        self._layout = layout
        self._device = device
        self._places = layout.places()
        layer_views = [_View(self._places[layer][0], window) for layer, window in enumerate(shape.windows)]
        self._views = list(dict.fromkeys(layer_views))
        self._view_of = [self._views.index(view) for view in layer_views]
        block_bytes = shape.kv_heads * layout.block_tokens * shape.head_dim * dtype.itemsize
        self._gathered_blocks = _GATHERED_BYTES // block_bytes
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
            calls=[self._calls(view, spans) for view in self._views],
        )

    def store(self, layer: int, key: Tensor, value: Tensor, meta: SdpaMeta) -> None:
        """Write the KV of all tokens of the step."""
        group, plane = self._places[layer]
        self._pool.write(plane, key, value, meta.writes[group])  # type: ignore[arg-type]

    def attend(self, query: Tensor, layer: int, meta: SdpaMeta) -> Tensor:
        """Attend causally, each token to its own sequence and within the layer's window."""
        # Heads that share a KV head become rows of one query: expanding K and V instead is ten times slower.
        query = query.reshape(query.shape[0], self._shape.kv_heads, -1, self._shape.head_dim).contiguous()
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        plane = self._places[layer][1]
        for call in meta.calls[self._view_of[layer]]:
            if isinstance(call, _Decodes):
                self._attend_decodes(query, plane, call, output)
            else:
                self._attend_prefill(query, plane, call, self._shape.windows[layer], output)
        return output.flatten(1)

    def block_tensors(self) -> Sequence[Tensor]:
        """Return everything that the pool keeps, [planes, num_blocks, ...] each."""
        return self._pool.block_tensors()

    def _attend_decodes(self, query: Tensor, plane: int, call: _Decodes, output: Tensor) -> None:
        query = query[call.rows]
        sequences, kv_heads, group, head_dim = query.shape
        # In parts: torch's fused kernel takes twice as long on a CPU where rows are this few.
        key = self._pool.read_keys(plane, call.blocks).view(sequences * kv_heads, -1, head_dim)
        scores = torch.bmm(query.view(-1, group, head_dim), key.transpose(1, 2))
        scores = scores.view(sequences, kv_heads, group, -1)
        weights = torch.add(call.mask, scores, alpha=self._shape.scale).softmax(dim=-1).to(query.dtype)
        output[call.rows] = self._pool.sum_values(plane, weights.flatten(0, 1), call.sums).view(query.shape)

    def _attend_prefill(
        self, query: Tensor, plane: int, call: _Prefill, window: int | None, output: Tensor
    ) -> None:
        kv_heads, head_dim = query.shape[1], query.shape[3]
        key = self._pool.read_keys(plane, call.blocks).view(kv_heads, -1, head_dim)
        value = self._pool.read_values(plane, call.blocks).view(kv_heads, -1, head_dim)
        for start in range(call.rows.start, call.rows.stop, _TILE_ROWS):
            stop = min(start + _TILE_ROWS, call.rows.stop)
            first, last = (call.start + row - call.rows.start for row in (start, stop - 1))
            seen_from = 0 if window is None else max(0, first + 1 - window)
            columns = slice(seen_from - call.base, last + 1 - call.base)
            # [group, kv_heads, rows, head_dim]: all heads of a group see one K and V, without a copy.
            tile = query[start:stop].permute(2, 1, 0, 3)
            attended = functional.scaled_dot_product_attention(
                tile,
                key[:, columns].expand(tile.shape[0], -1, -1, -1),
                value[:, columns].expand(tile.shape[0], -1, -1, -1),
                attn_mask=self._masks.corner(stop - start, columns.stop - columns.start, window),
                scale=self._shape.scale,
            )
            output[start:stop] = attended.permute(2, 1, 0, 3)

    def _calls(self, view: _View, spans: Sequence[Span]) -> list[_Decodes | _Prefill]:
        calls: list[_Decodes | _Prefill] = []
        row = 0
        for size, members in groupby(spans, key=lambda span: self._padding_class(view, span)):
            group = list(members)
            at_once = max(1, self._gathered_blocks >> size) if size else 1
            for first in range(0, len(group), at_once):
                some = group[first : first + at_once]
                calls.append(self._decodes(view, some, row) if size else self._prefill(view, some[0], row))
                row += sum(span.length for span in some)
        return calls

    def _padding_class(self, view: _View, span: Span) -> int:
        """Return the bit length of about how many blocks a single token reads; 0 for longer spans."""
        if span.length > 1:
            return 0
        seen = span.stop if view.window is None else min(span.stop, view.window)
        return (1 + seen // self._layout.block_tokens).bit_length()

    def _decodes(self, view: _View, spans: Sequence[Span], first_row: int) -> _Decodes:
        block_tokens = self._layout.block_tokens
        seen_from = [view.first_position(span.start) for span in spans]
        first = [position // block_tokens for position in seen_from]
        last = [span.start // block_tokens + 1 for span in spans]
        width = max(map(int.__sub__, last, first))
        table = np.zeros((len(spans), width), dtype=np.int64)
        for row, span, begin, end in zip(table, spans, first, last, strict=True):
            row[: end - begin] = span.block_tables[view.group][begin:end]
        # Positions counted from the first one that is read.
        bounds = np.array([seen_from, [span.start for span in spans]]) - np.array(first) * block_tokens
        read = np.arange(width * block_tokens)
        hidden = read > bounds[1][:, None]
        if view.window is not None:
            hidden |= read < bounds[0][:, None]
        mask = np.where(hidden, _HIDDEN, _SEEN)
        return _Decodes(
            rows=slice(first_row, first_row + len(spans)),
            blocks=self._pool.plan_read(table),
            sums=self._pool.plan_sum(table),
            mask=to_device(mask, self._device, torch.float32)[:, None, None, :],
        )

    def _prefill(self, view: _View, span: Span, first_row: int) -> _Prefill:
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
