"""The KV pool of the gathering backend: per plane, keys and values by block, head, token and element.

In: keys and values with the slots they go to. Out: whole blocks, gathered for attention. A slot is
block * block_tokens + offset. It knows neither sequences nor layers; a plane serves one layer of each group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.attention.batch import KvLayout, to_device
from model_server.shapes import AttentionShape


@dataclass(frozen=True, slots=True)
class SlotWrite:
    """Where the tokens of one step go.

    Attributes:
        rows: int64 [tokens * kv_heads], rows of a plane seen as [blocks * kv_heads * block_tokens, head_dim].
    """

    rows: Tensor


class KvPool:
    """Keys and values in the type that the model computes in."""

    def __init__(
        self, shape: AttentionShape, layout: KvLayout, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = (layout.num_blocks, shape.kv_heads, layout.block_tokens, shape.head_dim)
        # Zeros, not garbage: masked positions are multiplied by 0, which a NaN would survive.
        self._pool = torch.zeros((2 * layout.num_planes, *size), dtype=dtype, device=device)
        planes = self._pool.unbind()
        self._keys, self._values = planes[: layout.num_planes], planes[layout.num_planes :]
        self._heads = torch.arange(shape.kv_heads, device=device)
        self._block_tokens = layout.block_tokens
        self._gathered = [torch.empty((0, *size[2:]), dtype=dtype, device=device) for _ in range(2)]

    def plan_write(self, slots: Sequence[int]) -> SlotWrite:
        """Lay out the writes of one step."""
        return SlotWrite(head_rows(to_device(slots, self._heads.device), self._heads, self._block_tokens))

    def write(self, plane: int, key: Tensor, value: Tensor, plan: SlotWrite) -> None:
        """Write [tokens, kv_heads, head_dim] of keys and values."""
        for pool, new in ((self._keys[plane], key), (self._values[plane], value)):
            pool.view(-1, pool.shape[-1]).index_copy_(0, plan.rows, new.reshape(-1, pool.shape[-1]))

    def plan_read(self, block_ids: Tensor) -> Tensor:
        """Return the rows, for `read`, of [sequences, blocks] block ids; head by head, blocks in order."""
        return block_rows(block_ids, self._heads)

    def read(self, plane: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Copy blocks of keys and values: [rows, block_tokens, head_dim] each, good until the next call."""
        if len(self._gathered[0]) < len(rows):
            self._gathered = [pages.new_empty((2 * len(rows), *pages.shape[1:])) for pages in self._gathered]
        keys, values = (pages[: len(rows)] for pages in self._gathered)
        # Whole blocks by index_select: advanced indexing takes twenty times as long on a CPU. Into memory
        # that stays: fresh pages for every call take the system longer than the copy.
        torch.index_select(self._keys[plane].flatten(0, 1), 0, rows, out=keys)
        torch.index_select(self._values[plane].flatten(0, 1), 0, rows, out=values)
        return keys, values

    def block_tensors(self) -> list[Tensor]:
        """Return all that is kept, [planes, blocks, ...] each."""
        return [self._pool]


def block_rows(block_ids: Tensor, heads: Tensor) -> Tensor:
    """Return block * kv_heads + head as int64 [sequences * kv_heads * blocks]."""
    return (block_ids[:, None, :] * heads.shape[0] + heads[:, None]).flatten()


def head_rows(slots: Tensor, heads: Tensor, block_tokens: int) -> Tensor:
    """Return (block * kv_heads + head) * block_tokens + offset as int64 [tokens * kv_heads]."""
    block, offset = slots // block_tokens, slots % block_tokens
    return ((block[:, None] * heads.shape[0] + heads) * block_tokens + offset[:, None]).flatten()
