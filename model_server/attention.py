"""Attention over the paged KV pool with plain torch: gather pages, then scaled dot product attention.

In: queries, keys and values of a flat token batch, and where each sequence's blocks are. Out: attention
outputs. Knows neither requests nor weights. Another backend joins by having the same three methods.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional

# Query rows per call: few enough that little of the masked half is computed, many enough to fill the cores.
_TILE_ROWS = 256


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's part of a flat token batch.

    Attributes:
        start: Tokens of the sequence whose KV is in the pool already.
        length: Tokens in this batch, the next ones of the sequence.
        block_ids: Its block table, long enough for all of them.
    """

    start: int
    length: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one token each and contexts of similar length, attended in one padded call.

    Attributes:
        rows: Their tokens in the flat batch.
        block_ids: int64 [sequences * blocks]; padded with block 0.
        mask: [sequences, 1, 1, blocks * block_tokens]; 0 where a token attends, else -inf.
    """

    rows: slice
    block_ids: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """A sequence with several tokens.

    Attributes:
        rows: Its tokens in the flat batch.
        block_ids: int64 [blocks].
        context: Tokens of the sequence up to and including the last one of the batch.
    """

    rows: slice
    block_ids: Tensor
    context: int


@dataclass(frozen=True, slots=True)
class AttentionMeta:
    """Where the tokens of one step are; the same for all layers.

    Attributes:
        positions: int64 [tokens], each token's place in its sequence.
        slots: int64 [tokens], where its KV goes: block * block_tokens + offset.
        decodes: Groups of single tokens.
        prefills: Everything else.
    """

    positions: Tensor
    slots: Tensor
    decodes: Sequence[DecodeGroup]
    prefills: Sequence[PrefillSpan]


class SdpaAttention:
    """The KV pool of all layers, and attention over it on any torch device.

    Attributes:
        keys: Per layer [num_blocks, block_tokens, kv_heads, head_dim].
        values: The same.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_tokens: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks, block_tokens, kv_heads, head_dim)
        # Zeros, not garbage: masked positions are multiplied by 0, which a NaN would survive.
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self._block_tokens = block_tokens
        self._kv_heads = kv_heads
        self._head_dim = head_dim
        self._dtype = dtype
        self._device = device
        self._causal = torch.empty((_TILE_ROWS, 0), dtype=dtype, device=device)

    def prepare(self, spans: Sequence[Span]) -> AttentionMeta:
        """Lay out one step.

        Args:
            spans: In the order of the flat batch. Single tokens that follow one another are attended
                together: put them first, by rising context length.
        """
        positions: list[int] = []
        slots: list[int] = []
        decodes: list[DecodeGroup] = []
        prefills: list[PrefillSpan] = []
        for _, group in groupby(spans, key=self._group_of):
            members = list(group)
            first_row = len(positions)
            for span in members:
                positions.extend(range(span.start, span.start + span.length))
                slots.extend(self._slots(span))
            if members[0].length == 1:
                decodes.append(self._decode_group(members, first_row))
                continue
            row = first_row
            for span in members:
                prefills.append(self._prefill_span(span, row))
                row += span.length
        return AttentionMeta(self._indices(positions), self._indices(slots), decodes, prefills)

    def store(self, layer: int, key: Tensor, value: Tensor, meta: AttentionMeta) -> None:
        """Write the KV of all tokens of the step; must come before `attend` of the same layer.

        Args:
            layer: Index of the layer.
            key: [tokens, kv_heads, head_dim], rotated.
            value: The same shape.
            meta: Of this step.
        """
        self.keys[layer].view(-1, self._kv_heads, self._head_dim).index_copy_(0, meta.slots, key)
        self.values[layer].view(-1, self._kv_heads, self._head_dim).index_copy_(0, meta.slots, value)

    def attend(self, query: Tensor, layer: int, meta: AttentionMeta) -> Tensor:
        """Attend causally, each token to its own sequence.

        Args:
            query: [tokens, heads, head_dim], rotated.
            layer: Index of the layer.
            meta: Of this step.

        Returns:
            [tokens, heads * head_dim].
        """
        # Heads that share a KV head become rows of one query: expanding K and V instead is ten times slower.
        query = query.view(query.shape[0], self._kv_heads, -1, self._head_dim)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for group in meta.decodes:
            self._attend_decodes(query, layer, group, output)
        for span in meta.prefills:
            self._attend_prefill(query, layer, span, output)
        return output.flatten(1)

    def _attend_decodes(self, query: Tensor, layer: int, group: DecodeGroup, output: Tensor) -> None:
        sequences = group.mask.shape[0]
        key, value = (
            pages.view(sequences, -1, self._kv_heads, self._head_dim).transpose(1, 2)
            for pages in self._gather(layer, group.block_ids)
        )
        output[group.rows] = functional.scaled_dot_product_attention(
            query[group.rows], key, value, attn_mask=group.mask
        )

    def _attend_prefill(self, query: Tensor, layer: int, span: PrefillSpan, output: Tensor) -> None:
        key, value = (pages.transpose(0, 1) for pages in self._gather(layer, span.block_ids))
        for start in range(span.rows.start, span.rows.stop, _TILE_ROWS):
            stop = min(start + _TILE_ROWS, span.rows.stop)
            context = span.context - (span.rows.stop - stop)
            # [group, kv_heads, rows, head_dim]: all heads of a group see one K and V, without a copy.
            tile = query[start:stop].permute(2, 1, 0, 3)
            attended = functional.scaled_dot_product_attention(
                tile,
                key[:, :context].expand(tile.shape[0], -1, -1, -1),
                value[:, :context].expand(tile.shape[0], -1, -1, -1),
                attn_mask=self._causal_mask(stop - start, context),
            )
            output[start:stop] = attended.permute(2, 1, 0, 3)

    def _gather(self, layer: int, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Copy pages of K and V together as [tokens, kv_heads, head_dim]."""
        # index_select on whole blocks: advanced indexing takes twenty times as long on a CPU.
        key = self.keys[layer].index_select(0, block_ids).flatten(0, 1)
        value = self.values[layer].index_select(0, block_ids).flatten(0, 1)
        return key, value

    def _causal_mask(self, rows: int, columns: int) -> Tensor:
        """Return the additive mask of the last `rows` of `columns` tokens: a corner of one shared mask."""
        width = self._causal.shape[1]
        if width < columns:
            width = max(columns, 2 * width, 1024)
            blocked = torch.full((_TILE_ROWS, width), float("-inf"), dtype=self._dtype, device=self._device)
            self._causal = blocked.triu(width - _TILE_ROWS + 1)
        return self._causal[_TILE_ROWS - rows :, width - columns :]

    def _group_of(self, span: Span) -> int:
        """Return what single tokens must share to be padded together: their block count's bit length."""
        return self._blocks(span).bit_length() if span.length == 1 else 0

    def _decode_group(self, spans: Sequence[Span], first_row: int) -> DecodeGroup:
        blocks = max(map(self._blocks, spans))
        padded = [[*span.block_ids[:blocks], *[0] * (blocks - len(span.block_ids))] for span in spans]
        contexts = self._indices([span.start + 1 for span in spans])
        offsets = torch.arange(blocks * self._block_tokens, device=self._device)
        mask = torch.zeros((len(spans), offsets.shape[0]), dtype=self._dtype, device=self._device)
        mask.masked_fill_(offsets >= contexts[:, None], float("-inf"))
        return DecodeGroup(
            rows=slice(first_row, first_row + len(spans)),
            block_ids=self._indices(padded).flatten(),
            mask=mask[:, None, None, :],
        )

    def _prefill_span(self, span: Span, first_row: int) -> PrefillSpan:
        return PrefillSpan(
            rows=slice(first_row, first_row + span.length),
            block_ids=self._indices(span.block_ids[: self._blocks(span)]),
            context=span.start + span.length,
        )

    def _blocks(self, span: Span) -> int:
        return -(-(span.start + span.length) // self._block_tokens)

    def _slots(self, span: Span) -> list[int]:
        size = self._block_tokens
        return [
            span.block_ids[position // size] * size + position % size
            for position in range(span.start, span.start + span.length)
        ]

    def _indices(self, numbers: Sequence[object]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(self._device)
