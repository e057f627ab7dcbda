"""The indexes under contract: the flat one, and the oracle in plain dictionaries."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from indexer.index.index import FlatIndex
from indexer.keys import Keys
from indexer.tiers import Tiers
from tests.support.reference_index import ReferenceIndex

TIERS = Tiers()
Index = FlatIndex | ReferenceIndex
# Makes an index with room for so many blocks with one holder.
Make = Callable[[int], Index]

BACKENDS: dict[str, Make] = {
    "reference": lambda capacity: ReferenceIndex(capacity, TIERS),
    "flat": lambda capacity: FlatIndex(1 << 26, TIERS, capacity_blocks=capacity),
}


def keys(numbers: Iterable[int]) -> Keys:
    """Numbers as block keys."""
    return np.array(list(numbers), np.uint64)
