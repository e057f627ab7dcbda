"""Tests of the request lifecycle: reports from any source reach ledger, rates, decision log and metrics."""

from __future__ import annotations

from contextlib import closing
from typing import cast

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from indexer import IndexerConfig, KvIndexer, StreamState
from router.feedback.outcomes import ACCESS_LOG, REPORT, RESPONSE, DuplicateEnds
from router.inflight.dispatch import Dispatch
from router.inflight.rates import RateParameters, RateSample
from tests.support.router.bench import (
    TINY,
    TOKENIZER,
    Bench,
    PlainIndex,
    completion,
    ended,
    long_text,
    ready_pod,
)

A = ready_pod("10.0.0.1:8000")
TEXT = long_text(400)


def routed(request_id: str = "r") -> Bench:
    """Return a bench with one request, dispatched at 10 s."""
    bench = Bench().with_pods(A)
    bench.router.route(completion(request_id, TEXT), 10.0)
    return bench


def test_first_report_of_an_end_counts() -> None:
    """An end counts once, under the source that reports it first."""
    bench = routed()
    assert ended(bench.lifecycle, "r", ACCESS_LOG, 12.0) is not None
    assert ended(bench.lifecycle, "r", REPORT, 13.0) is None
    assert bench.sample("kvroute_router_request_ends_total", source="access_log", outcome="done") == 1
    assert bench.sample("kvroute_router_request_ends_total", source="report", outcome="done") == 0
    assert bench.index.settled == ["r"]


def test_failure_removes_load_and_speculative_blocks() -> None:
    """A failed request leaves neither load nor speculative blocks."""
    bench = routed()
    ended(bench.lifecycle, "r", ACCESS_LOG, 12.0, failed=True)
    assert (len(bench.ledger), bench.index.speculative) == (0, {})
    assert bench.sample("kvroute_router_request_ends_total", source="access_log", outcome="failed") == 1


def test_prefills_on_an_idle_pod_update_its_rate() -> None:
    """Requests that found an empty queue count in the rate; requests that waited do not."""
    bench = Bench().with_pods(A)
    for number in range(10):
        text = long_text(400, number)
        decision = bench.router.route(completion(f"r{number}", text), 10.0 * number)
        queued = bench.router.route(completion(f"q{number}", long_text(400, 100 + number)), 10.0 * number)
        bench.lifecycle.stored(A.address, bench.keys(text), 10.0 * number + 0.5)
        bench.lifecycle.stored(A.address, bench.keys(long_text(400, 100 + number)), 10.0 * number + 9.0)
        for done in (decision, queued):
            ended(bench.lifecycle, done.request_id, REPORT, 10.0 * number + 9.5)
    own, prior = 2 * decision.prompt_tokens, RateParameters().prior_tokens_per_s
    # Ten observations against a weight of four for the fleet's rate: the mean of this pod's and the prior.
    expected = own ** (10 / 14) * ((own + prior) / 2) ** (4 / 14)
    assert bench.rates.load_table.prefill_tokens_per_s(A.address) == pytest.approx(expected, rel=0.05)


def test_first_token_is_counted_once() -> None:
    """A first token counts once; repeated reports are acknowledged, those of unknown requests are not."""
    bench = routed()
    assert bench.lifecycle.first_token("r", REPORT, 11.0)
    assert bench.lifecycle.first_token("r", REPORT, 11.0)
    assert not bench.lifecycle.first_token("unknown", REPORT, 11.0)
    assert bench.sample("kvroute_router_prefill_end_seconds_count", source="report") == 1


def test_unreported_requests_time_out() -> None:
    """A prefill timeout keeps the request's speculative blocks; the end of its lifetime removes them."""
    bench = routed()
    bench.lifecycle.expire(60.0)
    assert (bench.ledger.load_table.work(A.address).decoding, bench.index.settled) == (1, [])
    bench.lifecycle.expire(10.0 + 600.0)
    assert (len(bench.ledger), bench.index.settled) == (0, ["r"])


def test_first_token_after_the_timeout_updates_the_rate() -> None:
    """A first token after the prefill timeout counts in the rate, and settles the speculative blocks."""
    bench = Bench().with_pods(A)
    bench.index.state = StreamState.STALE
    expected = bench.rates.load_table.prefill_tokens_per_s(A.address)
    for number in range(10):
        request_id, now_s = f"r{number}", 100.0 * number
        decision = bench.router.route(completion(request_id, long_text(400, number)), now_s)
        took_s = 4 * decision.primary.own_prefill_s + 1.0
        bench.lifecycle.expire(now_s + took_s)
        assert request_id not in bench.index.settled
        bench.lifecycle.first_token(request_id, RESPONSE, now_s + took_s, pod=A.address)
        assert bench.index.settled[-1] == request_id
        record = bench.decision_log.find(request_id)
        assert record is not None
        assert record["prefill_end"] == {"source": "response", "after_s": pytest.approx(took_s)}
        ended(bench.lifecycle, request_id, RESPONSE, now_s + took_s, pod=A.address)
    assert bench.rates.load_table.prefill_tokens_per_s(A.address) < expected / 2


def test_delay_of_the_last_block_is_measured() -> None:
    """The seconds between the first token and the later event of the last block go to the metrics."""
    bench = routed()
    bench.lifecycle.first_token("r", RESPONSE, 11.0, pod=A.address)
    bench.lifecycle.stored(A.address, bench.keys(TEXT), 11.25)
    bench.lifecycle.stored(A.address, bench.keys(TEXT), 12.0)
    labels = {"event": "first_token", "source": "blocks"}
    assert bench.sample("kvroute_router_told_late_seconds_count", **labels) == 1
    assert bench.sample("kvroute_router_told_late_seconds_sum", **labels) == 0.25
    assert bench.sample("kvroute_router_prefill_end_seconds_count", source="blocks") == 0


def test_requests_of_one_id_have_separate_predictions() -> None:
    """The first token of one of two requests in flight under one id does not answer the other."""
    bench = Bench().with_pods(A)
    bench.index.hold(A.address, bench.keys(TEXT)[:5])
    tokens = [
        bench.router.route(completion("r", TEXT), now_s).primary.cached_tokens for now_s in (10.0, 11.0)
    ]
    bench.lifecycle.first_token("r", RESPONSE, 12.0, pod=A.address)
    assert bench.ledger.answered_hit_tokens(A.address) == tokens[0] > 0
    assert bench.ledger.predicted_hit_tokens(A.address) == sum(tokens)


def test_requests_of_one_id_have_separate_speculative_blocks() -> None:
    """A request keeps its speculative blocks when another request of its id begins or ends."""
    now_s = [10.0]
    with closing(
        KvIndexer(IndexerConfig(block_tokens=16), registry=CollectorRegistry(), clock=lambda: now_s[0])
    ) as index:
        bench = Bench(index=cast(PlainIndex, index)).with_pods(A)
        texts = [long_text(200, seed) for seed in range(2)]

        def cached_tokens(text: str) -> int:
            keys = index.block_keys(TINY, TOKENIZER.encode(text))
            return 16 * int(index.match(keys, [A.address]).cached_blocks[0])

        for text in texts:
            bench.router.route(completion("r", text), now_s[0])
            now_s[0] += 0.02
        assert min(map(cached_tokens, texts)) > 0
        bench.lifecycle.first_token("r", RESPONSE, now_s[0], pod=A.address)
        now_s[0] += 0.06
        first, second = map(cached_tokens, texts)
    assert (first, second > 0) == (0, True)


def test_end_reported_before_the_pick_ends_the_request() -> None:
    """An end reported during a request's pick ends the request at once, with all its state."""
    seconds = iter([0.0, 3.0, 3.0])
    bench = Bench(clock=lambda: next(seconds)).with_pods(A)
    bench.index.hold(A.address, bench.keys(TEXT)[:5])
    ended(bench.lifecycle, "r", ACCESS_LOG, 11.0, failed=True)
    bench.router.route(completion("r", TEXT), 10.0)
    assert (len(bench.ledger), bench.index.speculative, bench.index.lost) == (0, {}, ["r"])
    assert bench.ledger.predicted_hit_tokens(A.address) == 0
    assert bench.sample("kvroute_router_request_ends_total", source="access_log", outcome="failed") == 1


def test_late_report_of_an_earlier_attempt_does_not_end_the_retry() -> None:
    """A report of an end from before the request's arrival, however late, does not end the request."""
    seconds = iter([0.0, 3.0, 3.0])
    bench = Bench(clock=lambda: next(seconds)).with_pods(A)
    ended(bench.lifecycle, "r", ACCESS_LOG, 11.0, failed=True, late_s=1.5)
    bench.router.route(completion("r", TEXT), 10.0)
    assert len(bench.ledger) == 1


def test_decision_record_contains_the_lifecycle() -> None:
    """A record has the decision, the sources and times of prefill end and end, and delivered tokens."""
    bench = routed()
    bench.lifecycle.stored(A.address, bench.keys(TEXT), 10.25)
    ended(bench.lifecycle, "r", REPORT, 12.0, cached_tokens=0)
    record = bench.decision_log.find("r")
    assert record is not None
    assert msgspec.json.decode(msgspec.json.encode(record)) == record
    assert (record["pod"], record["pod_name"]) == (A.address, "pod-8000")
    assert record["prefill_end"] == {"source": "blocks", "after_s": 0.25}
    assert record["end"] == {"source": "report", "after_s": 2.0, "failed": False}
    assert (record["predicted_cached_tokens"], record["delivered_cached_tokens"]) == (0, 0)
    assert record["candidates"][0]["uncached_tokens"] == record["prompt_tokens"]


def test_predictions_are_compared_with_what_was_delivered() -> None:
    """Predicted and delivered tokens are compared only for requests whose delivery is reported, once."""
    bench = Bench().with_pods(A)
    bench.index.hold(A.address, bench.keys(TEXT))
    predicted = bench.router.route(completion("r", TEXT), 0.0).primary.cached_tokens
    bench.router.route(completion("unreported", TEXT), 0.0)
    ended(bench.lifecycle, "r", REPORT, 1.0, cached_tokens=predicted - 16)
    assert bench.sample("kvroute_router_compared_predicted_cached_tokens_total") == predicted
    assert bench.sample("kvroute_router_delivered_cached_tokens_total") == predicted - 16
    assert bench.sample("kvroute_router_predicted_cached_tokens_total") > predicted
    ended(bench.lifecycle, "r", REPORT, 2.0, cached_tokens=predicted)
    assert bench.sample("kvroute_router_compared_predicted_cached_tokens_total") == predicted


def test_only_the_latest_decisions_are_kept() -> None:
    """The log keeps `capacity` decisions, lists the newest first and drops the oldest."""
    bench = Bench().with_pods(A)
    for number in range(120):
        bench.router.route(completion(f"r{number}", "hi"), 0.0)
    assert [record["request_id"] for record in bench.decision_log.latest(2)] == ["r119", "r118"]
    assert len(bench.decision_log.latest(1000)) == 100
    assert bench.decision_log.find("r19") is None


@pytest.mark.parametrize("source", [ACCESS_LOG, RESPONSE])
def test_rejected_request_leaves_no_prediction(source: str) -> None:
    """A request that the pod rejects with 4xx leaves no predicted hit and no expected blocks.

    Otherwise clients' mistakes would look like a lost cache or a tokenizer mismatch.
    """
    bench = Bench().with_pods(A)
    bench.index.hold(A.address, bench.keys(TEXT)[:5])
    assert bench.router.route(completion("r", TEXT), 10.0).primary.cached_tokens
    ended(bench.lifecycle, "r", source, 10.1, pod=A.address, refused=True)
    assert bench.sample("kvroute_router_request_ends_total", source=source, outcome="done") == 1
    assert bench.ledger.predicted_hit_tokens(A.address) == 0
    assert (bench.index.lost, bench.index.settled, len(bench.ledger)) == (["r"], ["r"], 0)


def test_duplicate_end_in_the_access_log_is_ignored() -> None:
    """The access log repeats an end of the response phase; it does not end a later request of the id."""
    bench = Bench().with_pods(A)
    for now_s in (10.0, 10.1, 10.2):
        bench.router.route(completion("r", TEXT), now_s)
    for now_s in (11.0, 11.1):
        assert ended(bench.lifecycle, "r", RESPONSE, now_s, pod=A.address) is not None
    for now_s in (12.0, 12.1):
        assert ended(bench.lifecycle, "r", ACCESS_LOG, now_s, pod=A.address) is None
    assert len(bench.ledger) == 1
    labels = {"event": "end", "source": "access_log"}
    assert bench.sample("kvroute_router_told_late_seconds_count", **labels) == 2
    assert ended(bench.lifecycle, "r", ACCESS_LOG, 12.2, pod=A.address) is not None


def sent() -> Dispatch:
    """Return a request sent to the pod at 0 s."""
    return Dispatch("r", A.address, 100, 0.0, 0.5, None, RateSample.NONE, 0.0)


def test_expected_duplicates_are_bounded_and_expire() -> None:
    """Beyond the capacity the oldest ids are dropped; a much later log entry is not a duplicate."""
    duplicates, known = DuplicateEnds(capacity=2), (sent(), False)
    for number in range(3):
        duplicates.expect(f"r{number}", 0.0, *known)
    assert len(duplicates) == 2
    assert [duplicates.consume(f"r{number}", 1.0, None) for number in range(3)] == [None, known, known]
    duplicates.expect("r", 2.0, *known)
    assert (duplicates.consume("r", 60.0, None), len(duplicates)) == (None, 0)


def test_dispatch_time_selects_among_requests_of_one_id_and_pod() -> None:
    """A report with a dispatch time, as of the response phase, applies to that request only."""
    bench = Bench().with_pods(A)
    first, second = (bench.router.route(completion("r", "hello " * 20), now_s) for now_s in (0.0, 1.0))
    assert bench.lifecycle.first_token("r", RESPONSE, 2.0, pod=A.address, dispatched_s=second.decided_s)
    assert bench.ledger.prefill_ended_s("r", A.address, first.decided_s) is None
    assert bench.ledger.prefill_ended_s("r", A.address, second.decided_s) == 2.0
    for _ in range(2):
        ended(bench.lifecycle, "r", RESPONSE, 3.0, pod=A.address, dispatched_s=second.decided_s)
        assert len(bench.ledger) == 1
    last = ended(bench.lifecycle, "r", RESPONSE, 4.0, pod=A.address, dispatched_s=first.decided_s)
    assert last is not None
    assert last.key == first.key
