"""The KV pool of the gathering backend: per plane, keys and values by block, head, token and element.

In: keys and values with the slots they go to. Out: whole blocks, gathered, and weighted sums of values. A
slot is block * block_tokens + offset. It knows neither sequences nor layers; a plane serves one layer of each
group.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from model_server.attention.batch import KvLayout, Numbers, to_device
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
        self._kv_heads = shape.kv_heads
        self._query_group = shape.heads // shape.kv_heads
        # Half the bytes to read where it can number all tokens of a plane.
        self._index_type = np.int32 if self._keys[0].numel() // shape.head_dim < 2**31 else np.int64
        self._device = device
        self._block_tokens = layout.block_tokens
        self._gathered = [torch.empty((0, *size[2:]), dtype=dtype, device=device) for _ in range(2)]

    def plane(self, plane: int) -> tuple[Tensor, Tensor]:
        """Return a plane's keys and values, [blocks, kv_heads, block_tokens, head_dim] each."""
        return self._keys[plane], self._values[plane]

    def plan_write(self, slots: Numbers) -> SlotWrite:
        """Lay out the writes of one step."""
        return SlotWrite(to_device(head_rows(slots, self._kv_heads, self._block_tokens), self._device))

    def write(self, plane: int, key: Tensor, value: Tensor, plan: SlotWrite) -> None:
        """Write [tokens, kv_heads, head_dim] of keys and values."""
        for pool, new in ((self._keys[plane], key), (self._values[plane], value)):
            pool.view(-1, pool.shape[-1]).index_copy_(0, plan.rows, new.reshape(-1, pool.shape[-1]))

    def plan_read(self, block_ids: Numbers) -> Tensor:
        """Return the rows that reading [sequences, blocks] block ids takes: head by head, blocks in order."""
        return to_device(block_rows(block_ids, self._kv_heads), self._device)

    def read_keys(self, plane: int, rows: Tensor) -> Tensor:
        """Copy blocks of keys: [rows, block_tokens, head_dim], good until the next call."""
        return self._read(0, self._keys[plane], rows)

    def read_values(self, plane: int, rows: Tensor) -> Tensor:
        """Copy blocks of values: [rows, block_tokens, head_dim], good until the next call."""
        return self._read(1, self._values[plane], rows)

    def plan_sum(self, block_ids: Numbers) -> Tensor:
        """Return what `sum_values` takes for [sequences, blocks] block ids."""
        rows = block_rows(block_ids, self._kv_heads)
        if self._device.type != "cpu":
            return to_device(rows, self._device)
        tokens = (rows[:, None] * self._block_tokens + np.arange(self._block_tokens)).astype(self._index_type)
        tokens = tokens.reshape(len(block_ids) * self._kv_heads, 1, -1)
        return torch.from_numpy(tokens.repeat(self._query_group, axis=1)).flatten(0, 1)

    def sum_values(self, plane: int, weights: Tensor, plan: Tensor) -> Tensor:
        """Return weighted sums of values, [sequences * kv_heads, query heads per KV head, head_dim].

        Args:
            plane: Of the layer.
            weights: [sequences * kv_heads, query heads per KV head, tokens of the blocks].
            plan: Which tokens they are of.
        """
        values, head_dim = self._values[plane], self._values[plane].shape[-1]
        if self._device.type != "cpu":
            return torch.bmm(weights, self.read_values(plane, plan).view(len(weights), -1, head_dim))
        # Where they lie: gathered and multiplied, they take a CPU twice as long.
        sums = functional.embedding_bag(
            plan, values.view(-1, head_dim), per_sample_weights=weights.flatten(0, 1), mode="sum"
        )
        return sums.view(*weights.shape[:2], head_dim)

    def block_tensors(self) -> list[Tensor]:
        """Return all that is kept, [planes, blocks, ...] each."""
        return [self._pool]

    def _read(self, which: int, plane: Tensor, rows: Tensor) -> Tensor:
        if len(self._gathered[which]) < len(rows):
            self._gathered[which] = plane.new_empty((2 * len(rows), *plane.shape[2:]))
        # Whole blocks by index_select: advanced indexing takes twenty times as long on a CPU. Into memory
        # that stays: fresh pages for every call take the system longer than the copy.
        return torch.index_select(plane.flatten(0, 1), 0, rows, out=self._gathered[which][: len(rows)])


def block_rows(block_ids: Numbers, kv_heads: int) -> Numbers:
    """Return block * kv_heads + head as int64 [sequences * kv_heads * blocks]."""
    return (block_ids[:, None, :] * kv_heads + np.arange(kv_heads)[:, None]).ravel()


def head_rows(slots: Numbers, kv_heads: int, block_tokens: int) -> Numbers:
    """Return (block * kv_heads + head) * block_tokens + offset as int64 [tokens * kv_heads]."""
    block, offset = np.divmod(slots, block_tokens)
    return ((block[:, None] * kv_heads + np.arange(kv_heads)) * block_tokens + offset[:, None]).ravel()
