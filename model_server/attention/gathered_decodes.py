"""Attention of single tokens with plain torch on any device: gather their blocks, then multiply.

In: queries, a pool, and where each sequence's blocks are. Out: attention outputs. It knows neither prefills
nor weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from model_server.attention.batch import KvLayout, Span, View, reads_of, to_device
from model_server.attention.fp8_pool import Fp8KvPool
from model_server.attention.kv_pool import KvPool
from model_server.shapes import AttentionShape

# Keys that are gathered in one call: they should still be in the processor's cache when they are read.
_GATHERED_BYTES = 8 << 20
_HIDDEN, _SEEN = np.float32("-inf"), np.float32(0.0)


@dataclass(frozen=True, slots=True)
class _Call:
    """Sequences with about as many blocks to read, attended in one padded call.

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


class GatheredDecodes:
    """Attends single tokens to the keys and values of a pool."""

    def __init__(
        self,
        shape: AttentionShape,
        layout: KvLayout,
        dtype: torch.dtype,
        device: torch.device,
        pool: KvPool | Fp8KvPool,
    ) -> None:
        self._shape = shape
        self._block_tokens = layout.block_tokens
        self._device = device
        self._pool = pool
        block_bytes = shape.kv_heads * layout.block_tokens * shape.head_dim * dtype.itemsize
        self._gathered_blocks = _GATHERED_BYTES // block_bytes

    def plan(self, view: View, spans: Sequence[Span], rows: Sequence[int]) -> list[_Call]:
        """Lay out one step.

        Args:
            view: Of the layers.
            spans: Of one token each.
            rows: Where each is in the flat batch.
        """
        calls: list[_Call] = []
        sizes = [self._padding_class(view, span) for span in spans]
        # Neighbours in the batch: their rows grow as their places do.
        groups = [(size, row - place) for place, (size, row) in enumerate(zip(sizes, rows, strict=True))]
        for (size, _), members in groupby(range(len(spans)), key=groups.__getitem__):
            places = list(members)
            at_once = max(1, self._gathered_blocks >> size)
            for first in range(0, len(places), at_once):
                some = places[first : first + at_once]
                calls.append(self._call(view, [spans[place] for place in some], rows[some[0]]))
        return calls

    def attend(self, query: Tensor, plane: int, plan: Sequence[_Call], output: Tensor) -> None:
        """Attend, and write the outputs of the plan's rows.

        Args:
            query: [tokens, heads, head_dim].
            plane: Of the layer.
            plan: Of the step.
            output: [tokens, heads, head_dim].
        """
        kv_heads, head_dim = self._shape.kv_heads, self._shape.head_dim
        for call in plan:
            # Heads that share a KV head become rows of one query: expanding K and V takes ten times as long.
            rows = query[call.rows].reshape(-1, self._shape.heads // kv_heads, head_dim)
            # In parts: torch's fused kernel takes twice as long on a CPU where rows are this few.
            key = self._pool.read_keys(plane, call.blocks).view(len(rows), -1, head_dim)
            scores = torch.bmm(rows, key.transpose(1, 2)).view(-1, kv_heads, rows.shape[1], key.shape[1])
            weights = torch.add(call.mask, scores, alpha=self._shape.scale).softmax(dim=-1).to(query.dtype)
            sums = self._pool.sum_values(plane, weights.flatten(0, 1), call.sums)
            output[call.rows] = sums.view(-1, self._shape.heads, head_dim)

    def _padding_class(self, view: View, span: Span) -> int:
        """Return the bit length of about how many blocks a token reads."""
        seen = span.stop if view.window is None else min(span.stop, view.window)
        return (1 + seen // self._block_tokens).bit_length()

    def _call(self, view: View, spans: Sequence[Span], first_row: int) -> _Call:
        table, begins, stops = reads_of(view, spans, self._block_tokens)
        read = np.arange(table.shape[1] * self._block_tokens)
        hidden = read >= stops[:, None]
        if view.window is not None:
            hidden |= read < begins[:, None]
        mask = np.where(hidden, _HIDDEN, _SEEN)
        return _Call(
            rows=slice(first_row, first_row + len(spans)),
            blocks=self._pool.plan_read(table),
            sums=self._pool.plan_sum(table),
            mask=to_device(mask, self._device, torch.float32)[:, None, None, :],
        )
