"""Block sizes of engines whose blocks are larger than the index's, and matches rounded down to them.

An engine serves whole blocks of its own size only. An index block of a prompt may match although the rest of
its engine block differs, so a match is cut to the last boundary between engine blocks. No clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from compiled.jit import kernel
from indexer.index import MatchTable

# Sets of holders whose strides are kept as an array; a fleet asks for few.
_KEPT_ROWS_MAX = 64


class EngineStrides:
    """Index blocks per engine block, by holder. Written by one thread, read by any."""

    def __init__(self) -> None:
        # Replaced as a whole, never changed.
        self._strides: Mapping[str, int] = {}
        # By the identity of a match's rows, which is kept here too, so that no other takes its place.
        self._by_rows: dict[int, tuple[Mapping[str, int], NDArray[np.int32]]] = {}
        table = np.zeros((0, 1), np.int32)
        _cut(table[:, 0], table, table[:, 0])  # Compiled here, not while a first request waits.

    def learn(self, holder: str, stride: int) -> None:
        """Record the engine's index blocks per engine block; 1 if its blocks are not larger than those."""
        if self._strides.get(holder, 1) == stride:
            return
        others = {other: known for other, known in self._strides.items() if other != holder}
        self._strides = {**others, holder: stride} if stride > 1 else others
        self._by_rows = {}

    def of(self, holder: str) -> int:
        """Return the engine's index blocks per engine block; 1 where nothing else is known."""
        return self._strides.get(holder, 1)

    def whole_blocks(self, table: MatchTable) -> MatchTable:
        """Return the matches cut to whole engine blocks; `table` itself if no engine has larger ones."""
        if not self._strides:
            return table
        strides = self._of_rows(table.rows)
        if not len(strides):
            return table
        blocks, blocks_by_tier = table.blocks.copy(), table.blocks_by_tier.copy()
        _cut(blocks, blocks_by_tier, strides)
        return MatchTable(table.rows, table.tiers, blocks, blocks_by_tier, strides=strides)

    def _of_rows(self, rows: Mapping[str, int]) -> NDArray[np.int32]:
        """Return int32 [rows], the holders' strides; empty if all are 1."""
        by_rows, known = self._by_rows, self._strides
        if (kept := by_rows.get(id(rows))) is not None:
            return kept[1]
        strides = np.ones(len(rows), np.int32)
        for holder in known.keys() & rows.keys():
            strides[rows[holder]] = known[holder]
        if not (strides > 1).any():
            strides = strides[:0]
        if len(by_rows) >= _KEPT_ROWS_MAX:
            by_rows.clear()
        by_rows[id(rows)] = rows, strides
        return strides


@kernel
def _cut(blocks: NDArray[np.int32], blocks_by_tier: NDArray[np.int32], strides: NDArray[np.int32]) -> None:
    """Round each row's blocks down to a multiple of its stride.

    An engine drops the end of a chain first, so what is cut off lies in the slowest tier that holds any.
    """
    for row in range(len(blocks)):
        over = blocks[row] % strides[row]
        blocks[row] -= over
        for tier in range(blocks_by_tier.shape[1] - 1, -1, -1):
            taken = min(over, blocks_by_tier[row, tier])
            blocks_by_tier[row, tier] -= taken
            over -= taken
