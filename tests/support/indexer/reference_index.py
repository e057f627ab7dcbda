"""Reference index in dictionaries: the simplest code with the same contract, as an oracle."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from cachetools import Cache, LRUCache
from numpy.typing import NDArray

from indexer.index.contract import IndexStats, PodMatches
from indexer.keys import Keys
from indexer.wire.tiers import SPECULATIVE_TIER, Tiers

# Holders of one block: pod -> tier's number -> references.
_Holders = dict[str, dict[int, int]]
_NO_HOLDERS: _Holders = {}


@dataclass(frozen=True, slots=True)
class Holding:
    """Blocks that one pod holds in one tier.

    Attributes:
        pod: The pod.
        tier: The tier.
        keys: uint64 [blocks], each once.
        references: int32 [blocks], copies of each, at least 1.
    """

    pod: str
    tier: str
    keys: Keys
    references: NDArray[np.int32]


class ReferenceIndex:
    """Reference for `FlatIndex`: a `cachetools` LRU under one lock.

    Args:
        capacity_blocks: Maximum of unique blocks.
        tiers: The tiers and their weights.
    """

    def __init__(self, capacity_blocks: int, tiers: Tiers) -> None:
        self.tiers = tiers
        self._lock = threading.Lock()
        self._blocks: LRUCache[int, _Holders] = LRUCache(capacity_blocks)
        self._keys_by_pod: dict[str, set[int]] = {}
        self._evicted = 0

    def add(self, pod: str, tier: str, keys: Keys) -> None:
        self.store(pod, self.tiers.number(tier), keys)

    def store(self, pod: str, number: int, keys: Keys) -> None:
        with self._lock:
            self._add(pod, number, keys.tolist(), [1] * len(keys))

    def remove(self, pod: str, tier: str, keys: Keys) -> int:
        number = self.tiers.number(tier)
        ended = 0
        with self._lock:
            held = self._keys_by_pod.get(pod, set())
            for key in keys.tolist():
                if key not in held:
                    continue
                references = self._peek(key)[pod]
                if number not in references:
                    continue
                references[number] -= 1
                if not references[number]:
                    del references[number]
                    ended += 1
                if not references:
                    self._drop_holder(key, pod)
        return ended

    def clear_pod(self, pod: str) -> int:
        with self._lock:
            held = self._keys_by_pod.get(pod, set())
            blocks = len(held)
            for key in tuple(held):
                self._drop_holder(key, pod)
        return blocks

    def match(self, keys: Keys, pods: Collection[str], _servable_blocks: int | None = None) -> PodMatches:
        rows = {pod: row for row, pod in enumerate(dict.fromkeys(pods))}
        counts = np.zeros((len(rows), len(self.tiers.names)), np.int32)
        chain = keys.tolist()
        with self._lock:
            unbroken: Iterable[str] = rows
            longest = 0
            for position, key in enumerate(chain):
                holders = self._peek(key) if key in self._blocks else _NO_HOLDERS
                unbroken = [pod for pod in unbroken if pod in holders]
                if not unbroken:
                    break
                for pod in unbroken:
                    counts[rows[pod], min(holders[pod])] += 1
                longest = position + 1
            self._use(chain[:longest])
        return PodMatches(rows, self.tiers, counts.sum(axis=1, dtype=np.int32), counts)

    def held(self, keys: Keys, pod: str) -> NDArray[np.uint8]:
        with self._lock:
            held = self._keys_by_pod.get(pod, set())
            bits = [
                sum(1 << tier for tier in self._peek(key)[pod]) if key in held else 0 for key in keys.tolist()
            ]
        return np.array(bits, np.uint8)

    def snapshot(self, pods: Collection[str]) -> Sequence[Holding]:
        """Return all blocks of these pods, without speculative ones."""
        with self._lock:
            return [
                holding
                for pod in pods
                for number, tier in enumerate(self.tiers.names)
                if tier != SPECULATIVE_TIER and (holding := self._holding(pod, number)) is not None
            ]

    def stats(self) -> IndexStats:
        with self._lock:
            holdings = sum(map(len, self._keys_by_pod.values()))
            return IndexStats(len(self._blocks), int(self._blocks.maxsize), holdings, self._evicted)

    def _add(self, pod: str, number: int, keys: list[int], references: list[int]) -> None:
        kept = keys[: int(self._blocks.maxsize)]
        self._evicted += len(keys) - len(kept)
        # Use known blocks first, so that blocks of one call never evict one another.
        self._use(kept)
        for key, copies in zip(kept, references, strict=False):
            holders = self._blocks.get(key)
            if holders is None:
                holders = self._insert(key)
            by_tier = holders.setdefault(pod, {})
            by_tier[number] = by_tier.get(number, 0) + copies
            self._keys_by_pod.setdefault(pod, set()).add(key)
        self._use(kept)

    def _peek(self, key: int) -> _Holders:
        """Return a block's holders without marking it as used."""
        holders: _Holders = Cache.__getitem__(self._blocks, key)
        return holders

    def _use(self, chain: list[int]) -> None:
        for key in reversed(chain):
            self._blocks.get(key)

    def _holding(self, pod: str, number: int) -> Holding | None:
        copies = {
            key: references
            for key in self._keys_by_pod.get(pod, ())
            if (references := self._peek(key)[pod].get(number, 0))
        }
        if not copies:
            return None
        keys = np.fromiter(copies.keys(), np.uint64, len(copies))
        return Holding(
            pod, self.tiers.names[number], keys, np.fromiter(copies.values(), np.int32, len(copies))
        )

    def _insert(self, key: int) -> _Holders:
        if len(self._blocks) >= self._blocks.maxsize:
            self._evict_one()
        holders: _Holders = {}
        self._blocks[key] = holders
        return holders

    def _evict_one(self) -> None:
        evicted, holders = self._blocks.popitem()
        self._evicted += 1
        for pod in holders:
            self._forget(evicted, pod)

    def _drop_holder(self, key: int, pod: str) -> None:
        holders = self._peek(key)
        del holders[pod]
        if not holders:
            del self._blocks[key]
        self._forget(key, pod)

    def _forget(self, key: int, pod: str) -> None:
        held = self._keys_by_pod[pod]
        held.discard(key)
        if not held:
            del self._keys_by_pod[pod]
