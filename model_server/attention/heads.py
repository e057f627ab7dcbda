"""Queries and keys before attention, in plain torch: RMS norms of heads, and rotary positions."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class HeadNorms(NamedTuple):
    """RMS norms of each query and key head."""

    weights: Tensor  # [2, head_dim]: of queries and of keys
    epsilon: float
    offset: float  # added to the weights


def rms_norm(inputs: Tensor, weight: Tensor, epsilon: float, offset: float) -> Tensor:
    """Return the RMS norm over the last dimension times (weight + offset), in the type of `inputs`."""
    if not offset:
        return functional.rms_norm(inputs, weight.shape, weight, epsilon)
    # In float32, because 16-bit sums of small weights and the offset would lose the weights.
    weight = weight.float() + offset
    return functional.rms_norm(inputs.float(), weight.shape, weight, epsilon).to(inputs.dtype)


class Rotation(NamedTuple):
    """Angles of a step's tokens, [tokens, 1, head_dim] each."""

    cosine: Tensor
    sine: Tensor  # negative in the first half

    @classmethod
    def of(cls, positions: Tensor, frequencies: Tensor, magnitude: float, dtype: torch.dtype) -> "Rotation":
        """Return the rotation of tokens at `positions` by `frequencies` (radians per position) each."""
        angles = positions[:, None, None].float() * frequencies
        cosine, sine = angles.cos() * magnitude, angles.sin() * magnitude
        return cls(torch.cat((cosine, cosine), dim=-1).to(dtype), torch.cat((-sine, sine), dim=-1).to(dtype))

    def rotate(self, heads: Tensor) -> Tensor:
        """Rotate heads, [tokens, heads, head_dim], by the angles of each token."""
        first, second = heads.chunk(2, dim=-1)
        return heads * self.cosine + torch.cat((second, first), dim=-1) * self.sine


def norm_and_rotate(projected: Tensor, heads: int, norms: HeadNorms | None, rotation: Rotation) -> Tensor:
    """Return queries and keys, normalised if there are norms, then rotated.

    Args:
        projected: [tokens, heads + kv_heads, head_dim], queries first.
        heads: Number of query heads.
        norms: Norms of the heads.
        rotation: Angles of the tokens.
    """
    if norms is not None:
        parts = zip((projected[:, :heads], projected[:, heads:]), norms.weights, strict=True)
        normed = [rms_norm(part, weight, norms.epsilon, norms.offset) for part, weight in parts]
        projected = torch.cat(normed, dim=1)
    return rotation.rotate(projected)
