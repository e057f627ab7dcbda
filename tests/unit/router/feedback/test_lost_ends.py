"""Tests of lost ends: requests beyond an engine's reported count are ended, and no others."""

from __future__ import annotations

from dataclasses import replace

from router.feedback.lifecycle import LostEndDetector
from router.feedback.outcomes import RESPONSE
from router.pods.engine_load import EngineLoad
from router.pods.pod_set import Pod
from tests.support.router.bench import Bench, completion, ended, long_text, ready_pod

A = ready_pod("10.0.0.1:8000")


def scraped(requests: int | None, scraped_s: float) -> dict[str, Pod]:
    """Return the pod after a scrape with this number of requests."""
    load = EngineLoad(waiting=0, running=requests, kv_usage=0.0, kv_capacity_tokens=None, scraped_s=scraped_s)
    return {A.address: replace(A, load=load)}


def in_flight(count: int) -> tuple[Bench, LostEndDetector]:
    """Return a bench with `count` requests dispatched at 0 s, and its detector."""
    bench = Bench().with_pods(A)
    for number in range(count):
        bench.router.route(completion(f"r{number}", f"{number} hello"), 0.0)
    return bench, LostEndDetector(bench.lifecycle)


def test_requests_beyond_the_count_end_after_a_delay() -> None:
    """One second after a scrape with one of three requests, the oldest two are ended."""
    bench, detector = in_flight(3)
    detector.check(scraped(1, 10.0), 10.1)
    detector.check(scraped(1, 10.0), 10.9)
    assert len(bench.ledger) == 3
    detector.check(scraped(1, 10.0), 11.1)
    assert len(bench.ledger) == 1
    assert bench.sample("kvroute_router_request_ends_total", source="scrape", outcome="failed") == 2
    assert bench.index.settled == ["r0", "r1"]


def test_scrapes_within_the_delay_do_not_postpone_the_check() -> None:
    """A pod that is scraped more often than the delay is compared by its older count."""
    bench, detector = in_flight(1)
    for tenth in range(100, 112):
        detector.check(scraped(0, tenth / 10), tenth / 10 + 0.01)
    assert len(bench.ledger) == 0


def test_old_or_missing_count_is_ignored() -> None:
    """A count that is old when first seen, or a pod without one, ends nothing."""
    bench, detector = in_flight(1)
    detector.check(scraped(0, 10.0), 20.0)
    detector.check({A.address: A}, 20.1)
    detector.check(scraped(0, 10.0), 22.0)
    assert len(bench.ledger) == 1
    detector.check({}, 23.0)


def test_requests_of_a_removed_pod_end_after_a_minute() -> None:
    """Requests of a pod end one minute after its removal, unless the pod returns in time."""
    bench, detector = in_flight(2)
    detector.check({A.address: A}, 10.0)
    detector.check({}, 11.0)
    detector.check({A.address: A}, 70.0)
    detector.check({}, 72.0)
    detector.check({}, 131.0)
    assert len(bench.ledger) == 2
    detector.check({}, 132.5)
    assert len(bench.ledger) == 0
    assert bench.sample("kvroute_router_request_ends_total", source="scrape", outcome="failed") == 2


def test_incomplete_count_is_ignored() -> None:
    """An engine that reports waiting but not running requests ends nothing."""
    bench, detector = in_flight(1)
    detector.check(scraped(None, 10.0), 10.1)
    detector.check(scraped(None, 10.0), 11.2)
    assert len(bench.ledger) == 1


def test_idle_engine_ends_the_waiting_of_requests() -> None:
    """A scrape without requests ends the waiting of a request whose first token was possible by then."""
    bench, detector = in_flight(1)
    load = scraped(0, 0.6)[A.address].load
    assert load is not None
    for asked_s, awaiting in ((0.2, 1), (0.6, 0)):
        detector.check({A.address: replace(A, load=replace(load, asked_s=asked_s))}, 0.7)
        assert bench.ledger.load_table.work(A.address).awaiting == awaiting
    assert bench.ledger.load_table.work(A.address).decoding == 1
    assert bench.sample("kvroute_router_prefill_end_seconds_count", source="scrape") == 1
    assert bench.index.settled == []
    ended(bench.lifecycle, "r0", RESPONSE, 0.8)
    assert len(bench.ledger) == 0


def test_early_or_incomplete_scrape_does_not_end_waiting() -> None:
    """A scrape before the expected first token, of a busy engine or without running requests is ignored."""
    bench = Bench().with_pods(A)
    decision = bench.router.route(completion("long", long_text(4000)), 0.0)
    expected_s = decision.primary.own_prefill_s
    detector, load = LostEndDetector(bench.lifecycle), scraped(0, 0.0)[A.address].load
    assert load is not None
    for page in (
        replace(load, asked_s=2 * expected_s + 0.4),
        replace(load, running=1, asked_s=100.0),
        replace(load, running=None, asked_s=100.0),
        load,
    ):
        detector.check({A.address: replace(A, load=page)}, 0.1)
        assert bench.ledger.load_table.work(A.address).awaiting == 1
    detector.check({A.address: replace(A, load=replace(load, asked_s=2 * expected_s + 0.6))}, 0.1)
    assert bench.ledger.load_table.work(A.address).awaiting == 0
