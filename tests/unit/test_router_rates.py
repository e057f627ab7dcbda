"""Learnt prefill rates: robust, bounded, per pod, and shrunk to the fleet's median."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.inflight.rates import Lesson, PrefillRates, RateParameters
from router.pods.load_table import PodBoard
from tests.unit.pricing_support import load

PARAMETERS = RateParameters(
    prior_tokens_per_s=1000.0, window=8, observations_min=4, belief=2.0, tokens_min=100, bound=100.0
)
NO_BELIEF = RateParameters(
    prior_tokens_per_s=1000.0, window=8, observations_min=4, belief=0.0, tokens_min=100, bound=100.0
)


def fleet(
    parameters: RateParameters = PARAMETERS,
    board: PodBoard | None = None,
    **observed: list[tuple[int, float]],
) -> PrefillRates:
    """Rates after observations by pod."""
    board = board or PodBoard()
    board.declare(["a", *observed])
    rates = PrefillRates(parameters, board)
    for pod, observations in observed.items():
        for tokens, seconds in observations:
            rates.observe(pod, tokens, seconds, now_s=0.0)
    return rates


def learnt(*observations: tuple[int, float], parameters: RateParameters = NO_BELIEF) -> float:
    """The estimate after observations of one pod."""
    return fleet(parameters, a=list(observations)).board.prefill_tokens_per_s("a")


def test_the_prior_is_believed_until_there_are_enough_observations() -> None:
    """Three observations change nothing, the fourth does."""
    assert learnt(*[(1000, 0.5)] * 3) == 1000.0
    assert learnt(*[(1000, 0.5)] * 4) == 2000.0


def test_outliers_do_not_move_the_estimate() -> None:
    """A stalled and a wildly fast prefill among honest ones leave the median where it was."""
    parameters = replace(NO_BELIEF, window=16)
    assert learnt(*[(1000, 0.5)] * 10, (1000, 500.0), (1000, 1e-6), parameters=parameters) == 2000.0


def test_a_pod_that_changed_its_speed_is_learnt_anew() -> None:
    """After a window of new observations the old ones are forgotten."""
    assert learnt(*[(1000, 0.5)] * 50, *[(1000, 2.0)] * 8) == 500.0


def test_short_prefills_and_impossible_times_are_not_observed() -> None:
    """What is shorter than the least, or took no time at all, teaches nothing."""
    assert learnt(*[(99, 1.0)] * 20, *[(1000, 0.0)] * 20, *[(1000, -1.0)] * 20) == 1000.0


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(allow_nan=False)), max_size=40))
def test_the_estimate_stays_within_its_bounds(observations: list[tuple[int, float]]) -> None:
    """No sequence of observations leaves [prior / 100, prior * 100]."""
    assert 10.0 * 0.999 <= learnt(*observations, parameters=PARAMETERS) <= 100_000.0 * 1.001


def test_a_few_observations_are_shrunk_to_the_fleets_median() -> None:
    """Four observations of a slow pod in a fast fleet weigh against two of the fleet's; eight weigh more."""
    fast = {name: [(1000, 0.5)] * 8 for name in "bcd"}
    few = fleet(a=[(1000, 4.0)] * 4, **fast).board.prefill_tokens_per_s("a")
    more = fleet(a=[(1000, 4.0)] * 8, **fast).board.prefill_tokens_per_s("a")
    assert few == pytest.approx(250.0 ** (4 / 6) * 2000.0 ** (2 / 6), rel=0.02)
    assert 250.0 < more < few


def test_one_bad_pod_neither_moves_others_nor_newcomers() -> None:
    """A pod a thousand times too slow leaves the others' speeds, and what is believed of a new one."""
    honest = {name: [(1000, 0.5)] * 8 for name in "bcd"}
    for bad in ([(1000, 500.0)] * 8, [(1000, 5e-6)] * 8):
        rates = fleet(a=bad, **honest)
        assert [rates.board.prefill_tokens_per_s(pod) for pod in ("b", "c", "new")] == pytest.approx(
            [2000.0] * 3, rel=0.06
        )


def test_what_a_pod_tells_of_itself_is_believed_before_the_fleet() -> None:
    """An engine's own account of its speed holds until it is observed, and counts as the prior then."""
    board = PodBoard()
    rates = fleet(board=board, b=[(1000, 0.5)] * 8)
    board.scraped("a", load(prefill_tokens_per_s=300.0))
    assert rates.board.prefill_tokens_per_s("a") == 300.0
    for _ in range(4):
        rates.observe("a", 1000, 1.0, now_s=0.0)
    assert rates.board.prefill_tokens_per_s("a") == pytest.approx(1000.0 ** (4 / 6) * 300.0 ** (2 / 6))


def test_a_pod_that_tells_nothing_yet_is_as_fast_as_those_that_do() -> None:
    """A fresh pod is not believed at the configured speed beside others that tell a slower one."""
    board = PodBoard()
    rates = fleet(board=board, a=[], b=[], fresh=[])
    board.scraped("a", load(prefill_tokens_per_s=100.0))
    board.scraped("b", load(prefill_tokens_per_s=120.0))
    assert rates.board.prefill_tokens_per_s("fresh") == rates.board.fleet_tokens_per_s == 110.0


def test_pods_learn_apart_and_are_forgotten_when_gone() -> None:
    """One pod's speed is not another's, and a vanished pod starts again from what is believed of any."""
    rates = fleet(NO_BELIEF, a=[(1000, 0.5)] * 4, b=[(1000, 2.0)] * 4, c=[])
    assert [rates.board.prefill_tokens_per_s(pod) for pod in "abc"] == [2000.0, 500.0, 1250.0]
    rates.keep(["b", "c"])
    assert rates.board.prefill_tokens_per_s("a") == rates.board.fleet_tokens_per_s == 750.0, (
        "what is configured counts beside one pod"
    )


def test_a_slow_pod_is_given_another_chance() -> None:
    """Old observations are forgotten: without requests a pod could never show that it recovered."""
    parameters = replace(NO_BELIEF, life_s=60.0)
    rates = fleet(parameters, a=[(1000, 10.0)] * 4, b=[(1000, 0.5)] * 4)
    for _ in range(4):
        rates.observe("b", 1000, 0.5, now_s=50.0)
    rates.review(60.0)
    assert [rates.board.prefill_tokens_per_s(pod) for pod in "ab"] == [100.0, 2000.0]
    rates.review(61.0)
    assert [rates.board.prefill_tokens_per_s(pod) for pod in "ab"] == [rates.board.fleet_tokens_per_s, 2000.0]
    assert rates.board.fleet_tokens_per_s == 1525.0


def test_what_is_young_enough_counts_alone() -> None:
    """Of old and new observations only the new ones make the median, once the old ones are too old."""
    rates = fleet(NO_BELIEF, a=[(1000, 0.5)] * 4)
    for _ in range(4):
        rates.observe("a", 1000, 2.0, now_s=100.0)
    assert rates.board.prefill_tokens_per_s("a") == rates.board.fleet_tokens_per_s, (
        "which of them is true is in doubt"
    )
    rates.review(NO_BELIEF.life_s + 1.0)
    assert rates.board.prefill_tokens_per_s("a") == 500.0


def test_a_fleet_at_rest_stays_as_fast_as_it_was() -> None:
    """When all observations have grown too old, the fleet is not taken for what was configured again."""
    slow = {name: [(1000, 4.0)] * 4 for name in "abcde"}
    rates = fleet(NO_BELIEF, **slow)
    for pod in "ab":
        for _ in range(4):
            rates.observe(pod, 1000, 4.0, now_s=100.0)
    rates.review(NO_BELIEF.life_s + 1.0)
    rates.review(NO_BELIEF.life_s + 101.0)
    assert [rates.board.prefill_tokens_per_s(pod) for pod in ("a", "e", "new")] == [250.0] * 3


def test_the_bounds_follow_what_a_pod_tells() -> None:
    """Pods that tell a speed far from the configured one, and are observed at it, stay believed at it."""
    board = PodBoard()
    parameters = replace(PARAMETERS, prior_tokens_per_s=15_000.0)
    rates = fleet(parameters, board, a=[], b=[])
    for pod in "ab":
        board.scraped(pod, load(prefill_tokens_per_s=20.0))
    for _ in range(4):
        rates.observe("a", 400, 20.0, now_s=0.0)
    assert [rates.board.prefill_tokens_per_s(pod) for pod in ("a", "b", "new")] == pytest.approx([20.0] * 3)


@pytest.mark.parametrize(("told", "believed"), [(None, 1000.0), (300.0, 300.0)])
def test_a_greatest_possible_speed_makes_no_pod_faster(told: float | None, believed: float) -> None:
    """What may have been served from a cache teaches nothing above what is believed of an unknown pod."""
    board = PodBoard()
    rates = fleet(NO_BELIEF, board, a=[])
    if told is not None:
        board.scraped("a", load(prefill_tokens_per_s=told))
    for _ in range(20):
        rates.observe("a", 1000, 0.1, 0.0, Lesson.AT_MOST)
    assert rates.board.prefill_tokens_per_s("a") == believed
    assert rates.board.fleet_tokens_per_s == believed


def test_a_greatest_possible_speed_below_what_is_believed_is_learnt() -> None:
    """A pod out of sight that is slow is learnt so; its fleet recovers with it, as far as was configured."""
    rates = fleet(NO_BELIEF, a=[])
    for seconds, expected in ((5.0, 200.0), (0.1, 1000.0)):
        for _ in range(NO_BELIEF.window):
            rates.observe("a", 1000, seconds, 0.0, Lesson.AT_MOST)
        assert rates.board.prefill_tokens_per_s("a") == expected


def test_what_teaches_nothing_is_not_observed() -> None:
    """A prefill whose tokens are not known changes no estimate."""
    rates = fleet(NO_BELIEF, a=[])
    for _ in range(20):
        rates.observe("a", 1000, 5.0, 0.0, Lesson.NOTHING)
    assert rates.board.prefill_tokens_per_s("a") == 1000.0


def shares(speeds: dict[str, float], requests: int, seed: int, scatter: float = 0.5) -> dict[str, float]:
    """Each pod's share of requests that come one by one and go to whoever is believed fastest; equals draw.

    Args:
        speeds: True tokens per second by pod.
        scatter: Standard deviation of the logarithm of a prefill's time.
    """
    random, board, picks = Random(seed), PodBoard(), Counter[str]()
    board.declare(list(speeds))
    rates = PrefillRates(RateParameters(), board)
    for number in range(requests):
        believed = {pod: rates.board.prefill_tokens_per_s(pod) for pod in speeds}
        pod = random.choice([pod for pod in believed if believed[pod] == max(believed.values())])
        picks[pod] += 1
        rates.observe(pod, 1000, 1000 / speeds[pod] * random.lognormvariate(0.0, scatter), float(number))
        if number % 5 == 0:
            rates.review(float(number))
    return {pod: picks[pod] / requests for pod in speeds}


@pytest.mark.parametrize("seed", range(8))
def test_equal_pods_share_a_light_load(seed: int) -> None:
    """Whoever seems slower by chance is asked again, so neither of two equal pods is left out."""
    assert min(shares({"a": 2000.0, "b": 2000.0}, 688, seed).values()) > 0.3


@pytest.mark.parametrize("seed", range(8))
def test_a_pod_of_half_the_speed_is_told_apart(seed: int) -> None:
    """Once known beyond doubt, the faster one is preferred; now and then the slower one is asked again."""
    found = shares({"a": 2000.0, "b": 1000.0}, 1000, seed)
    assert 0.75 < found["a"] < 1.0


def test_what_is_in_doubt_is_as_fast_as_any() -> None:
    """Observations on both sides of the fleet's speed say nothing against it; those on one side do."""
    rates = fleet(PARAMETERS, a=[(1000, 0.3)] * 4 + [(1000, 0.6)] * 4, b=[(1000, 0.5)] * 8)
    assert rates.board.prefill_tokens_per_s("a") == rates.board.fleet_tokens_per_s
    slow = fleet(PARAMETERS, a=[(1000, 0.6)] * 8, b=[(1000, 0.5)] * 8, c=[(1000, 0.5)] * 8)
    assert slow.board.prefill_tokens_per_s("a") < slow.board.fleet_tokens_per_s


def test_observations_age_with_those_of_the_fleet() -> None:
    """A pod that is not asked is as unknown as at first when the others have been observed for long."""
    rates = fleet(NO_BELIEF, a=[(1000, 2.0)] * 8, b=[(1000, 0.5)] * 8)
    for _ in range(4):
        rates.observe("b", 1000, 0.5, now_s=1.0)
    rates.review(1.0)
    assert rates.board.prefill_tokens_per_s("a") == 500.0
    rates.observe("b", 1000, 0.5, now_s=1.0)
    rates.review(1.0)
    assert rates.board.prefill_tokens_per_s("a") == rates.board.fleet_tokens_per_s


def test_a_told_speed_is_tried_again() -> None:
    """A pod that tells one slow speed, unobserved, counts as fast as the fleet until it tells another."""
    board = PodBoard()
    board.declare(["a", "b"])
    rates = PrefillRates(NO_BELIEF, board)
    board.scraped("a", load(prefill_tokens_per_s=250.0))
    board.scraped("b", load(prefill_tokens_per_s=1000.0))
    for believed in (250.0, 1000.0):
        rates.review(1.0)
        # Its page goes on to say the same.
        board.scraped("a", load(prefill_tokens_per_s=250.0))
        assert rates.board.prefill_tokens_per_s("a") == believed
        for _ in range(NO_BELIEF.window + 1):
            rates.observe("b", 1000, 1.0, now_s=1.0)
    board.scraped("a", load(prefill_tokens_per_s=300.0))
    rates.review(1.0)
    assert rates.board.prefill_tokens_per_s("a") == 300.0


def test_a_told_speed_holds_while_its_pod_is_observed() -> None:
    """A pod that is sent requests and goes on to tell the same speed stays believed at it."""
    board = PodBoard()
    board.declare(["a", "b"])
    rates = PrefillRates(NO_BELIEF, board)
    board.scraped("a", load(prefill_tokens_per_s=250.0))
    for _ in range(4 * NO_BELIEF.window):
        rates.observe("b", 1000, 1.0, now_s=1.0)
        rates.observe("a", 1000, 4.0, now_s=1.0)
        rates.review(1.0)
    assert board.told_tokens_per_s("a") == 250.0
