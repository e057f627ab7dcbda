"""A model's rotary positions as plain numbers, from a config.json of transformers 5 or older."""

import math
from dataclasses import dataclass

from model_server.shapes.hf_config import HfConfig


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All wavelengths stretched by one factor (position interpolation)."""

    factor: float  # by how much
    magnitude: float = 1.0  # by how much rotated heads grow


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretching of long wavelengths."""

    factor: float  # by how much the longest wavelengths are stretched
    low_freq_factor: float  # wavelengths above original context / this are stretched fully
    high_freq_factor: float  # wavelengths below original context / this are left alone
    original_context: int  # context length that the model was first trained with, in tokens
    magnitude: float = 1.0  # by how much rotated heads grow


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071, sections 3.2 to 3.4): long wavelengths stretched, attention sharpened."""

    theta: float  # base of the wavelengths
    factor: float  # by how much the longest wavelengths are stretched
    original_context: int  # context length that the model was first trained with, in tokens
    beta_fast: float  # pairs that turn more often than this within the original context are left alone
    beta_slow: float  # pairs that turn less often than this are stretched fully
    truncate: bool  # whether the borders between them are rounded outwards to whole pairs
    magnitude: float  # by how much rotated heads grow


Scaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions of one layer."""

    theta: float  # base of the wavelengths
    scaling: Scaling | None = None  # how they are stretched for a longer context; None leaves them

    @property
    def magnitude(self) -> float:
        return 1.0 if self.scaling is None else self.scaling.magnitude


_KINDS = ("default", "linear", "llama3", "yarn")


def read_rope(config: HfConfig, default_theta: float = 10000.0) -> Rope:
    """Read `rope_parameters`, or the older `rope_scaling` and `rope_theta`."""
    theta = config.number("rope_theta", default_theta)
    if config.has("rope_parameters"):
        return rope_of(config.section("rope_parameters"), config, theta)
    return rope_of(config.section("rope_scaling"), config, theta)


def rope_of(rope: HfConfig, config: HfConfig, theta: float) -> Rope:
    """Read one object of rotary parameters; `config` has what it leaves out."""
    for section in (rope, config):
        if (share := section.number("partial_rotary_factor", 1.0)) != 1.0:
            raise section.error("partial_rotary_factor", share, "1: rotating part of a head is not supported")
    theta = rope.number("rope_theta", theta)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind not in _KINDS:
        raise rope.error("rope_type", kind, f"one of {', '.join(_KINDS)}")
    return Rope(theta, _scaling(kind, rope, config, theta))


def stretched_context(rope: Rope, max_positions: int) -> int:
    """Return how many positions a model has, whose config.json may tell them before YaRN's stretching."""
    if isinstance(rope.scaling, YarnScaling):
        return max(max_positions, int(rope.scaling.factor * rope.scaling.original_context))
    return max_positions


def _scaling(kind: str, rope: HfConfig, config: HfConfig, theta: float) -> Scaling:
    factor = rope.number("factor")
    if kind == "linear":
        return LinearScaling(factor)
    # Phi and its like have it at the top level, which wins; where it is nowhere, nothing was stretched yet.
    original_context = config.integer(
        "original_max_position_embeddings",
        rope.integer("original_max_position_embeddings", config.integer("max_position_embeddings", 2048)),
    )
    if kind == "yarn":
        return _yarn(rope, theta, factor, original_context)
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", high, f"above low_freq_factor, {low}")
    return Llama3Scaling(factor, low, high, original_context)


def _yarn(rope: HfConfig, theta: float, factor: float, original_context: int) -> YarnScaling:
    magnitude = _growth(factor, 1.0)
    if rope.has("mscale") and rope.has("mscale_all_dim"):
        magnitude = _growth(factor, rope.number("mscale")) / _growth(factor, rope.number("mscale_all_dim"))
    return YarnScaling(
        theta=theta,
        factor=factor,
        original_context=original_context,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.boolean("truncate", True),
        magnitude=rope.number("attention_factor", magnitude),
    )


def _growth(factor: float, weight: float) -> float:
    """Return YaRN's recommended growth of heads: its section 3.4, weighted as DeepSeek does."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0
