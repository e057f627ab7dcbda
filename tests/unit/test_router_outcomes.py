"""How news of a request reaches ledger, rates, explain and metrics, whoever brings it."""

from __future__ import annotations

import msgspec
import pytest

from router.outcomes import ACCESS_LOG, REPORT
from router.rates import RateParameters
from tests.unit.router_support import Bench, completion, long_text, ready_pod

A = ready_pod("10.0.0.1:8000")
TEXT = long_text(400)


def routed(request_id: str = "r") -> Bench:
    """A bench with one request in flight since 10.0 s."""
    bench = Bench().with_pods(A)
    bench.router.route(completion(request_id, TEXT), 10.0)
    return bench


def test_an_end_is_taken_once_and_named_by_its_source() -> None:
    """The first source that tells of an end counts, the second finds nothing."""
    bench = routed()
    assert bench.outcomes.ended("r", ACCESS_LOG, 12.0) is not None
    assert bench.outcomes.ended("r", REPORT, 13.0) is None
    assert bench.sample("kvroute_router_request_ends_total", source="access_log", outcome="done") == 1
    assert bench.sample("kvroute_router_request_ends_total", source="report", outcome="done") == 0
    assert bench.index.settled == ["r"]


def test_a_failure_ends_the_speculation_too() -> None:
    """A failed request leaves neither load nor assumed blocks behind."""
    bench = routed()
    bench.outcomes.ended("r", ACCESS_LOG, 12.0, failed=True)
    assert (len(bench.ledger), bench.index.speculative) == (0, {})
    assert bench.sample("kvroute_router_request_ends_total", source="access_log", outcome="failed") == 1


def test_an_idle_pods_prefills_teach_its_rate() -> None:
    """Requests that found nobody queued move the estimate, those that queued do not."""
    bench = Bench().with_pods(A)
    for number in range(6):
        text = long_text(400, number)
        decision = bench.router.route(completion(f"r{number}", text), 10.0 * number)
        queued = bench.router.route(completion(f"q{number}", long_text(400, 100 + number)), 10.0 * number)
        bench.outcomes.stored(A.address, bench.keys(text), 10.0 * number + 0.5)
        bench.outcomes.stored(A.address, bench.keys(long_text(400, 100 + number)), 10.0 * number + 9.0)
        for done in (decision, queued):
            bench.outcomes.ended(done.request_id, REPORT, 10.0 * number + 9.5)
    own, prior = 2 * decision.prompt_tokens, RateParameters().prior_tokens_per_s
    # Six observations weigh against four of the fleet's median, which is of this pod and the prior.
    expected = own**0.6 * ((own + prior) / 2) ** 0.4
    assert bench.rates.tokens_per_s(A.address) == pytest.approx(expected, rel=0.05)


def test_a_reported_first_token_is_known_until_the_end() -> None:
    """A first token is news once, is then acknowledged, and is unknown of a stranger."""
    bench = routed()
    assert bench.outcomes.first_token("r", REPORT, 11.0)
    assert bench.outcomes.first_token("r", REPORT, 11.0)
    assert not bench.outcomes.first_token("stranger", REPORT, 11.0)
    assert bench.sample("kvroute_router_prefill_end_seconds_count", source="report") == 1


def test_the_clock_ends_what_nobody_tells_of() -> None:
    """A prefill ends by its expected time without ending its speculation; a life ends with it."""
    bench = routed()
    bench.outcomes.expire(60.0)
    assert (bench.ledger.work(A.address).decoding, bench.index.settled) == (1, [])
    bench.outcomes.expire(10.0 + 600.0)
    assert (len(bench.ledger), bench.index.settled) == (0, ["r"])


def test_explain_tells_a_requests_whole_story() -> None:
    """A record holds a decision's grounds, who ended prefill and request, and what was delivered."""
    bench = routed()
    bench.outcomes.stored(A.address, bench.keys(TEXT), 10.25)
    bench.outcomes.ended("r", REPORT, 12.0, cached_tokens=0)
    record = bench.explain.one("r")
    assert record is not None
    assert msgspec.json.decode(msgspec.json.encode(record)) == record
    assert (record["pod"], record["pod_name"]) == (A.address, "pod-8000")
    assert record["prefill_end"] == {"source": "blocks", "after_s": 0.25}
    assert record["end"] == {"source": "report", "after_s": 2.0, "failed": False}
    assert (record["predicted_cached_tokens"], record["delivered_cached_tokens"]) == (0, 0)
    assert record["candidates"][0]["uncached_tokens"] == record["prompt_tokens"]


def test_predictions_are_compared_with_what_was_delivered() -> None:
    """Predicted and delivered tokens are counted for the same requests only."""
    bench = Bench().with_pods(A)
    bench.index.hold(A.address, bench.keys(TEXT))
    predicted = bench.router.route(completion("r", TEXT), 0.0).primary.cached_tokens
    bench.router.route(completion("untold", TEXT), 0.0)
    bench.outcomes.ended("r", REPORT, 1.0, cached_tokens=predicted - 16)
    assert bench.sample("kvroute_router_compared_predicted_cached_tokens_total") == predicted
    assert bench.sample("kvroute_router_delivered_cached_tokens_total") == predicted - 16
    assert bench.sample("kvroute_router_predicted_cached_tokens_total") > predicted
    bench.outcomes.ended("r", REPORT, 2.0, cached_tokens=predicted)
    assert bench.sample("kvroute_router_compared_predicted_cached_tokens_total") == predicted


def test_only_the_last_decisions_are_kept() -> None:
    """The ring keeps its capacity, newest first, and forgets the oldest."""
    bench = Bench().with_pods(A)
    for number in range(120):
        bench.router.route(completion(f"r{number}", "hi"), 0.0)
    assert [record["request_id"] for record in bench.explain.latest(2)] == ["r119", "r118"]
    assert len(bench.explain.latest(1000)) == 100
    assert bench.explain.one("r19") is None
