"""Learnt prefill rates: robust, bounded, per pod."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.rates import PrefillRates, RateParameters

PARAMETERS = RateParameters(
    prior_tokens_per_s=1000.0, window=8, observations_min=4, tokens_min=100, bound=100.0
)


def learnt(*observations: tuple[int, float]) -> float:
    """The estimate after observations of one pod."""
    rates = PrefillRates(PARAMETERS)
    for tokens, seconds in observations:
        rates.observe("a:1", tokens, seconds)
    return rates.tokens_per_s("a:1")


def test_the_prior_is_believed_until_there_are_enough_observations() -> None:
    """Three observations change nothing, the fourth does."""
    assert learnt(*[(1000, 0.5)] * 3) == 1000.0
    assert learnt(*[(1000, 0.5)] * 4) == 2000.0


def test_outliers_do_not_move_the_estimate() -> None:
    """A stalled and a wildly fast prefill among honest ones leave the median where it was."""
    assert learnt(*[(1000, 0.5)] * 5, (1000, 500.0), (1000, 1e-6)) == 2000.0


def test_a_pod_that_changed_its_speed_is_learnt_anew() -> None:
    """After a window of new observations the old ones are forgotten."""
    assert learnt(*[(1000, 0.5)] * 50, *[(1000, 2.0)] * 8) == 500.0


def test_short_prefills_and_impossible_times_are_not_observed() -> None:
    """What is shorter than the least, or took no time at all, teaches nothing."""
    assert learnt(*[(99, 1.0)] * 20, *[(1000, 0.0)] * 20, *[(1000, -1.0)] * 20) == 1000.0


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(allow_nan=False)), max_size=40))
def test_the_estimate_stays_within_its_bounds(observations: list[tuple[int, float]]) -> None:
    """No sequence of observations leaves [prior / 100, prior * 100]."""
    assert 10.0 <= learnt(*observations) <= 100_000.0


def test_pods_learn_apart_and_are_forgotten_when_gone() -> None:
    """One pod's speed says nothing of another's, and a vanished pod starts again from the prior."""
    rates = PrefillRates(PARAMETERS)
    for _ in range(4):
        rates.observe("a:1", 1000, 0.5)
    assert rates.tokens_per_s("a:2") == 1000.0
    rates.keep(["a:2"])
    assert rates.tokens_per_s("a:1") == 1000.0
