"""The sketch of use frequencies."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from indexer.frequency import FrequencySketch

_MAX_COUNT = 15


@given(st.lists(st.sets(st.integers(0, 40) | st.integers(0, (1 << 64) - 1), max_size=30), max_size=5))
def test_estimates_are_never_too_low(calls: list[set[int]]) -> None:
    """Before anything ages, each key is estimated at what it was used, or more, up to the limit."""
    sketch = FrequencySketch(16)
    for call in calls:
        sketch.use(np.array(list(call), np.uint64))
    for key, uses in Counter(key for call in calls for key in call).items():
        assert uses <= sketch.estimate(key) <= _MAX_COUNT


def test_few_keys_are_told_apart() -> None:
    """Half as many keys as it was made for: nearly all, used or not, are estimated right."""
    rng = np.random.default_rng(3)
    sketch = FrequencySketch(1024)
    keys = rng.integers(0, 1 << 64, 512, np.uint64)
    for used in range(1, 9):
        sketch.use(keys[: 64 * used])
    right = sum(sketch.estimate(int(key)) == 8 - place // 64 for place, key in enumerate(keys))
    unused = sum(sketch.estimate(int(key)) == 0 for key in rng.integers(0, 1 << 64, 512, np.uint64))
    assert right > 480
    assert unused > 400


def test_use_is_forgotten() -> None:
    """Whoever is not used any more falls behind whoever is."""
    sketch = FrequencySketch(64)
    old, new = np.array([1], np.uint64), np.array([2], np.uint64)
    for _ in range(15):
        sketch.use(old)
    assert sketch.estimate(1) == 15
    for _ in range(5000):
        sketch.use(new)
    assert sketch.estimate(1) == 0
    assert sketch.estimate(2) >= 7
