"""Filled indexes for matches: chains of blocks and their cached lengths at 256 pods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from indexer.index.index import FlatIndex
from indexer.keys import Keys
from indexer.wire.tiers import GPU_TIER, Tiers

PODS = tuple(f"10.0.{number // 250}.{number % 250}:8000" for number in range(256))
CHAIN_BLOCKS = 1000
# Chains are stored in chunks of prefill, interleaved between pods.
RUN_BLOCKS = 32

# Returns, for a chain's number, the pods with cached blocks of it and the number of blocks.
Depths = Callable[[int], dict[str, int]]


@dataclass(slots=True)
class Filled:
    """An index that contains chains.

    Attributes:
        pods: All pods, the candidates of a match.
        chains: Keys of each chain.
    """

    index: FlatIndex
    chains: list[Keys]
    pods: frozenset[str] = field(default=frozenset(PODS))

    def match(self, number: int) -> None:
        """Match one chain against all pods."""
        self.index.match(self.chains[number % len(self.chains)], self.pods)


def flat(blocks: int) -> FlatIndex:
    """Return a flat index with room for slightly more than the given blocks."""
    return FlatIndex((blocks + (1 << 16)) * 128, Tiers(), capacity_blocks=blocks + (1 << 16))


def two_pods(number: int) -> dict[str, int]:
    """Return holders: two pods hold all of a chain."""
    return {PODS[number % len(PODS)]: CHAIN_BLOCKS, PODS[(7 * number + 1) % len(PODS)]: CHAIN_BLOCKS}


def all_pods(_number: int) -> dict[str, int]:
    """Return holders: every pod holds all of a chain."""
    return dict.fromkeys(PODS, CHAIN_BLOCKS)


def staggered(_number: int) -> dict[str, int]:
    """Return holders: every pod holds a chain to a different depth."""
    return {pod: CHAIN_BLOCKS * (place + 1) // len(PODS) for place, pod in enumerate(PODS)}


def fill(index: FlatIndex, blocks: int, depths: Depths, *, scattered: bool = False) -> Filled:
    """Store chains, run by run, interleaved between pods.

    Args:
        scattered: Store single blocks in random order instead, which no prefetch can predict.
    """
    rng = np.random.default_rng(blocks)
    count = max(1, blocks // CHAIN_BLOCKS)
    chains = list(rng.integers(0, 2**64, (count, CHAIN_BLOCKS), np.uint64))
    if scattered:
        everything = np.concatenate(chains)
        rng.shuffle(everything)
        index.add(PODS[0], GPU_TIER, everything)
    together = 64
    for first in range(0, count, together):
        group = range(first, min(first + together, count))
        for start in range(0, CHAIN_BLOCKS, RUN_BLOCKS):
            for number in group:
                for pod, depth in depths(number).items():
                    if start < depth:
                        index.add(pod, GPU_TIER, chains[number][start : min(start + RUN_BLOCKS, depth)])
    return Filled(index, chains)
