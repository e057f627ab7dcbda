"""Indexes under contract: the flat index and the reference with dictionaries."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from indexer.index.index import FlatIndex
from indexer.keys import Keys
from indexer.wire.tiers import Tiers
from tests.support.indexer.reference_index import ReferenceIndex

TIERS = Tiers()
Index = FlatIndex | ReferenceIndex
# Creates an index with this capacity in blocks with one holder.
Make = Callable[[int], Index]

BACKENDS: dict[str, Make] = {
    "reference": lambda capacity: ReferenceIndex(capacity, TIERS),
    "flat": lambda capacity: FlatIndex(1 << 26, TIERS, capacity_blocks=capacity),
}


def keys(numbers: Iterable[int]) -> Keys:
    """Return numbers as block keys."""
    return np.array(list(numbers), np.uint64)
