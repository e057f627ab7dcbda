"""How often blocks were used of late: a count-min sketch that forgets.

Block keys come in, estimates come out; ageing apart, an estimate may be too high, never too low. After
Einziger, Friedman and Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", 2017: counters up to 15,
halved after ten uses for each counter of a row, so that what was popular yesterday makes room.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from indexer.keys import Keys

_ROWS = 4
_MAX_COUNT = 15
_USES_PER_COUNTER = 10
# Odd numbers of mixed bits, one a row: the upper bits of the product with a key are its column.
_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x9E3779B185EBCA87, 0x165667B19E3779F9)
_WORD = (1 << 64) - 1


class FrequencySketch:
    """Estimates of use, for more keys than could be remembered.

    Args:
        keys: About how many keys are to be told apart.
    """

    def __init__(self, keys: int) -> None:
        columns_log2 = max(4, (keys - 1).bit_length())
        self._columns = 1 << columns_log2
        self._shift = 64 - columns_log2
        self._counts = bytearray(_ROWS * self._columns)
        self._table: NDArray[np.uint8] = np.frombuffer(self._counts, np.uint8).reshape(_ROWS, self._columns)
        self._uses = 0

    @property
    def used_bytes(self) -> int:
        """Its size, which never changes."""
        return len(self._counts)

    def use(self, keys: Keys) -> None:
        """Counts one use of each key."""
        # Only the smallest of a key's counters grow: the others are above it for somebody else's uses.
        columns = keys * np.array(_MULTIPLIERS, np.uint64)[:, None] >> np.uint64(self._shift)
        rows = np.arange(_ROWS)[:, None]
        counts = self._table[rows, columns]
        least = counts.min(axis=0)
        np.maximum.at(self._table, (rows, columns), np.minimum(least + 1, _MAX_COUNT))
        self._uses += len(keys)
        if self._uses >= self._columns * _USES_PER_COUNTER:
            self._table >>= 1
            self._uses //= 2

    def estimate(self, key: int) -> int:
        """About how often a key was used of late, at most 15."""
        return min(
            self._counts[row * self._columns + ((key * multiplier & _WORD) >> self._shift)]
            for row, multiplier in enumerate(_MULTIPLIERS)
        )
