"""The order of candidates, and the sentence that says why."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.picking.cost import CREDIT, PRICE, least_cost_first
from router.picking.decision import Ranking, reason_for


def ranking(*pods: tuple[float, int, int], seed: int = 1) -> Ranking:
    """Candidates a:0, a:1, ... of a prompt of 1000 tokens, as (cost in seconds, cached tokens, awaiting)."""
    prices, credits = np.zeros(len(pods), PRICE), np.zeros(len(pods), CREDIT)
    for place, (cost_s, cached_tokens, awaiting) in enumerate(pods):
        prices[place]["cost_s"], prices[place]["awaiting"] = cost_s, awaiting
        credits[place]["cached_tokens"] = cached_tokens
    order = least_cost_first(prices["cost_s"], seed)
    return Ranking(
        [f"a:{place}" for place in range(len(pods))],
        prices,
        credits,
        order,
        1000,
        16,
        [],
        int(credits["cached_tokens"].max()),
    )


@given(st.lists(st.floats(-10, 1e9), min_size=1, max_size=20), st.integers(0, 2**32))
def test_the_pick_is_the_cheapest_and_loses_nobody(costs_s: list[float], seed: int) -> None:
    """Ranking keeps every candidate and sorts by cost."""
    ranked = ranking(*((cost_s, 0, 0) for cost_s in costs_s), seed=seed)
    assert [candidate.cost_s for candidate in ranked] == sorted(costs_s)
    assert len({candidate.pod for candidate in ranked}) == len(ranked) == len(costs_s)


def test_equals_are_picked_in_random_order() -> None:
    """Among three equal pods each comes first for some seed."""
    firsts = {ranking(*[(1.0, 0, 0)] * 3, seed=seed)[0].pod for seed in range(50)}
    assert firsts == {"a:0", "a:1", "a:2"}


@pytest.mark.parametrize(
    ("pods", "degraded", "words"),
    [
        ([(0.1, 992, 0), (1.0, 0, 0)], None, "longest cached prefix: 992 of 1000"),
        ([(1.0, 0, 0), (1.0, 0, 0)], None, "by chance among equals"),
        ([(2.0, 0, 1), (1.0, 0, 0)], None, "least work"),
        ([(1.0, 0, 0)], None, "the only candidate"),
        ([(1.0, 0, 0), (2.0, 0, 0)], "no_tokenizer", "by load alone (no_tokenizer)"),
        ([(1.0, 0, 0), (5.0, 100, 1)], None, "though a:1 holds 100 of 1000 tokens"),
    ],
)
def test_the_reason_says_what_decided(
    pods: list[tuple[float, int, int]], degraded: str | None, words: str
) -> None:
    """Each kind of pick has its own sentence."""
    assert words in reason_for(ranking(*pods), 1000, degraded)
