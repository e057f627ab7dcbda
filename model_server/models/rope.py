"""Rotary position embedding: a rope's frequencies, and the rotation itself.

In: positions and heads. Out: rotated heads. Conventions are those of Hugging Face checkpoints: the two
halves of a head form the pairs, not neighbouring elements.
"""

import math

import torch
from torch import Tensor

from model_server.shapes import LinearScaling, Llama3Scaling, Rope, YarnScaling


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return the angle per position of each pair, float32 [head_dim / 2]."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    match rope.scaling:
        case LinearScaling(factor):
            return plain / factor
        case Llama3Scaling() as scaling:
            return _stretch_llama3(plain, scaling)
        case YarnScaling() as scaling:
            return _stretch_yarn(plain, scaling)
    return plain


def rotation(
    positions: Tensor, frequencies: Tensor, magnitude: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the cosines and signed sines of one step, each [tokens, 1, head_dim], for `rotate`."""
    angles = positions[:, None, None].float() * frequencies
    cosine, sine = angles.cos() * magnitude, angles.sin() * magnitude
    return torch.cat((cosine, cosine), dim=-1).to(dtype), torch.cat((-sine, sine), dim=-1).to(dtype)


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate [tokens, heads, head_dim] by each token's angles."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((second, first), dim=-1) * sine


def _stretch_llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.original_context * plain / (2 * math.pi)  # within the original context
    # 1 keeps a frequency, 0 divides it by the factor, between them it is interpolated.
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return _interpolate(plain, scaling.factor, keep)


def _stretch_yarn(plain: Tensor, scaling: YarnScaling) -> Tensor:
    pairs = len(plain)

    def pair_of(turns: float) -> float:
        """Return the (fractional) pair that turns so often within the original context."""
        return pairs * math.log(scaling.original_context / (turns * 2 * math.pi)) / math.log(scaling.theta)

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = (torch.arange(pairs, dtype=torch.float32) - low) / max(high - low, 0.001)
    return _interpolate(plain, scaling.factor, 1.0 - ramp)


def _interpolate(plain: Tensor, factor: float, keep: Tensor) -> Tensor:
    """Divide frequencies by the factor where `keep` is 0 or less, leave them where it is 1 or more."""
    keep = keep.clamp(0.0, 1.0)
    return keep * plain + (1.0 - keep) * plain / factor
