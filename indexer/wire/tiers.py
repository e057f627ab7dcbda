"""Storage tiers of cached blocks: mapping from an event's medium to a tier, and weight of each tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from indexer.errors import ConfigError

GPU_TIER = "gpu"
CPU_TIER = "cpu"
# Blocks of a request just sent to a pod, which will soon be in its device memory (see `speculation`).
SPECULATIVE_TIER = "speculative"
# All unknown media share one tier, so that a pod's events cannot create any number of tiers.
OTHER_TIER = "other"

TIERS_MAX = 8

TIER_NOT_PROVEN = "tier_not_proven"
"""Reason of an invalid view: blocks of a tier may have left it without an event."""

# vLLM reports GPU, CPU and STORAGE, SGLang GPU, CPU_PINNED, DISK and EXTERNAL; older releases none.
DEFAULT_TIERS: Mapping[str, str] = MappingProxyType(
    {
        "GPU": GPU_TIER,
        "CPU": CPU_TIER,
        "CPU_PINNED": CPU_TIER,
        "DISK": "disk",
        "STORAGE": "disk",
        "EXTERNAL": "external",
    }
)
DEFAULT_WEIGHTS: Mapping[str, float] = MappingProxyType({GPU_TIER: 1.0, CPU_TIER: 0.8})


class Tiers:
    """Tiers of one index, best first, with the weight of a cached block in each.

    A tier without a weight, and every unknown medium, has the weight of the slowest tier that has one.

    Args:
        weights: Weight by tier, 0..1; includes "gpu".
        tier_by_medium: Tier by an event's medium in upper case.

    Raises:
        ConfigError: There are more than TIERS_MAX tiers.
    """

    def __init__(
        self,
        weights: Mapping[str, float] = DEFAULT_WEIGHTS,
        tier_by_medium: Mapping[str, str] = DEFAULT_TIERS,
    ) -> None:
        slowest = min(weights.values())
        credit = {GPU_TIER: 1.0, SPECULATIVE_TIER: weights[GPU_TIER], **weights}
        for tier in (*tier_by_medium.values(), OTHER_TIER):
            credit.setdefault(tier, slowest)
        if len(credit) > TIERS_MAX:
            raise ConfigError(f"tiers: {len(credit)} named ({', '.join(credit)}), at most {TIERS_MAX}")
        first = {*weights, SPECULATIVE_TIER}
        # All tiers by descending weight; among equals, tiers with a configured weight and "speculative" come
        # first. A tier's number is its place here.
        self.names = tuple(sorted(credit, key=lambda tier: (-credit[tier], tier not in first)))
        # Weight of one block, for each of `names`.
        self.weights: tuple[float, ...] = tuple(credit[tier] for tier in self.names)
        self._numbers = {tier: number for number, tier in enumerate(self.names)}
        self.speculative = self._numbers[SPECULATIVE_TIER]  # number of the speculative tier
        self._tier_by_medium = {medium.upper(): tier for medium, tier in tier_by_medium.items()}
        self._tier_by_medium[""] = GPU_TIER

    def number(self, tier: str) -> int:
        return self._numbers.get(tier, self._numbers[OTHER_TIER])

    def of_medium(self, medium: str | None) -> str:
        """Return the tier of an event's medium, in any case; no medium means device memory."""
        return self._tier_by_medium.get((medium or "").upper(), OTHER_TIER)

    def weighted(self, blocks_by_tier: Sequence[int]) -> float:
        """Return the weighted sum of the blocks in each tier of `names`; never rounded."""
        return sum(blocks * weight for blocks, weight in zip(blocks_by_tier, self.weights, strict=True))
