"""The price of a pod, and the pick by it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.cost import CostParameters, PodFacts, own_weight, price
from router.pick import least_cost_first, reason_for

PARAMETERS = CostParameters()
IDLE = PodFacts("a:1", 0, 0, 0, 0, 0, 1000.0)

FACTS = st.builds(
    PodFacts,
    pod=st.integers(1, 9).map(lambda port: f"a:{port}"),
    cached_tokens=st.integers(0, 1000),
    host_tokens=st.just(0),
    queued_tokens=st.integers(0, 10_000),
    awaiting=st.integers(0, 100),
    decoding=st.integers(0, 100),
    prefill_tokens_per_s=st.floats(10, 1e6),
    kv_used_tokens=st.floats(0, 1e6),
    kv_capacity_tokens=st.none() | st.integers(0, 10**6),
)


def cost(prompt_tokens: int, *pods: PodFacts) -> list[float]:
    """The prices alone."""
    return [candidate.cost_s for candidate in price(prompt_tokens, pods, PARAMETERS)[0]]


def test_the_cost_is_queue_plus_weighted_own_prefill() -> None:
    """With one queued request of 500 tokens, a = 2: 0.5 s of queue and twice 0.6 s of own prefill."""
    pod = replace(IDLE, cached_tokens=400, queued_tokens=500, awaiting=1)
    (candidate,), weight = price(1000, [pod], PARAMETERS)
    assert (weight, candidate.queued_prefill_s, candidate.own_prefill_s) == (2.0, 0.5, 0.6)
    assert candidate.cost_s == pytest.approx(0.5 + 2 * 0.6)
    assert candidate.uncached_tokens == 600


def test_the_weight_counts_the_mean_queue_and_is_capped() -> None:
    """`a` is 1 + the mean number awaiting per pod, at most 17."""
    assert own_weight([replace(IDLE, awaiting=4), IDLE], PARAMETERS) == 3.0
    assert own_weight([replace(IDLE, awaiting=500)], PARAMETERS) == 17.0


def test_host_tier_tokens_cost_their_copy() -> None:
    """Blocks in the host tier are cheaper than computing them and dearer than having them."""
    parameters = CostParameters(copy_tokens_per_s=10_000.0)
    on_device = replace(IDLE, cached_tokens=512)
    on_host = replace(on_device, host_tokens=512)
    prices = [candidate.cost_s for candidate in price(1024, [on_device, on_host, IDLE], parameters)[0]]
    assert prices == sorted(prices)
    assert prices[1] - prices[0] == pytest.approx(512 / 10_000)


def test_a_nearly_full_kv_cache_costs_the_prefill_it_would_throw_away() -> None:
    """Tokens above nine tenths of the capacity are priced as prefill, below they cost nothing."""
    pod = replace(IDLE, kv_used_tokens=800, kv_capacity_tokens=1000)
    fits, overflows = price(100, [pod], PARAMETERS)[0][0], price(300, [pod], PARAMETERS)[0][0]
    assert (fits.kv_pressure_s, overflows.kv_pressure_s) == (0.0, pytest.approx(0.2))


def test_decoding_requests_slow_a_pods_prefill() -> None:
    """Of two equal pods, the one with 50 decoding requests is 40 % slower."""
    idle, busy = cost(1000, IDLE, replace(IDLE, decoding=50))
    assert busy == pytest.approx(1.4 * idle)


@given(st.lists(FACTS, min_size=1, max_size=8), st.integers(1000, 100_000))
def test_more_of_anything_bad_never_makes_a_pod_cheaper(pods: list[PodFacts], tokens: int) -> None:
    """Less cache, a longer queue, more decoding or a fuller cache never lower a price."""
    worse = [
        replace(
            pod,
            cached_tokens=pod.cached_tokens // 2,
            queued_tokens=pod.queued_tokens + 1,
            decoding=pod.decoding + 1,
            kv_used_tokens=pod.kv_used_tokens + 1,
        )
        for pod in pods
    ]
    for before, after in zip(cost(tokens, *pods), cost(tokens, *worse), strict=True):
        assert 0.0 <= before <= after < float("inf")


@given(st.lists(FACTS, min_size=1, max_size=8), st.integers(0, 2**32))
def test_the_pick_is_the_cheapest_and_loses_nobody(pods: list[PodFacts], seed: int) -> None:
    """Ranking keeps every candidate and sorts by cost."""
    candidates, _ = price(1000, pods, PARAMETERS)
    ranked = least_cost_first(candidates, Random(seed))
    assert sorted(map(id, ranked)) == sorted(map(id, candidates))
    assert [candidate.cost_s for candidate in ranked] == sorted(candidate.cost_s for candidate in candidates)


def test_equals_are_picked_in_random_order() -> None:
    """Among three equal pods each comes first for some seed."""
    candidates, _ = price(1000, [replace(IDLE, pod=f"a:{port}") for port in (1, 2, 3)], PARAMETERS)
    assert {least_cost_first(candidates, Random(seed))[0].pod for seed in range(50)} == {"a:1", "a:2", "a:3"}


@pytest.mark.parametrize(
    ("pods", "degraded", "words"),
    [
        (
            [replace(IDLE, cached_tokens=992), replace(IDLE, pod="a:2")],
            None,
            "longest cached prefix: 992 of 1000",
        ),
        ([IDLE, replace(IDLE, pod="a:2")], None, "by chance among equals"),
        ([replace(IDLE, pod="a:2", queued_tokens=9, awaiting=1), IDLE], None, "least work"),
        ([IDLE], None, "the only candidate"),
        ([IDLE, replace(IDLE, pod="a:2")], "no_tokenizer", "by load alone (no_tokenizer)"),
        (
            [IDLE, replace(IDLE, pod="a:2", cached_tokens=100, queued_tokens=5000, awaiting=1)],
            None,
            "though a:2 holds 100 of 1000 tokens",
        ),
    ],
)
def test_the_reason_says_what_decided(pods: list[PodFacts], degraded: str | None, words: str) -> None:
    """Each kind of pick has its own sentence."""
    ranked = least_cost_first(price(1000, pods, PARAMETERS)[0], Random(1))
    assert words in reason_for(ranked, 1000, degraded)
