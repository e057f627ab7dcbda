"""How the subscriber's thread takes turns."""

from __future__ import annotations

import pytest

from indexer.streams.subscriber import gather_s


@pytest.mark.parametrize(
    ("turn_s", "gathered_s"), [(0.0, 0.004), (0.0003, 0.004), (0.001, 0.01), (0.0012, 0.012), (0.5, 0.015)]
)
def test_more_is_gathered_where_more_came(turn_s: float, gathered_s: float) -> None:
    """What comes behind a turn is left for ten times as long as that took, from 4 ms to 15 ms."""
    assert gather_s(turn_s) == pytest.approx(gathered_s)
