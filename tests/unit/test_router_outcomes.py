"""How news of a request reaches ledger, rates, explain and metrics, whoever brings it."""

from __future__ import annotations

from contextlib import closing
from typing import cast

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from indexer import IndexerConfig, KvIndexer, StreamState
from router.feedback.lifecycle import ACCESS_LOG, REPORT, RESPONSE, Echoes
from router.inflight.rates import RateParameters
from tests.unit.router_support import (
    TINY,
    TOKENIZER,
    Bench,
    PlainIndex,
    completion,
    long_text,
    ready_pod,
)

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
    for number in range(10):
        text = long_text(400, number)
        decision = bench.router.route(completion(f"r{number}", text), 10.0 * number)
        queued = bench.router.route(completion(f"q{number}", long_text(400, 100 + number)), 10.0 * number)
        bench.outcomes.stored(A.address, bench.keys(text), 10.0 * number + 0.5)
        bench.outcomes.stored(A.address, bench.keys(long_text(400, 100 + number)), 10.0 * number + 9.0)
        for done in (decision, queued):
            bench.outcomes.ended(done.request_id, REPORT, 10.0 * number + 9.5)
    own, prior = 2 * decision.prompt_tokens, RateParameters().prior_tokens_per_s
    # Ten observations weigh against four of the fleet's median, which is of this pod and the prior.
    expected = own ** (10 / 14) * ((own + prior) / 2) ** (4 / 14)
    assert bench.rates.board.prefill_tokens_per_s(A.address) == pytest.approx(expected, rel=0.05)


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
    assert (bench.ledger.board.work(A.address).decoding, bench.index.settled) == (1, [])
    bench.outcomes.expire(10.0 + 600.0)
    assert (len(bench.ledger), bench.index.settled) == (0, ["r"])


def test_a_pod_without_events_is_learnt_after_the_clocks_guess() -> None:
    """First tokens later than the clock believed teach how slow it is, and settle what was assumed."""
    bench = Bench().with_pods(A)
    bench.index.state = StreamState.STALE
    believed = bench.rates.board.prefill_tokens_per_s(A.address)
    for number in range(10):
        request_id, now_s = f"r{number}", 100.0 * number
        decision = bench.router.route(completion(request_id, long_text(400, number)), now_s)
        took_s = 4 * decision.primary.own_prefill_s + 1.0
        bench.outcomes.expire(now_s + took_s)
        assert request_id not in bench.index.settled
        bench.outcomes.first_token(request_id, RESPONSE, now_s + took_s, pod=A.address)
        assert bench.index.settled[-1] == request_id
        shown = bench.explain.one(request_id)
        assert shown is not None
        assert shown["prefill_end"] == {"source": "response", "after_s": pytest.approx(took_s)}
        bench.outcomes.ended(request_id, RESPONSE, now_s + took_s, pod=A.address)
    assert bench.rates.board.prefill_tokens_per_s(A.address) < believed / 2


def test_blocks_are_late_by_what_others_told_before() -> None:
    """How long after the first token its last block was announced goes to the metrics."""
    bench = routed()
    bench.outcomes.first_token("r", RESPONSE, 11.0, pod=A.address)
    bench.outcomes.stored(A.address, bench.keys(TEXT), 11.25)
    bench.outcomes.stored(A.address, bench.keys(TEXT), 12.0)
    told = {"event": "first_token", "source": "blocks"}
    assert bench.sample("kvroute_router_told_late_seconds_count", **told) == 1
    assert bench.sample("kvroute_router_told_late_seconds_sum", **told) == 0.25
    assert bench.sample("kvroute_router_prefill_end_seconds_count", source="blocks") == 0


def test_requests_under_one_id_keep_their_promises_apart() -> None:
    """Of two in flight, the first token of one says nothing of what the other's pod looked up."""
    bench = Bench().with_pods(A)
    bench.index.hold(A.address, bench.keys(TEXT)[:5])
    tokens = [
        bench.router.route(completion("r", TEXT), now_s).primary.cached_tokens for now_s in (10.0, 11.0)
    ]
    bench.outcomes.first_token("r", RESPONSE, 12.0, pod=A.address)
    assert bench.ledger.answered_hit_tokens(A.address) == tokens[0] > 0
    assert bench.ledger.predicted_hit_tokens(A.address) == sum(tokens)


def test_requests_under_one_id_keep_their_assumed_blocks_apart() -> None:
    """Neither the next request of an id nor the end of the one before takes blocks from one that waits."""
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
        bench.outcomes.first_token("r", RESPONSE, now_s[0], pod=A.address)
        now_s[0] += 0.06
        first, second = map(cached_tokens, texts)
    assert (first, second > 0) == (0, True)


def test_a_request_whose_end_came_before_its_pick_is_over() -> None:
    """An end that is told while its request is still decided ends it at once, with all that it left."""
    seconds = iter([0.0, 3.0, 3.0])
    bench = Bench(clock=lambda: next(seconds)).with_pods(A)
    bench.index.hold(A.address, bench.keys(TEXT)[:5])
    bench.outcomes.ended("r", ACCESS_LOG, 11.0, failed=True)
    bench.router.route(completion("r", TEXT), 10.0)
    assert (len(bench.ledger), bench.index.speculative, bench.index.lost) == (0, {}, ["r"])
    assert bench.ledger.predicted_hit_tokens(A.address) == 0
    assert bench.sample("kvroute_router_request_ends_total", source="access_log", outcome="failed") == 1


def test_the_end_of_what_was_refused_is_not_that_of_its_retry() -> None:
    """An end is an earlier attempt's where it was over before the request came, however late that is told."""
    seconds = iter([0.0, 3.0, 3.0])
    bench = Bench(clock=lambda: next(seconds)).with_pods(A)
    bench.outcomes.ended("r", ACCESS_LOG, 11.0, failed=True, late_s=1.5)
    bench.router.route(completion("r", TEXT), 10.0)
    assert len(bench.ledger) == 1


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


@pytest.mark.parametrize("source", [ACCESS_LOG, RESPONSE])
def test_what_a_pod_refused_it_has_not_looked_up(source: str) -> None:
    """An answer of 4xx is done, keeps no promise of cached tokens, and no block of it is awaited.

    Else a client's mistakes would look like a pod that lost its cache, or sees other tokens than we do.
    """
    bench = Bench().with_pods(A)
    bench.index.hold(A.address, bench.keys(TEXT)[:5])
    assert bench.router.route(completion("r", TEXT), 10.0).primary.cached_tokens
    bench.outcomes.ended("r", source, 10.1, pod=A.address, refused=True)
    assert bench.sample("kvroute_router_request_ends_total", source=source, outcome="done") == 1
    assert bench.ledger.predicted_hit_tokens(A.address) == 0
    assert (bench.index.lost, bench.index.settled, len(bench.ledger)) == (["r"], ["r"], 0)


def test_an_end_that_is_logged_once_more_ends_no_other_request_of_its_id() -> None:
    """What the response told, the access log tells again; by then its id may be in flight anew."""
    bench = Bench().with_pods(A)
    for now_s in (10.0, 10.1, 10.2):
        bench.router.route(completion("r", TEXT), now_s)
    for now_s in (11.0, 11.1):
        assert bench.outcomes.ended("r", RESPONSE, now_s, pod=A.address) is not None
    for now_s in (12.0, 12.1):
        assert bench.outcomes.ended("r", ACCESS_LOG, now_s, pod=A.address) is None
    assert len(bench.ledger) == 1
    told = {"event": "end", "source": "access_log"}
    assert bench.sample("kvroute_router_told_late_seconds_count", **told) == 2
    assert bench.outcomes.ended("r", ACCESS_LOG, 12.2, pod=A.address) is not None


def test_echoes_are_bounded_and_forgotten_in_time() -> None:
    """Where no log ever tells, the oldest ids go; what a log tells much later is of another request."""
    echoes = Echoes(capacity=2)
    for number in range(3):
        echoes.expect(f"r{number}", 0.0)
    assert len(echoes) == 2
    assert [echoes.take(f"r{number}", 1.0) for number in range(3)] == [False, True, True]
    echoes.expect("r", 2.0)
    assert (echoes.take("r", 60.0), len(echoes)) == (False, 0)


def test_requests_under_one_id_on_one_pod_are_told_apart_by_when_they_were_sent() -> None:
    """Who saw the pick itself, as the response phase has, tells of that request and of no namesake."""
    bench = Bench().with_pods(A)
    first, second = (bench.router.route(completion("r", "hello " * 20), now_s) for now_s in (0.0, 1.0))
    assert bench.outcomes.first_token("r", RESPONSE, 2.0, pod=A.address, sent_s=second.decided_s)
    assert bench.ledger.prefill_ended_s("r", A.address, first.decided_s) is None
    assert bench.ledger.prefill_ended_s("r", A.address, second.decided_s) == 2.0
    for _ in range(2):
        bench.outcomes.ended("r", RESPONSE, 3.0, pod=A.address, sent_s=second.decided_s)
        assert len(bench.ledger) == 1
    ended = bench.outcomes.ended("r", RESPONSE, 4.0, pod=A.address, sent_s=first.decided_s)
    assert ended is not None
    assert ended.key == first.key
