"""Failing pods: cost of failures, exclusion, trials, and what ends them."""

from __future__ import annotations

import pytest

from router.inflight.failures import (
    COST_MAX_S,
    COST_S,
    HALF_LIFE_S,
    OUT_AFTER,
    RETRY_MAX_S,
    RETRY_S,
    PodFailures,
)
from router.pods.load_table import PodLoadTable

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


class Failing(PodFailures):
    """Failures of two declared pods, and the present reasons for excluding them."""

    def __init__(self) -> None:
        self.excluded: dict[str, str] = {}
        table = PodLoadTable()
        table.declare([A, B])
        super().__init__(table, self.excluded.__setitem__)

    def cost_s(self, pod: str = A) -> float:
        """Return the cost of a pod's failures."""
        table = self.load_table
        return float(table.known(table.rows([pod]))["failure_s"][0])

    def fail(self, times: int, now_s: float = 0.0) -> None:
        """Fail requests of the first pod that are dispatched now."""
        for _ in range(times):
            self.failed(A, now_s, now_s)

    def try_once(self, now_s: float) -> None:
        """Begin the trials that are due, and send the first pod its request."""
        self.expire(now_s)
        assert self.trials == {A}
        assert (self.excluded[A], self.cost_s()) == ("", 0.0)
        self.dispatched(A, now_s)
        assert self.trials == set()
        assert self.excluded[A] == "its trial request has not ended"


def test_each_failure_in_a_row_doubles_the_cost() -> None:
    """Failures in a row cost seconds that double, up to a limit; other pods' costs are unchanged."""
    failing, costs = Failing(), []
    for number in range(OUT_AFTER):
        failing.fail(1, float(number))
        costs.append(failing.cost_s())
    assert costs == [*(COST_S * 2**n for n in range(OUT_AFTER - 1)), COST_MAX_S]
    assert failing.cost_s(B) == 0.0


def test_the_cost_decays() -> None:
    """The cost of a failure halves in each half-life."""
    failing = Failing()
    failing.fail(1)
    failing.expire(2 * HALF_LIFE_S)
    assert failing.cost_s() == pytest.approx(COST_S / 4)


def test_a_success_clears_the_failures() -> None:
    """A success of a request dispatched after the first failure clears them; an older one does not."""
    failing = Failing()
    failing.fail(OUT_AFTER - 1, 1.0)
    failing.succeeded(A, 0.9)
    assert failing.cost_s() > 0.0
    failing.succeeded(A, 1.0)
    assert failing.cost_s() == 0.0
    failing.fail(1, 2.0)
    assert (failing.cost_s(), failing.excluded[A]) == (COST_S, "")


def test_a_pod_out_is_tried_by_one_request_at_a_time() -> None:
    """After several failures in a row a pod is out; trials of one request follow at doubling intervals."""
    failing, now_s, intervals = Failing(), 0.0, []
    failing.fail(OUT_AFTER)
    assert failing.excluded == {A: f"{OUT_AFTER} or more requests in a row failed"}
    for _ in range(6):
        waited_s = 0.0
        while not failing.trials:
            waited_s += 1.0
            failing.expire(now_s + waited_s)
        now_s += waited_s
        intervals.append(waited_s)
        failing.try_once(now_s)
        failing.fail(1, now_s)
    assert intervals == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S, 8 * RETRY_S, RETRY_MAX_S, RETRY_MAX_S]


def test_a_success_of_the_trial_ends_the_exclusion() -> None:
    """The pod is back as soon as its trial request succeeds."""
    failing = Failing()
    failing.fail(OUT_AFTER)
    failing.try_once(RETRY_S)
    failing.succeeded(A, RETRY_S)
    assert (failing.excluded[A], failing.cost_s()) == ("", 0.0)


def test_a_trial_without_an_outcome_is_repeated() -> None:
    """A trial whose request ends without evidence is repeated after the same interval."""
    failing = Failing()
    failing.fail(OUT_AFTER)
    failing.try_once(RETRY_S)
    failing.try_once(2 * RETRY_S)


def test_failures_of_requests_sent_before_the_exclusion_count_once() -> None:
    """Failures of requests that were in flight when their pod was taken out do not delay its trial."""
    failing = Failing()
    failing.fail(OUT_AFTER, 1.0)
    for _ in range(100):
        failing.failed(A, 0.9, 2.0)
    failing.try_once(1.0 + RETRY_S)


def test_failures_at_other_routers_do_not_delay_a_trial() -> None:
    """Failures that other routers report exclude a pod, and do not count while it is excluded."""
    failing = Failing()
    for _ in range(10 * OUT_AFTER):
        failing.failed(A, 0.0, 0.0, shared=True)
    assert failing.excluded[A]
    failing.try_once(RETRY_S)


def test_only_declared_pods_are_kept() -> None:
    """Failures of unknown addresses are ignored; those of removed pods are forgotten."""
    failing = Failing()
    failing.failed("10.9.9.9:1", 0.0, 0.0)
    assert failing.cost_s("10.9.9.9:1") == 0.0
    failing.fail(OUT_AFTER - 1)
    failing.load_table.declare([B])
    failing.expire(1.0)
    failing.load_table.declare([A, B])
    failing.fail(1, 2.0)
    assert failing.cost_s() == COST_S


def test_other_routers_learn_own_failures_only() -> None:
    """Failures and the success that clears them are shared, unless another router reported them."""
    failing, shared = Failing(), []
    failing.share = lambda pod, failed: shared.append((pod, failed))
    failing.failed(A, 0.0, 0.0, shared=True)
    failing.fail(1)
    failing.succeeded(A, 1.0)
    failing.succeeded(A, 1.0)
    failing.fail(1)
    failing.succeeded(A, 1.0, shared=True)
    assert shared == [(A, True), (A, False), (A, True)]
