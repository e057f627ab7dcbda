"""Rotary position embedding: frequencies from the model's configuration, and the rotation itself.

In: positions and heads. Out: rotated heads. Conventions are those of Hugging Face checkpoints: the two
halves of a head form the pairs, not neighbouring elements.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretching of long wavelengths.

    Attributes:
        factor: By how much the longest wavelengths are stretched.
        low_freq_factor: Wavelengths above original context / this are stretched fully.
        high_freq_factor: Wavelengths below original context / this are left alone.
        original_context: Context length that the model was first trained with.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


def inverse_frequencies(head_dim: int, theta: float, scaling: Llama3Scaling | None) -> Tensor:
    """Return the angle per position of each pair, float32 [head_dim / 2]."""
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if scaling is None:
        return plain
    turns = scaling.original_context * plain / (2 * math.pi)  # within the original context
    # 1 keeps a frequency, 0 divides it by the factor, between them it is interpolated.
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return keep * plain + (1.0 - keep) * plain / scaling.factor


def rotation(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosines and signed sines of one step, each [tokens, 1, head_dim], for `rotate`."""
    angles = positions[:, None, None].float() * frequencies
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat((cosine, cosine), dim=-1).to(dtype), torch.cat((-sine, sine), dim=-1).to(dtype)


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate [tokens, heads, head_dim] by each token's angles."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((second, first), dim=-1) * sine
