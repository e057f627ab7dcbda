"""Rotary position embedding: frequencies from the model's configuration, and the rotation itself.

In: positions and heads. Out: rotated heads. Conventions are those of Hugging Face checkpoints: the two
halves of a head form the pairs, not neighbouring elements.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All wavelengths stretched by one factor (position interpolation).

    Attributes:
        factor: By how much.
    """

    factor: float

    def stretch(self, plain: Tensor) -> Tensor:
        """Return the frequencies that take the place of the plain ones."""
        return plain / self.factor

    @property
    def magnitude(self) -> float:
        """By how much rotated heads grow."""
        return 1.0


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretching of long wavelengths.

    Attributes:
        factor: By how much the longest wavelengths are stretched.
        low_freq_factor: Wavelengths above original context / this are stretched fully.
        high_freq_factor: Wavelengths below original context / this are left alone.
        original_context: Context length that the model was first trained with, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def stretch(self, plain: Tensor) -> Tensor:
        """Return the frequencies that take the place of the plain ones."""
        turns = self.original_context * plain / (2 * math.pi)  # within the original context
        # 1 keeps a frequency, 0 divides it by the factor, between them it is interpolated.
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return _interpolate(plain, self.factor, keep)

    @property
    def magnitude(self) -> float:
        """By how much rotated heads grow."""
        return 1.0


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071, sections 3.2 to 3.4): long wavelengths stretched, attention sharpened.

    Attributes:
        theta: Base of the wavelengths.
        factor: By how much the longest wavelengths are stretched.
        original_context: Context length that the model was first trained with, in tokens.
        beta_fast: Pairs that turn more often than this within the original context are left alone.
        beta_slow: Pairs that turn less often than this are stretched fully.
        truncate: Whether the borders between them are rounded outwards to whole pairs.
        magnitude: By how much rotated heads grow.
    """

    theta: float
    factor: float
    original_context: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    magnitude: float

    def stretch(self, plain: Tensor) -> Tensor:
        """Return the frequencies that take the place of the plain ones."""
        pairs = len(plain)

        def pair_of(turns: float) -> float:
            """Return the (fractional) pair that turns so often within the original context."""
            return pairs * math.log(self.original_context / (turns * 2 * math.pi)) / math.log(self.theta)

        low, high = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        ramp = (torch.arange(pairs, dtype=torch.float32) - low) / max(high - low, 0.001)
        return _interpolate(plain, self.factor, 1.0 - ramp)


Scaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions of one layer.

    Attributes:
        theta: Base of the wavelengths.
        scaling: How they are stretched for a longer context; None leaves them.
    """

    theta: float
    scaling: Scaling | None = None

    def frequencies(self, head_dim: int) -> Tensor:
        """Return the angle per position of each pair, float32 [head_dim / 2]."""
        plain = 1.0 / self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
        return plain if self.scaling is None else self.scaling.stretch(plain)

    @property
    def magnitude(self) -> float:
        """By how much rotated heads grow."""
        return 1.0 if self.scaling is None else self.scaling.magnitude


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


def _interpolate(plain: Tensor, factor: float, keep: Tensor) -> Tensor:
    """Divide frequencies by the factor where `keep` is 0 or less, leave them where it is 1 or more."""
    keep = keep.clamp(0.0, 1.0)
    return keep * plain + (1.0 - keep) * plain / factor
