"""Turns of the subscriber's thread."""

from __future__ import annotations

import pytest

from indexer.streams.subscriber import gather_s


@pytest.mark.parametrize(
    ("turn_s", "gathered_s"), [(0.0, 0.004), (0.0003, 0.004), (0.001, 0.01), (0.0012, 0.012), (0.5, 0.015)]
)
def test_the_pause_grows_with_the_turn(turn_s: float, gathered_s: float) -> None:
    """The pause after a turn is ten times the turn's duration, from 4 ms to 15 ms."""
    assert gather_s(turn_s) == pytest.approx(gathered_s)
