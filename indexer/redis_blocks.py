"""Reads what lies in Redis: strings and records come in, tiers by pod and block go out. See `redis_scripts`.

What makes no sense is passed over: anybody may write to a server, and what is not told is only not used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_RECORD = re.compile(rb"(\d{1,13}) [0-9a-f]+ (\d{1,16})", re.ASCII)

# Of a set of tiers, one bit each: the number of the best; 255 for none.
BEST_TIER: NDArray[np.uint8] = np.array(
    [(bits & -bits).bit_length() - 1 if bits else 255 for bits in range(256)], np.uint8
)


@dataclass(frozen=True, slots=True, eq=False)
class PackedBlocks:
    """Blocks as they lie in Redis.

    Attributes:
        entries: int64 [blocks], how many entries each has.
        words: uint64 [entries], all of them.
    """

    entries: NDArray[np.int64]
    words: NDArray[np.uint64]

    @classmethod
    def of(cls, entries: bytes, words: bytes) -> PackedBlocks:
        """Blocks from a script's answer: u32 numbers of entries, and the entries."""
        return cls(np.frombuffer(entries, "<u4").astype(np.int64), np.frombuffer(words, "<u8"))

    @classmethod
    def none(cls, blocks: int) -> PackedBlocks:
        """So many blocks that nobody holds."""
        return cls(np.zeros(blocks, np.int64), np.empty(0, np.uint64))


def read_lives(records: Sequence[bytes | None], now_ms: int) -> NDArray[np.int64]:
    """Lives of views from their records in "pods".

    Args:
        records: One for each pod.
        now_ms: The server's time.

    Returns:
        int64 [pods]; 0: there is no view, or nobody keeps it up any more.
    """
    lives = np.zeros(len(records), np.int64)
    for row, record in enumerate(records):
        found = _RECORD.fullmatch(record) if record else None
        if found and int(found[2]) > now_ms:
            lives[row] = int(found[1])
    return lives


def read_tiers(blocks: PackedBlocks, lives: NDArray[np.int64], tiers: int) -> NDArray[np.uint8]:
    """Tiers in which each life holds each block.

    Args:
        blocks: The blocks.
        lives: int64 [lives], each once; 0: holds nothing.
        tiers: How many tiers there are.

    Returns:
        uint8 [lives, blocks], a bit for each tier.
    """
    bits = np.zeros((len(lives), len(blocks.entries)), np.uint8)
    if not len(lives):
        return bits
    positions, entry_lives, entry_tiers, _ = _unpacked(blocks)
    order = np.argsort(lives)
    rows = order[np.minimum(np.searchsorted(lives[order], entry_lives), len(lives) - 1)]
    asked = lives[rows] == entry_lives
    for tier in range(tiers):
        chosen = asked & (entry_tiers == tier)
        bits[rows[chosen], positions[chosen]] |= 1 << tier
    return bits


def read_references(blocks: PackedBlocks, life: int, tiers: int) -> NDArray[np.int32]:
    """References of one life: int32 [tiers, blocks]."""
    references = np.zeros((tiers, len(blocks.entries)), np.int32)
    positions, entry_lives, entry_tiers, counts = _unpacked(blocks)
    chosen = (entry_lives == life) & (entry_tiers < tiers)
    references[entry_tiers[chosen], positions[chosen]] = counts[chosen]
    return references


def _unpacked(
    blocks: PackedBlocks,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Place of the block, life, tier and references of each entry that can be one."""
    words = blocks.words
    positions = np.repeat(np.arange(len(blocks.entries)), blocks.entries)
    lives = (words & np.uint64(0xFF_FFFF_FFFF)).astype(np.int64)
    tiers = (words >> np.uint64(40) & np.uint64(0xFF)).astype(np.int64)
    counts = (words >> np.uint64(48)).astype(np.int64)
    real = (lives > 0) & (counts > 0)
    return positions[real], lives[real], tiers[real], counts[real]
