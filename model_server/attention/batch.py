"""What the engine, the models and the attention backends say to each other: plain descriptions of a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model_server.shapes import KvGroupSpec

Numbers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Where the KV of all layers lies."""

    groups: tuple[KvGroupSpec, ...]  # of the layers; each has a block table of its own in every span
    num_blocks: int  # blocks in the pool, shared by all groups
    block_tokens: int  # tokens in one block

    @property
    def num_planes(self) -> int:
        """Layers that one block holds."""
        return max(len(group.layers) for group in self.groups)

    def places(self) -> dict[int, tuple[int, int]]:
        """Return (group, plane) of each layer."""
        return {
            layer: (index, plane)
            for index, group in enumerate(self.groups)
            for plane, layer in enumerate(group.layers)
        }


class Span(msgspec.Struct, frozen=True, gc=False):
    """One sequence's part of a flat token batch."""

    start: int  # tokens of the sequence whose KV is in the pool already
    length: int  # tokens in this batch, the next ones of the sequence
    # Per KV group, the sequence's blocks, long enough for all of its tokens.
    block_tables: Sequence[Sequence[int]]

    @property
    def stop(self) -> int:
        """Tokens of the sequence once the batch is computed."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class View:
    """What the layers of one group and one window share: they read the same blocks."""

    group: int
    window: int | None

    def first_position(self, position: int) -> int:
        """Return the first position that a token sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window)


@dataclass(frozen=True, slots=True)
class StepMeta:
    """One step as a backend has laid it out; the same for all layers."""

    positions: Tensor  # int64 [tokens], each token's place in its sequence


class Attention(Protocol):
    """The KV pool of all layers, and attention over it."""

    def prepare(self, spans: Sequence[Span]) -> StepMeta:
        """Lay out one step.

        Args:
            spans: In the order of the flat batch. Single tokens that follow one another are attended
                together: put them first, by rising context length.
        """

    def store(self, layer: int, key: Tensor, value: Tensor, meta: StepMeta) -> None:
        """Write the KV of all tokens of the step; must come before `attend` of the same layer.

        Args:
            key: [tokens, kv_heads, head_dim], rotated.
            value: The same shape.
        """

    def attend(self, query: Tensor, layer: int, meta: StepMeta) -> Tensor:
        """Attend causally, each token to its own sequence and within the layer's window.

        Args:
            query: [tokens, heads, head_dim], rotated.

        Returns:
            [tokens, heads * head_dim].
        """

    def block_tensors(self) -> Sequence[Tensor]:
        """Return all that the pool keeps, [planes, num_blocks, ...] each; a block is a row of each plane."""


def positions_of(spans: Sequence[Span]) -> Numbers:
    """Return the place of each token in its sequence, int64 [tokens]."""
    return np.array([position for span in spans for position in range(span.start, span.stop)], np.int64)


def slots_of(spans: Sequence[Span], positions: Numbers, group: int, block_tokens: int) -> Numbers:
    """Return where the KV of each token goes: block * block_tokens + offset, int64 [tokens]."""
    blocks: list[int] = []
    for span in spans:
        table = span.block_tables[group]
        if span.length == 1:
            blocks.append(table[span.start // block_tokens])
        else:
            blocks.extend([table[position // block_tokens] for position in range(span.start, span.stop)])
    return np.array(blocks, np.int64) * block_tokens + positions % block_tokens


def reads_of(view: View, spans: Sequence[Span], block_tokens: int) -> tuple[Numbers, Numbers, Numbers]:
    """Return the blocks that spans of one token read, [spans, most blocks] padded with block 0, and bounds.

    The bounds are the first position that each sees and the one behind its last, [spans], counted from its
    first block.
    """
    first_seen = [view.first_position(span.start) for span in spans]
    first = [position // block_tokens for position in first_seen]
    last = [span.start // block_tokens + 1 for span in spans]
    table = np.zeros((len(spans), max(map(int.__sub__, last, first))), np.int64)
    for row, span, begin, end in zip(table, spans, first, last, strict=True):
        row[: end - begin] = span.block_tables[view.group][begin:end]
    skipped = np.array(first, np.int64) * block_tokens
    return table, np.array(first_seen) - skipped, np.array([span.stop for span in spans]) - skipped


def to_device(numbers: object, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Make an index tensor from Python numbers or a numpy array."""
    return torch.as_tensor(numbers, dtype=dtype).to(device)
