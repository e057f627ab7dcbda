"""Evidence that an engine reports what leaves its storage tiers. Pure.

Some connectors publish the blocks that they store and none that they evict. A view of such a tier only grows.
"""

from __future__ import annotations

from collections import Counter

from indexer.wire.tiers import CPU_TIER, GPU_TIER

TIER_NOT_PROVEN = "tier_not_proven"
"""Reason of an invalid view: blocks of a tier may have left it without an event."""

# Stored blocks from which a tier without any removal counts as not proven.
_STORED = 1000


class TierProof:
    """Counts of one engine's stored and removed blocks by tier."""

    def __init__(self) -> None:
        self.reports_evictions = False  # whether removals from host memory are known to be published
        self._stored: Counter[str] = Counter()
        self._proven: set[str] = set()

    def count(self, tier: str, hashes: int, *, stored: bool) -> None:
        if stored:
            self._stored[tier] += hashes
        else:
            self._proven.add(tier)

    @property
    def unproven(self) -> tuple[str, ...]:
        """Return tiers that stored many blocks and lost none, while device memory evicts."""
        if GPU_TIER not in self._proven:
            return ()
        proven = self._proven | {CPU_TIER} if self.reports_evictions else self._proven
        return tuple(
            tier for tier, hashes in self._stored.items() if hashes >= _STORED and tier not in proven
        )
