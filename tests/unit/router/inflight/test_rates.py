"""Tests of the prefill rate estimates: robust, bounded, per pod, and shrunk to the fleet's median."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.inflight.rates import PrefillRates, RateParameters, RateSample
from router.pods.load_table import PodLoadTable
from tests.support.router.pricing import load

PARAMETERS = RateParameters(
    prior_tokens_per_s=1000.0,
    window=8,
    observations_min=4,
    prior_weight=2.0,
    tokens_min=100,
    bound_factor=100.0,
)
NO_PRIOR_WEIGHT = replace(PARAMETERS, prior_weight=0.0)


def fleet(
    parameters: RateParameters = PARAMETERS,
    load_table: PodLoadTable | None = None,
    **observed: list[tuple[int, float]],
) -> PrefillRates:
    """Return the rates after these observations by pod, as (tokens, seconds)."""
    load_table = load_table or PodLoadTable()
    load_table.declare(["a", *observed])
    rates = PrefillRates(parameters, load_table)
    for pod, observations in observed.items():
        for tokens, seconds in observations:
            rates.observe(pod, tokens, seconds, now_s=0.0)
    return rates


def learnt(*observations: tuple[int, float], parameters: RateParameters = NO_PRIOR_WEIGHT) -> float:
    """Return the estimate for a pod after these observations of (tokens, seconds)."""
    return fleet(parameters, a=list(observations)).load_table.prefill_tokens_per_s("a")


def test_prior_is_used_below_the_minimum_of_observations() -> None:
    """A pod's estimate is the prior until it has `observations_min` observations."""
    assert learnt(*[(1000, 0.5)] * 3) == 1000.0
    assert learnt(*[(1000, 0.5)] * 4) == 2000.0


def test_outliers_do_not_change_the_estimate() -> None:
    """One far too slow and one far too fast prefill do not change the estimate."""
    parameters = replace(NO_PRIOR_WEIGHT, window=16)
    assert learnt(*[(1000, 0.5)] * 10, (1000, 500.0), (1000, 1e-6), parameters=parameters) == 2000.0


def test_window_of_new_observations_replaces_old_ones() -> None:
    """After `window` new observations the old ones no longer count."""
    assert learnt(*[(1000, 0.5)] * 50, *[(1000, 2.0)] * 8) == 500.0


def test_short_prefills_and_impossible_times_are_ignored() -> None:
    """Prefills below `tokens_min` tokens or with no positive duration are ignored."""
    assert learnt(*[(99, 1.0)] * 20, *[(1000, 0.0)] * 20, *[(1000, -1.0)] * 20) == 1000.0


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(allow_nan=False)), max_size=40))
def test_estimate_stays_within_its_bounds(observations: list[tuple[int, float]]) -> None:
    """The estimate stays within [prior / bound_factor, prior * bound_factor] for any observations."""
    assert 10.0 * 0.999 <= learnt(*observations, parameters=PARAMETERS) <= 100_000.0 * 1.001


def test_few_observations_are_shrunk_to_the_fleets_median() -> None:
    """A pod's median is weighted by its number of observations against the fleet's median."""
    fast = {name: [(1000, 0.5)] * 8 for name in "bcd"}
    few = fleet(a=[(1000, 4.0)] * 4, **fast).load_table.prefill_tokens_per_s("a")
    more = fleet(a=[(1000, 4.0)] * 8, **fast).load_table.prefill_tokens_per_s("a")
    assert few == pytest.approx(250.0 ** (4 / 6) * 2000.0 ** (2 / 6), rel=0.02)
    assert 250.0 < more < few


def test_one_outlier_pod_does_not_change_other_pods() -> None:
    """A pod a thousand times too slow or fast changes neither other pods' rates nor that of a new pod."""
    normal = {name: [(1000, 0.5)] * 8 for name in "bcd"}
    for bad in ([(1000, 500.0)] * 8, [(1000, 5e-6)] * 8):
        rates = fleet(a=bad, **normal)
        assert [rates.load_table.prefill_tokens_per_s(pod) for pod in ("b", "c", "new")] == pytest.approx(
            [2000.0] * 3, rel=0.06
        )


def test_reported_rate_takes_precedence_over_the_fleet() -> None:
    """A rate that the engine reports is used until the pod is observed, and as its prior afterwards."""
    load_table = PodLoadTable()
    rates = fleet(load_table=load_table, b=[(1000, 0.5)] * 8)
    load_table.scraped("a", load(prefill_tokens_per_s=300.0))
    assert rates.load_table.prefill_tokens_per_s("a") == 300.0
    for _ in range(4):
        rates.observe("a", 1000, 1.0, now_s=0.0)
    assert rates.load_table.prefill_tokens_per_s("a") == pytest.approx(1000.0 ** (4 / 6) * 300.0 ** (2 / 6))


def test_pod_without_reported_rate_uses_the_median_of_reported_ones() -> None:
    """A new pod's rate is the median of the rates that other engines report, not the configured prior."""
    load_table = PodLoadTable()
    rates = fleet(load_table=load_table, a=[], b=[], fresh=[])
    load_table.scraped("a", load(prefill_tokens_per_s=100.0))
    load_table.scraped("b", load(prefill_tokens_per_s=120.0))
    assert rates.load_table.prefill_tokens_per_s("fresh") == rates.load_table.fleet_tokens_per_s == 110.0


def test_rates_are_per_pod_and_dropped_with_the_pod() -> None:
    """Each pod has a rate of its own; after its removal it starts again from the fleet's rate."""
    rates = fleet(NO_PRIOR_WEIGHT, a=[(1000, 0.5)] * 4, b=[(1000, 2.0)] * 4, c=[])
    assert [rates.load_table.prefill_tokens_per_s(pod) for pod in "abc"] == [2000.0, 500.0, 1250.0]
    rates.keep(["b", "c"])
    assert rates.load_table.prefill_tokens_per_s("a") == rates.load_table.fleet_tokens_per_s == 750.0, (
        "the configured prior is averaged with the median of a single pod"
    )


def test_slow_pod_returns_to_the_fleets_rate_after_expiry() -> None:
    """Observations expire, so that a slow pod gets requests again and can show that it has recovered."""
    parameters = replace(NO_PRIOR_WEIGHT, age_max_s=60.0)
    rates = fleet(parameters, a=[(1000, 10.0)] * 4, b=[(1000, 0.5)] * 4)
    for _ in range(4):
        rates.observe("b", 1000, 0.5, now_s=50.0)
    rates.expire(60.0)
    assert [rates.load_table.prefill_tokens_per_s(pod) for pod in "ab"] == [100.0, 2000.0]
    rates.expire(61.0)
    assert [rates.load_table.prefill_tokens_per_s(pod) for pod in "ab"] == [
        rates.load_table.fleet_tokens_per_s,
        2000.0,
    ]
    assert rates.load_table.fleet_tokens_per_s == 1525.0


def test_only_unexpired_observations_count() -> None:
    """Once old observations have expired, the median is that of the remaining ones."""
    rates = fleet(NO_PRIOR_WEIGHT, a=[(1000, 0.5)] * 4)
    for _ in range(4):
        rates.observe("a", 1000, 2.0, now_s=100.0)
    assert rates.load_table.prefill_tokens_per_s("a") == rates.load_table.fleet_tokens_per_s, (
        "the observations contradict each other"
    )
    rates.expire(NO_PRIOR_WEIGHT.age_max_s + 1.0)
    assert rates.load_table.prefill_tokens_per_s("a") == 500.0


def test_idle_fleet_keeps_its_rate() -> None:
    """When all observations have expired, the fleet keeps its last rate instead of the configured prior."""
    slow = {name: [(1000, 4.0)] * 4 for name in "abcde"}
    rates = fleet(NO_PRIOR_WEIGHT, **slow)
    for pod in "ab":
        for _ in range(4):
            rates.observe(pod, 1000, 4.0, now_s=100.0)
    rates.expire(NO_PRIOR_WEIGHT.age_max_s + 1.0)
    rates.expire(NO_PRIOR_WEIGHT.age_max_s + 101.0)
    assert [rates.load_table.prefill_tokens_per_s(pod) for pod in ("a", "e", "new")] == [250.0] * 3


def test_bounds_follow_the_reported_rate() -> None:
    """The bounds are relative to the reported rate, even far from the configured prior."""
    load_table = PodLoadTable()
    parameters = replace(PARAMETERS, prior_tokens_per_s=15_000.0)
    rates = fleet(parameters, load_table, a=[], b=[])
    for pod in "ab":
        load_table.scraped(pod, load(prefill_tokens_per_s=20.0))
    for _ in range(4):
        rates.observe("a", 400, 20.0, now_s=0.0)
    assert [rates.load_table.prefill_tokens_per_s(pod) for pod in ("a", "b", "new")] == pytest.approx(
        [20.0] * 3
    )


@pytest.mark.parametrize(("reported", "expected"), [(None, 1000.0), (300.0, 300.0)])
def test_upper_bound_does_not_raise_a_rate(reported: float | None, expected: float) -> None:
    """Prefills that a cache may have shortened do not raise a rate above that of an unobserved pod."""
    load_table = PodLoadTable()
    rates = fleet(NO_PRIOR_WEIGHT, load_table, a=[])
    if reported is not None:
        load_table.scraped("a", load(prefill_tokens_per_s=reported))
    for _ in range(20):
        rates.observe("a", 1000, 0.1, 0.0, RateSample.UPPER_BOUND)
    assert rates.load_table.prefill_tokens_per_s("a") == expected
    assert rates.load_table.fleet_tokens_per_s == expected


def test_upper_bound_below_the_expected_rate_counts() -> None:
    """An upper bound lowers a rate, and can raise it again up to the configured prior."""
    rates = fleet(NO_PRIOR_WEIGHT, a=[])
    for seconds, expected in ((5.0, 200.0), (0.1, 1000.0)):
        for _ in range(NO_PRIOR_WEIGHT.window):
            rates.observe("a", 1000, seconds, 0.0, RateSample.UPPER_BOUND)
        assert rates.load_table.prefill_tokens_per_s("a") == expected


def test_unusable_sample_is_ignored() -> None:
    """A prefill whose uncached tokens are unknown changes no estimate."""
    rates = fleet(NO_PRIOR_WEIGHT, a=[])
    for _ in range(20):
        rates.observe("a", 1000, 5.0, 0.0, RateSample.NONE)
    assert rates.load_table.prefill_tokens_per_s("a") == 1000.0


def shares(speeds: dict[str, float], requests: int, seed: int, scatter: float = 0.5) -> dict[str, float]:
    """Return each pod's share of requests that are sent one by one to the pod with the highest estimate.

    Args:
        speeds: True tokens per second by pod.
        scatter: Standard deviation of the logarithm of a prefill's time.
    """
    random, load_table, picks = Random(seed), PodLoadTable(), Counter[str]()
    load_table.declare(list(speeds))
    rates = PrefillRates(RateParameters(), load_table)
    for number in range(requests):
        estimates = {pod: rates.load_table.prefill_tokens_per_s(pod) for pod in speeds}
        pod = random.choice([pod for pod in estimates if estimates[pod] == max(estimates.values())])
        picks[pod] += 1
        rates.observe(pod, 1000, 1000 / speeds[pod] * random.lognormvariate(0.0, scatter), float(number))
        if number % 5 == 0:
            rates.expire(float(number))
    return {pod: picks[pod] / requests for pod in speeds}


@pytest.mark.parametrize("seed", range(8))
def test_equal_pods_share_a_light_load(seed: int) -> None:
    """A pod that seems slower than an equal one by chance still gets requests."""
    assert min(shares({"a": 2000.0, "b": 2000.0}, 688, seed).values()) > 0.3


@pytest.mark.parametrize("seed", range(8))
def test_faster_pod_is_preferred(seed: int) -> None:
    """A pod of twice the rate gets most requests, the slower one still some."""
    found = shares({"a": 2000.0, "b": 1000.0}, 1000, seed)
    assert 0.75 < found["a"] < 1.0


def test_insignificant_difference_keeps_the_fleets_rate() -> None:
    """Observations on both sides of the fleet's rate keep it; observations on one side change it."""
    rates = fleet(PARAMETERS, a=[(1000, 0.3)] * 4 + [(1000, 0.6)] * 4, b=[(1000, 0.5)] * 8)
    assert rates.load_table.prefill_tokens_per_s("a") == rates.load_table.fleet_tokens_per_s
    slow = fleet(PARAMETERS, a=[(1000, 0.6)] * 8, b=[(1000, 0.5)] * 8, c=[(1000, 0.5)] * 8)
    assert slow.load_table.prefill_tokens_per_s("a") < slow.load_table.fleet_tokens_per_s


def test_observations_expire_with_those_of_the_fleet() -> None:
    """A pod without requests returns to the fleet's rate after enough observations of other pods."""
    rates = fleet(NO_PRIOR_WEIGHT, a=[(1000, 2.0)] * 8, b=[(1000, 0.5)] * 8)
    for _ in range(4):
        rates.observe("b", 1000, 0.5, now_s=1.0)
    rates.expire(1.0)
    assert rates.load_table.prefill_tokens_per_s("a") == 500.0
    rates.observe("b", 1000, 0.5, now_s=1.0)
    rates.expire(1.0)
    assert rates.load_table.prefill_tokens_per_s("a") == rates.load_table.fleet_tokens_per_s


def test_unchanged_reported_rate_of_an_unobserved_pod_is_replaced() -> None:
    """A slow reported rate of an unobserved pod is replaced by the fleet's until it changes."""
    load_table = PodLoadTable()
    load_table.declare(["a", "b"])
    rates = PrefillRates(NO_PRIOR_WEIGHT, load_table)
    load_table.scraped("a", load(prefill_tokens_per_s=250.0))
    load_table.scraped("b", load(prefill_tokens_per_s=1000.0))
    for expected in (250.0, 1000.0):
        rates.expire(1.0)
        # Its metrics keep reporting the same rate.
        load_table.scraped("a", load(prefill_tokens_per_s=250.0))
        assert rates.load_table.prefill_tokens_per_s("a") == expected
        for _ in range(NO_PRIOR_WEIGHT.window + 1):
            rates.observe("b", 1000, 1.0, now_s=1.0)
    load_table.scraped("a", load(prefill_tokens_per_s=300.0))
    rates.expire(1.0)
    assert rates.load_table.prefill_tokens_per_s("a") == 300.0


def test_reported_rate_is_kept_while_the_pod_is_observed() -> None:
    """An unchanged reported rate stays in use while the pod gets requests."""
    load_table = PodLoadTable()
    load_table.declare(["a", "b"])
    rates = PrefillRates(NO_PRIOR_WEIGHT, load_table)
    load_table.scraped("a", load(prefill_tokens_per_s=250.0))
    for _ in range(4 * NO_PRIOR_WEIGHT.window):
        rates.observe("b", 1000, 1.0, now_s=1.0)
        rates.observe("a", 1000, 4.0, now_s=1.0)
        rates.expire(1.0)
    assert load_table.reported_tokens_per_s("a") == 250.0
