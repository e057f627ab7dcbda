"""The straight line from a request to its pick, with everything real but the sockets."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from indexer import StreamState
from router.errors import RequestError
from router.request import RequestKind, RouteRequest
from router.scrape import EngineLoad
from tests.unit.router_support import TINY, TOKENIZER, Bench, completion, long_text, ready_pod

A, B = ready_pod("10.0.0.1:8000"), ready_pod("10.0.0.2:8000")
TEXT = long_text(200)
LENGTH = len(TOKENIZER.encode(TEXT))
IDS = list(range(64))


def test_the_pod_that_holds_the_prefix_is_picked() -> None:
    """Of two idle pods the one with the prompt's blocks wins; predicted is what an engine can serve."""
    bench = Bench().with_pods(A, B)
    bench.index.hold(B.address, bench.keys(TEXT))
    decision = bench.router.route(completion("r", TEXT), 0.0)
    assert decision.primary.pod == B.address
    assert decision.primary.cached_tokens == (LENGTH - 1) // 16 * 16
    assert (decision.prompt_tokens, decision.degraded) == (LENGTH, None)
    assert decision.reason.startswith("longest cached prefix")


def test_a_whole_prompt_in_cache_still_computes_its_last_block() -> None:
    """For a prompt of exactly four blocks an engine serves at most three."""
    bench = Bench().with_pods(A)
    bench.index.hold(A.address, bench.index.block_keys(TINY, IDS))
    assert bench.router.route(completion("r", IDS), 0.0).primary.cached_tokens == 48


def test_a_burst_of_one_fresh_context_stays_together() -> None:
    """Picks see each other's speculative blocks: what shares a context with short tails goes where it is."""
    bench = Bench().with_pods(A, B)
    picks = [bench.router.route(completion(f"r{n}", f"{TEXT} {n}"), 0.0) for n in range(12)]
    assert {pick.primary.pod for pick in picks} == {picks[0].primary.pod}
    assert picks[1].primary.cached_tokens > 0


def test_a_burst_with_long_tails_spreads_by_cost() -> None:
    """Picks see each other's load: where the tails outweigh the shared context, both pods take their part."""
    bench = Bench().with_pods(A, B)
    picks = [bench.router.route(completion(f"r{n}", TEXT + long_text(300, n)), 0.0) for n in range(12)]
    on_a = sum(pick.primary.pod == A.address for pick in picks)
    assert 4 <= on_a <= 8


def test_load_beats_a_short_prefix() -> None:
    """A pod with a few cached blocks and much queued work loses to an idle one, and the reason says so."""
    bench = Bench().with_pods(A, B)
    bench.index.hold(A.address, bench.keys(TEXT)[:2])
    bench.router.route(
        replace(completion("busy", long_text(4000, 1)), candidates=frozenset({A.address})), 0.0
    )
    decision = bench.router.route(completion("r", TEXT), 0.0)
    assert decision.primary.pod == B.address
    assert A.address in decision.reason


def test_host_tier_blocks_are_priced_as_a_copy() -> None:
    """Blocks in a pod's host tier count as cached, at the price of bringing them back."""
    bench = Bench().with_pods(A, B)
    bench.index.hold(A.address, bench.keys(TEXT), host=True)
    best = bench.router.route(completion("r", TEXT), 0.0).primary
    assert (best.pod, best.host_tokens) == (A.address, best.cached_tokens)
    assert best.copy_s > 0.0


def test_a_salt_keeps_caches_apart() -> None:
    """A request with a cache salt finds nothing of what the same prompt left without it."""
    bench = Bench().with_pods(A)
    bench.index.hold(A.address, bench.keys(TEXT))
    request = replace(completion("r", TEXT), cache_salt="tenant")
    assert bench.router.route(request, 0.0).primary.cached_tokens == 0


def test_without_tokens_the_least_work_wins() -> None:
    """A model without a tokenizer is routed by queued work, with its reason counted."""
    pods = [ready_pod("10.0.0.1:8000", model="m"), ready_pod("10.0.0.2:8000", model="m")]
    bench = Bench().with_pods(*pods)
    first = bench.router.route(completion("r1", TEXT, model="m"), 0.0)
    second = bench.router.route(completion("r2", TEXT, model="m"), 0.0)
    assert {first.primary.pod, second.primary.pod} == {pod.address for pod in pods}
    assert (first.degraded, first.primary.cached_tokens) == ("no_tokenizer", 0)
    assert bench.sample("kvroute_router_picks_total", degraded="no_tokenizer") == 2


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [([[1] * 20] * 65, "too_many_prompts"), ([1] * 100_001, "longer_than_context")],
)
def test_what_no_cache_can_help_is_not_matched(prompt: object, reason: str) -> None:
    """Floods of prompts, and prompts that every engine will refuse, go by load and assume no blocks."""
    bench = Bench().with_pods(A)
    assert bench.router.route(completion("r", prompt), 0.0).degraded == reason
    assert bench.index.speculative == {}


def test_several_prompts_are_matched_each_on_its_own() -> None:
    """A request with two prompts is credited with the cached blocks of both."""
    bench = Bench().with_pods(A)
    other = long_text(100, 9)
    bench.index.hold(A.address, bench.keys(TEXT) + bench.keys(other))
    expected = sum((len(TOKENIZER.encode(text)) - 1) // 16 * 16 for text in (TEXT, other))
    assert bench.router.route(completion("r", [TEXT, other]), 0.0).primary.cached_tokens == expected


def test_a_pass_through_without_a_body_is_no_work() -> None:
    """A GET is given a pod and leaves no trace in the ledger."""
    bench = Bench().with_pods(A)
    bench.router.route(RouteRequest("r", RequestKind.PASSTHROUGH), 0.0)
    assert len(bench.ledger) == 0


def test_the_last_full_block_is_awaited_where_it_will_be_announced() -> None:
    """The announcement of the prompt's last uncached block ends its prefill and its speculation."""
    bench = Bench().with_pods(A)
    bench.router.route(completion("r", TEXT), 1.0)
    bench.outcomes.stored(A.address, bench.keys(TEXT)[-1:], 1.5)
    assert bench.ledger.work(A.address).decoding == 1
    assert bench.index.settled == ["r"]


@pytest.mark.parametrize("state", [StreamState.STALE, StreamState.RECOVERING])
def test_no_announcement_is_awaited_from_a_pod_out_of_sight(state: StreamState) -> None:
    """When a stream is not exact, a prefill ends by the clock soon, not by an event that may never come."""
    bench = Bench().with_pods(A)
    bench.index.state = state
    decision = bench.router.route(completion("r", TEXT), 0.0)
    bench.outcomes.expire(2 * decision.primary.own_prefill_s + 0.2)
    assert bench.ledger.work(A.address).decoding == 1


def test_scraped_kv_use_counts_only_while_it_is_fresh() -> None:
    """A full KV cache costs a pod the pick, an old account of it does not."""
    full = EngineLoad(waiting=0, running=9, kv_usage=1.0, kv_capacity_tokens=1600, scraped_s=100.0)
    bench = Bench().with_pods(replace(A, load=full), B)
    assert bench.router.route(completion("r1", TEXT), 101.0).primary.pod == B.address
    bench.outcomes.ended("r1", "report", 101.5)
    late = bench.router.route(completion("r2", TEXT), 200.0)
    assert {candidate.kv_pressure_s for candidate in late.ranked} == {0.0}


def test_a_refusal_is_counted_and_leaves_no_trace() -> None:
    """A request for an unknown model is counted by its error and enters neither ledger nor explain."""
    bench = Bench().with_pods(A)
    with pytest.raises(RequestError):
        bench.router.route(completion("r", TEXT, model="gpt-9"), 0.0)
    labels = {"model_name": "", "target_model_name": "", "fairness_id": "", "priority": "0"}
    assert bench.sample("llm_d_epp_request_error_total", error_code="NotFoundError", **labels) == 1
    assert (len(bench.ledger), bench.explain.latest(9)) == (0, [])


def test_concurrent_picks_lose_no_request() -> None:
    """Two hundred picks from eight threads are all in the ledger, spread over both pods."""
    bench = Bench().with_pods(A, B)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: bench.router.route(completion(f"r{n}", long_text(50, n)), 0.0), range(200)))
    works = [bench.ledger.work(pod.address).awaiting for pod in (A, B)]
    assert sum(works) == len(bench.ledger) == 200
    assert min(works) > 50
