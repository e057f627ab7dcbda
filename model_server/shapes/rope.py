"""What a model's rotary positions are made of, as plain numbers.

Read from config.json by `rope_config`, computed by the decoder; it computes nothing.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All wavelengths stretched by one factor (position interpolation).

    Attributes:
        factor: By how much.
    """

    factor: float

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

    @property
    def magnitude(self) -> float:
        """By how much rotated heads grow."""
        return 1.0 if self.scaling is None else self.scaling.magnitude
