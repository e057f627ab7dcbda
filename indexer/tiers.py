"""Storage tiers of cached blocks: from an event's medium to a tier, from a tier to its credit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

GPU_TIER = "gpu"
CPU_TIER = "cpu"
# One name for all media that we do not know, so that a pod cannot make up any number of tiers.
OTHER_TIER = "other"

# vLLM names GPU, CPU and STORAGE, SGLang GPU, CPU_PINNED, DISK and EXTERNAL; older releases name none.
_TIERS = {"": GPU_TIER, "GPU": GPU_TIER, "CPU": CPU_TIER, "CPU_PINNED": CPU_TIER}


def tier_of(medium: str | None) -> str:
    """The tier of an event's `medium`, upper or lower case."""
    return _TIERS.get((medium or "").upper(), OTHER_TIER)


class TierWeights:
    """Credit of one cached block by tier; an unknown tier never gets more than the slowest known one."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self._unknown = min(weights.values())

    def __getitem__(self, tier: str) -> float:
        return self._weights.get(tier, self._unknown)

    def best(self, tiers: Iterable[str]) -> str:
        """The tier with the highest weight; among equals a known one, then the first by name."""
        return min(tiers, key=lambda tier: (-self[tier], tier not in self._weights, tier))

    def sum(self, blocks_by_tier: Mapping[str, int]) -> float:
        """Credit of all these blocks."""
        return sum((self[tier] * blocks for tier, blocks in blocks_by_tier.items()), 0.0)
