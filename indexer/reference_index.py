"""The index in plain dictionaries: the simplest code that keeps the contract.

It is the oracle for faster backends; see `index` for what comes in and goes out.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from cachetools import LRUCache

from indexer.index import NOTHING_ASSUMED, IndexStats, PrefixMatch
from indexer.tiers import GPU_TIER, TierWeights

# Of one block: pod -> tier -> references.
_Holders = dict[str, dict[str, int]]
_NO_HOLDERS: _Holders = {}


class ReferenceIndex:
    """An `Index` on a `cachetools` LRU, under one lock.

    Args:
        capacity_blocks: Most unique blocks that it holds.
        weights: Credit of a block by tier.
    """

    def __init__(self, capacity_blocks: int, weights: TierWeights) -> None:
        self._weights = weights
        self._lock = threading.Lock()
        self._blocks: LRUCache[int, _Holders] = LRUCache(capacity_blocks)
        self._keys_by_pod: dict[str, set[int]] = {}
        self._evicted = 0

    def add(self, pod: str, tier: str, keys: Sequence[int]) -> None:
        """See `Index.add`."""
        with self._lock:
            for key in reversed(keys):
                holders = self._blocks.get(key)
                if holders is None:
                    holders = self._insert(key)
                references = holders.setdefault(pod, {})
                references[tier] = references.get(tier, 0) + 1
                self._keys_by_pod.setdefault(pod, set()).add(key)

    def remove(self, pod: str, tier: str, keys: Sequence[int]) -> int:
        """See `Index.remove`."""
        ended = 0
        with self._lock:
            held = self._keys_by_pod.get(pod, set())
            for key in keys:
                if key not in held:
                    continue
                references = self._blocks[key][pod]
                if tier not in references:
                    continue
                references[tier] -= 1
                if not references[tier]:
                    del references[tier]
                    ended += 1
                if not references:
                    self._drop_holder(key, pod)
        return ended

    def clear_pod(self, pod: str) -> int:
        """See `Index.clear_pod`."""
        with self._lock:
            held = self._keys_by_pod.get(pod, set())
            blocks = len(held)
            for key in tuple(held):
                self._drop_holder(key, pod)
        return blocks

    def match(
        self,
        keys: Sequence[int],
        pods: Collection[str],
        assumed: Mapping[str, AbstractSet[int]] = NOTHING_ASSUMED,
    ) -> dict[str, PrefixMatch]:
        """See `Index.match`."""
        counts: dict[str, dict[str, int]] = {pod: {} for pod in pods}
        with self._lock:
            unbroken: Iterable[str] = counts
            longest = 0
            for position, key in enumerate(keys):
                holders = self._blocks.get(key, _NO_HOLDERS)
                unbroken = [
                    pod
                    for pod in unbroken
                    if self._count(counts[pod], holders.get(pod), position, assumed.get(pod))
                ]
                if not unbroken:
                    break
                longest = position + 1
            for key in reversed(keys[:longest]):
                self._blocks.get(key)
        return {
            pod: PrefixMatch(sum(by_tier.values()), by_tier, self._weights.sum(by_tier))
            for pod, by_tier in counts.items()
        }

    def stats(self) -> IndexStats:
        """See `Index.stats`."""
        with self._lock:
            holdings = sum(map(len, self._keys_by_pod.values()))
            return IndexStats(len(self._blocks), int(self._blocks.maxsize), holdings, self._evicted)

    def _count(
        self,
        by_tier: dict[str, int],
        references: dict[str, int] | None,
        position: int,
        assumed: AbstractSet[int] | None,
    ) -> bool:
        """Counts one block of one pod; False where the pod's prefix ends."""
        if assumed is not None and position in assumed:
            tier = GPU_TIER
        elif references:
            tier = self._weights.best(references)
        else:
            return False
        by_tier[tier] = by_tier.get(tier, 0) + 1
        return True

    def _insert(self, key: int) -> _Holders:
        if len(self._blocks) >= self._blocks.maxsize:
            evicted, holders = self._blocks.popitem()
            self._evicted += 1
            for pod in holders:
                self._forget(evicted, pod)
        holders = {}
        self._blocks[key] = holders
        return holders

    def _drop_holder(self, key: int, pod: str) -> None:
        holders = self._blocks[key]
        del holders[pod]
        if not holders:
            del self._blocks[key]
        self._forget(key, pod)

    def _forget(self, key: int, pod: str) -> None:
        held = self._keys_by_pod[pod]
        held.discard(key)
        if not held:
            del self._keys_by_pod[pod]
