"""Order of the candidates, and the reason of a decision."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.picking.cost import CACHE_HIT, COST_BREAKDOWN, least_cost_first
from router.picking.decision import Ranking, reason_for


def ranking(*pods: tuple[float, int, int], seed: int = 1) -> Ranking:
    """Rank candidates a:0, a:1, ... for 1000 tokens, given as (cost in seconds, cached tokens, awaiting)."""
    breakdowns, hits = np.zeros(len(pods), COST_BREAKDOWN), np.zeros(len(pods), CACHE_HIT)
    for index, (cost_s, cached_tokens, awaiting) in enumerate(pods):
        breakdowns[index]["cost_s"], breakdowns[index]["awaiting"] = cost_s, awaiting
        hits[index]["cached_tokens"] = cached_tokens
    order = least_cost_first(breakdowns["cost_s"], seed)
    return Ranking(
        [f"a:{index}" for index in range(len(pods))],
        breakdowns,
        hits,
        order,
        1000,
        16,
        [],
        int(hits["cached_tokens"].max()),
    )


@given(st.lists(st.floats(-10, 1e9), min_size=1, max_size=20), st.integers(0, 2**32))
def test_candidates_are_sorted_by_cost(costs_s: list[float], seed: int) -> None:
    """A ranking contains every candidate once, in ascending order of cost."""
    ranked = ranking(*((cost_s, 0, 0) for cost_s in costs_s), seed=seed)
    assert [candidate.cost_s for candidate in ranked] == sorted(costs_s)
    assert len({candidate.pod for candidate in ranked}) == len(ranked) == len(costs_s)


def test_equal_costs_are_in_random_order() -> None:
    """Each of three pods of equal cost comes first for some seed."""
    firsts = {ranking(*[(1.0, 0, 0)] * 3, seed=seed)[0].pod for seed in range(50)}
    assert firsts == {"a:0", "a:1", "a:2"}


@pytest.mark.parametrize(
    ("pods", "degraded", "words"),
    [
        ([(0.1, 992, 0), (1.0, 0, 0)], None, "longest cached prefix: 992 of 1000"),
        ([(1.0, 0, 0), (1.0, 0, 0)], None, "random pod among equal costs"),
        ([(2.0, 0, 1), (1.0, 0, 0)], None, "lowest cost: 0 of 1000 tokens cached, queue empty"),
        ([(1.0, 0, 0)], None, "the only candidate"),
        ([(1.0, 0, 0), (2.0, 0, 0)], "no_tokenizer", "by load alone (no_tokenizer)"),
        (
            [(1.0, 0, 0), (5.0, 100, 1)],
            None,
            "lowest cost: queue empty, although a:1 has 100 of 1000 tokens cached",
        ),
    ],
)
def test_the_reason_names_the_deciding_factor(
    pods: list[tuple[float, int, int]], degraded: str | None, words: str
) -> None:
    """Each kind of pick has its own reason."""
    assert words in reason_for(ranking(*pods), 1000, degraded)
