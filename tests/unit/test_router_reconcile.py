"""Requests whose ends nobody told are ended by the engines' own counts, and nobody else's are."""

from __future__ import annotations

from dataclasses import replace

from router.feedback.lifecycle import RESPONSE, Reconciler
from router.pods.engine_load import EngineLoad
from router.pods.pod_set import Pod
from tests.unit.router_support import Bench, completion, long_text, ready_pod

A = ready_pod("10.0.0.1:8000")


def told(requests: int | None, scraped_s: float) -> dict[str, Pod]:
    """The pod after it told how many requests it has."""
    load = EngineLoad(waiting=0, running=requests, kv_usage=0.0, kv_capacity_tokens=None, scraped_s=scraped_s)
    return {A.address: replace(A, load=load)}


def in_flight(count: int) -> tuple[Bench, Reconciler]:
    """Requests that were dispatched at 0 s."""
    bench = Bench().with_pods(A)
    for number in range(count):
        bench.router.route(completion(f"r{number}", f"{number} hello"), 0.0)
    return bench, Reconciler(bench.outcomes)


def test_what_an_engine_does_not_have_is_ended_a_moment_after_it_told() -> None:
    """Two of three requests are gone from the engine: a second later the oldest two are ended."""
    bench, reconciler = in_flight(3)
    reconciler.look(told(1, 10.0), 10.1)
    reconciler.look(told(1, 10.0), 10.9)
    assert len(bench.ledger) == 3
    reconciler.look(told(1, 10.0), 11.1)
    assert len(bench.ledger) == 1
    assert bench.sample("kvroute_router_request_ends_total", source="scrape", outcome="failed") == 2
    assert bench.index.settled == ["r0", "r1"]


def test_the_older_count_is_kept_until_it_can_be_judged() -> None:
    """A pod that is asked more often than the delay is compared all the same."""
    bench, reconciler = in_flight(1)
    for tenth in range(100, 112):
        reconciler.look(told(0, tenth / 10), tenth / 10 + 0.01)
    assert len(bench.ledger) == 0


def test_a_count_that_was_old_when_first_seen_is_not_judged() -> None:
    """A pod that has not told anything new, or never told, ends nothing."""
    bench, reconciler = in_flight(1)
    reconciler.look(told(0, 10.0), 20.0)
    reconciler.look({A.address: A}, 20.1)
    reconciler.look(told(0, 10.0), 22.0)
    assert len(bench.ledger) == 1
    reconciler.look({}, 23.0)


def test_what_was_sent_to_a_pod_that_went_away_is_over_a_minute_later() -> None:
    """Its gateway may be gone as well, so nobody tells; a pod that comes back in time keeps its requests."""
    bench, reconciler = in_flight(2)
    reconciler.look({A.address: A}, 10.0)
    reconciler.look({}, 11.0)
    reconciler.look({A.address: A}, 70.0)
    reconciler.look({}, 72.0)
    reconciler.look({}, 131.0)
    assert len(bench.ledger) == 2
    reconciler.look({}, 132.5)
    assert len(bench.ledger) == 0
    assert bench.sample("kvroute_router_request_ends_total", source="scrape", outcome="failed") == 2


def test_half_a_count_is_not_judged() -> None:
    """An engine that tells its queue and not what it computes has not told how many requests it has."""
    bench, reconciler = in_flight(1)
    reconciler.look(told(None, 10.0), 10.1)
    reconciler.look(told(None, 10.0), 11.2)
    assert len(bench.ledger) == 1


def test_an_engine_without_requests_has_no_queue() -> None:
    """A request that could have its first token when the page was asked for waits no more; it may go on."""
    bench, reconciler = in_flight(1)
    load = told(0, 0.6)[A.address].load
    assert load is not None
    for asked_s, awaiting in ((0.2, 1), (0.6, 0)):
        reconciler.look({A.address: replace(A, load=replace(load, asked_s=asked_s))}, 0.7)
        assert bench.ledger.board.work(A.address).awaiting == awaiting
    assert bench.ledger.board.work(A.address).decoding == 1
    assert bench.sample("kvroute_router_prefill_end_seconds_count", source="scrape") == 1
    assert bench.index.settled == []
    bench.outcomes.ended("r0", RESPONSE, 0.8)
    assert len(bench.ledger) == 0


def test_a_page_says_nothing_of_what_could_not_be_on_it() -> None:
    """A long prefill's first step is not over, and a busy engine, or half a page, ends nobody's wait."""
    bench = Bench().with_pods(A)
    decision = bench.router.route(completion("long", long_text(4000)), 0.0)
    expected_s = decision.primary.own_prefill_s
    reconciler, load = Reconciler(bench.outcomes), told(0, 0.0)[A.address].load
    assert load is not None
    for page in (
        replace(load, asked_s=2 * expected_s + 0.4),
        replace(load, running=1, asked_s=100.0),
        replace(load, running=None, asked_s=100.0),
        load,
    ):
        reconciler.look({A.address: replace(A, load=page)}, 0.1)
        assert bench.ledger.board.work(A.address).awaiting == 1
    reconciler.look({A.address: replace(A, load=replace(load, asked_s=2 * expected_s + 0.6))}, 0.1)
    assert bench.ledger.board.work(A.address).awaiting == 0
