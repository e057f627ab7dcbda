"""LoRA adapters in memory, and which rows of one step each of them changes.

In: inputs and outputs of a base model's projections. Out: the same outputs with the adapters' part added to
the rows that use them; other rows are not touched. It knows neither files nor requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """The change of one projection: y += up @ (down @ x)."""

    down: Tensor  # [rank, inputs]
    up: Tensor  # [outputs, rank], with the adapter's scaling in it


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class LoraRequest:
    """What a request with an adapter keeps of it; the factors are with whoever computes."""

    name: str  # what requests call it
    lora_id: int  # number of this loading, from 1 on; never given twice
    content_hash: str  # hexadecimal SHA-256 of its files: what it computes depends on nothing else


@dataclass(frozen=True, eq=False, slots=True)
class LoraAdapter:
    """One loaded adapter, or one rank's part of it."""

    content_hash: str  # as `LoraRequest.content_hash`
    factors: Mapping[tuple[int, str], LoraFactors]  # by layer and projection


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """The rows of one flat token batch that adapters change."""

    parts: Sequence[tuple[LoraAdapter, Tensor]]  # each adapter with its rows, int64; no row is in two parts

    @classmethod
    def of(cls, rows: Sequence[LoraAdapter | None], device: torch.device) -> "LoraBatch | None":
        """Group rows by adapter; None if no row has one."""
        members: dict[LoraAdapter, list[int]] = {}
        for row, adapter in enumerate(rows):
            if adapter is not None:
                members.setdefault(adapter, []).append(row)
        if not members:
            return None
        return cls([(adapter, torch.tensor(rows, device=device)) for adapter, rows in members.items()])

    def chosen(self, rows: Tensor) -> "LoraBatch":
        """Return the batch of some of the rows, int64, each at most once."""
        places = [(adapter, torch.isin(rows, own).nonzero().flatten()) for adapter, own in self.parts]
        return LoraBatch([(adapter, own) for adapter, own in places if len(own)])

    def add(self, output: Tensor, inputs: Tensor, layer: int, projection: str) -> None:
        """Add the adapters' part to a projection's output, in place.

        Args:
            output: [tokens, outputs].
            inputs: [tokens, inputs], what the base model has projected.
            layer: Index of the layer.
            projection: Name of the model's projection.
        """
        for adapter, rows in self.parts:
            factors = adapter.factors.get((layer, projection))
            if factors is not None:
                lowered = functional.linear(inputs.index_select(0, rows), factors.down)
                output.index_add_(0, rows, functional.linear(lowered, factors.up))
