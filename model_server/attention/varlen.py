"""Attention on CUDA by torch's variable-length kernel, which reads blocks in place.

One call per layer computes prefills and decodes together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from model_server.attention.kv_pool import (
    KvLayout,
    Span,
    StepMeta,
    View,
    positions_of,
    reads_of,
    slots_of,
    to_device,
)
from model_server.shapes.shape import AttentionShape, single_group

_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class VarlenMeta(StepMeta):
    """Layout of one step."""

    slots: Sequence[Tensor]  # per group, int64 [tokens]: block * block_tokens + offset
    block_tables: Sequence[Tensor]  # per group, int32 [sequences, blocks], padded with block 0
    query_starts: Tensor  # int32 [sequences + 1], first row of each sequence, then the end
    contexts: Tensor  # int32 [sequences], context length of each sequence
    max_query: int  # maximum of rows per sequence
    max_context: int  # maximum of `contexts`


class VarlenAttention:
    """Attention by torch's variable-length kernel; see `Attention`."""

    def __init__(
        self, shape: AttentionShape, layout: KvLayout, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = (layout.num_blocks, layout.block_tokens, shape.kv_heads, shape.head_dim)
        self._pool = torch.zeros((2 * layout.num_planes, *size), dtype=dtype, device=device)
        planes = self._pool.unbind()
        self._keys, self._values = planes[: layout.num_planes], planes[layout.num_planes :]
        self._shape = shape
        self._layout = layout
        self._device = device
        self._places = layout.places()

    def prepare(self, spans: Sequence[Span]) -> VarlenMeta:
        block_tokens, groups = self._layout.block_tokens, range(len(self._layout.groups))
        positions = positions_of(spans)
        return VarlenMeta(
            positions=self._indices(positions),
            slots=[self._indices(slots_of(spans, positions, group, block_tokens)) for group in groups],
            block_tables=[
                self._indices(reads_of(View(group, None), spans, block_tokens)[0], torch.int32)
                for group in groups
            ],
            query_starts=self._indices([0, *accumulate(span.length for span in spans)], torch.int32),
            contexts=self._indices([span.stop for span in spans], torch.int32),
            max_query=max(span.length for span in spans),
            max_context=max(span.stop for span in spans),
        )

    def store(self, layer: int, key: Tensor, value: Tensor, meta: StepMeta) -> None:
        assert isinstance(meta, VarlenMeta)
        group, plane = self._places[layer]
        for pool, new in ((self._keys[plane], key), (self._values[plane], value)):
            pool.flatten(0, 1).index_copy_(0, meta.slots[group], new)

    def attend(self, query: Tensor, layer: int, meta: StepMeta) -> Tensor:
        assert isinstance(meta, VarlenMeta)
        group, plane = self._places[layer]
        window = self._shape.windows[layer]
        attended = varlen_attn(
            query,
            self._keys[plane],
            self._values[plane],
            meta.query_starts,
            None,
            meta.max_query,
            meta.max_context,
            scale=self._shape.scale,
            # The kernel's window excludes the query's own token.
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=self._shape.heads != self._shape.kv_heads,
            seqused_k=meta.contexts,
            block_table=meta.block_tables[group],
        )
        assert isinstance(attended, Tensor)
        return attended.flatten(1)

    def block_tensors(self) -> Sequence[Tensor]:
        return [self._pool]

    def _indices(self, numbers: object, dtype: torch.dtype = torch.int64) -> Tensor:
        return to_device(numbers, self._device, dtype)


def varlen_fault(
    shape: AttentionShape, block_tokens: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return why the kernel cannot be used for a model, or None if it can; runs a trial.

    Some versions of the kernel support only block sizes that are multiples of 256 tokens.
    """
    if device.type != "cuda":
        return f"it needs CUDA, not {device.type}"
    if dtype not in _DTYPES:
        return f"it needs 16-bit floats, not {dtype}"
    layout = KvLayout(single_group(len(shape.windows)), num_blocks=2, block_tokens=block_tokens)
    try:
        trial = VarlenAttention(shape, layout, dtype, device)
        for length in (block_tokens + 1, 1):
            meta = trial.prepare([Span(block_tokens + 1 - length, length, [[1, 0]])])
            for layer in {window: layer for layer, window in enumerate(shape.windows)}.values():
                query = torch.ones((length, shape.heads, shape.head_dim), dtype=dtype, device=device)
                trial.store(layer, query[:, : shape.kv_heads], query[:, : shape.kv_heads], meta)
                if not torch.allclose(trial.attend(query, layer, meta), query.flatten(1)):
                    return f"it gives wrong results with blocks of {block_tokens} tokens"
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None
