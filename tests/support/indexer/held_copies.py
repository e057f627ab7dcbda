"""Copies of blocks that pods hold in an index."""

from __future__ import annotations

from collections.abc import Iterable

from indexer.index.index import FlatIndex
from indexer.views.block_cache import BlockCache
from tests.support.indexer.reference_index import ReferenceIndex


def references(index: FlatIndex | ReferenceIndex, pods: Iterable[str]) -> dict[tuple[str, str, int], int]:
    """Return the copies of each block by pod, tier and key, without speculative blocks."""
    if isinstance(index, ReferenceIndex):
        return {
            (holding.pod, holding.tier, key): copies
            for holding in index.snapshot(sorted(pods))
            for key, copies in zip(holding.keys.tolist(), holding.references.tolist(), strict=True)
        }
    found: dict[tuple[str, str, int], int] = {}
    for pod in pods:
        for part in BlockCache(index, pod, "").export():
            if part is not None:
                for key, tiers in zip(part.keys.tolist(), part.tiers.tolist(), strict=True):
                    for number, tier in enumerate(index.tiers.names):
                        if tiers >> number & 1:
                            found[pod, tier, key] = 1
                for place, number, further in part.copies.tolist():
                    found[pod, index.tiers.names[number], int(part.keys[place])] += further
    return found
