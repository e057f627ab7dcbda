"""Learnt slowdowns: robust, bounded, forgotten when old, and the prior's where nothing can be told."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.board import PodBoard
from router.decode_slowdown import DECODE_SLOWDOWN, Beside, SlowdownParameters, decode_slowdown
from router.rates import Lesson, PrefillRates, RateParameters
from tests.unit.pricing_support import IDLE, Known, priced

PARAMETERS = SlowdownParameters()
SEEDS = range(5)


def prefills(slowdown: float, decoding: range, seed: int, count: int = 256) -> list[Beside]:
    """Of a pod of 10,000 tokens/s: times scatter by a fifth, and one in twenty takes ten times as long."""
    random = Random(seed)
    observed = []
    for number in range(count):
        beside = random.choice(decoding)
        stalls = 10.0 if random.random() < 0.05 else 1.0
        seconds = 1e-4 * (1.0 + slowdown * beside) * math.exp(random.gauss(0.0, 0.2)) * stalls
        observed.append(Beside(float(number), seconds, beside))
    return observed


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("slowdown", [0.002, 0.008, 0.03, 0.1])
def test_a_known_slowdown_is_learnt(slowdown: float, seed: int) -> None:
    """From scattered prefills beside 0 to 40 requests it is found to a quarter, or half of the prior."""
    learnt = decode_slowdown(prefills(slowdown, range(41), seed), PARAMETERS)
    assert learnt == pytest.approx(slowdown, rel=0.25, abs=DECODE_SLOWDOWN / 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_where_as_many_decode_always_the_prior_stays(seed: int) -> None:
    """Nothing follows from times that were all measured beside as many, little from nearly as many."""
    assert decode_slowdown(prefills(0.1, range(30, 31), seed), PARAMETERS) == DECODE_SLOWDOWN
    nearly = decode_slowdown(prefills(0.1, range(30, 32), seed), PARAMETERS)
    assert nearly == pytest.approx(DECODE_SLOWDOWN, abs=0.04)


def test_a_few_prefills_are_shrunk_to_the_prior() -> None:
    """Twelve observations beside 0 and 4 requests tell less than two hundred of the same kind."""
    kinds = [Beside(0.0, 1e-4, 0.0), Beside(0.0, 1.4e-4, 4.0)]
    few, many = (decode_slowdown(kinds * count, PARAMETERS) for count in (6, 100))
    assert DECODE_SLOWDOWN < few < many < 0.1
    assert many == pytest.approx((3200 * 0.1 + 1000 * DECODE_SLOWDOWN) / 4200)


@given(
    st.lists(
        st.builds(Beside, st.just(0.0), st.floats(1e-12, 1e12), st.floats(0, 1e6)), min_size=3, max_size=60
    )
)
def test_the_slowdown_stays_within_its_bounds(observed: list[Beside]) -> None:
    """No observations leave [prior / 20, prior * 20]."""
    assert 0.999 / 20 <= decode_slowdown(observed, PARAMETERS) / DECODE_SLOWDOWN <= 20 * 1.001


def observed_rates(slowdown: float, *, lesson: Lesson = Lesson.RATE) -> tuple[PrefillRates, PodBoard]:
    """Rates of the pod "a:0" after prefills that ended from 0 s to 255 s."""
    board = PodBoard()
    board.declare(["a:0"])
    rates = PrefillRates(RateParameters(prior_tokens_per_s=10_000.0), board)
    for beside in prefills(slowdown, range(41), 0):
        rates.observe(
            "a:0", 1000, 1000 * beside.seconds_per_token, beside.ended_s, lesson, decoding=beside.decoding
        )
    return rates, board


def test_speed_and_slowdown_are_learnt_together() -> None:
    """What decoding requests take is no slow pod: its speed is that beside none, whatever decoded there."""
    rates, board = observed_rates(0.1)
    assert rates.tokens_per_s("a:0") < 5_000.0
    rates.review(255.0)
    assert rates.tokens_per_s("a:0") == pytest.approx(10_000.0, rel=0.15)
    assert rates.decode_slowdown("a:0") == pytest.approx(0.1, rel=0.25)
    assert board.pods["learnt_slowdown"].max() == rates.decode_slowdown("a:0")


def test_an_old_slowdown_is_forgotten() -> None:
    """With its observations too old, and with its pod gone, the prior is believed again."""
    for ends in (lambda rates: rates.review(PARAMETERS.life_s + 256.0), lambda rates: rates.keep([])):
        rates, board = observed_rates(0.1)
        rates.review(255.0)
        assert rates.decode_slowdown("a:0") > 0.05
        ends(rates)
        assert rates.decode_slowdown("a:0") == DECODE_SLOWDOWN
        assert board.pods["learnt_slowdown"].max() == 0.0


def test_a_cache_out_of_sight_teaches_no_slowdown() -> None:
    """Where it is not known what a pod computed, its time tells nothing of who slowed it."""
    rates, _ = observed_rates(0.1, lesson=Lesson.AT_MOST)
    rates.review(255.0)
    assert rates.decode_slowdown("a:0") == DECODE_SLOWDOWN


def test_a_learnt_slowdown_changes_a_pick() -> None:
    """Five decoding requests cost a tenth each where that is learnt, and the longer prefix goes to waste."""
    busy = Known(cached_tokens=100, decoding=5)
    assert priced(1000, busy, IDLE).best == 0
    found = priced(1000, replace(busy, slowdown=0.1), IDLE)
    assert found.best == 1
    assert found.part("slowdown") == [pytest.approx(1.5), 1.0]
