"""Router core from a request to its decision, with all parts real except sockets."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from indexer import StreamState
from indexer.errors import TokenError
from router.errors import RequestError, SaturatedError
from router.inflight.failures import COST_S, OUT_AFTER, RETRY_S
from router.pods.engine_load import EngineLoad, LoraLoad
from router.prompts.request import RequestKind, RouteRequest
from tests.support.router.bench import TINY, TOKENIZER, Bench, completion, ended, long_text, ready_pod

A, B = ready_pod("10.0.0.1:8000"), ready_pod("10.0.0.2:8000")
TEXT = long_text(200)
LENGTH = len(TOKENIZER.encode(TEXT))
IDS = list(range(64))


def test_the_pod_with_the_cached_prefix_is_picked() -> None:
    """Of two idle pods the one with the cached prompt wins, with a hit that an engine can serve."""
    bench = Bench().with_pods(A, B)
    bench.index.hold(B.address, bench.keys(TEXT))
    decision = bench.router.route(completion("r", TEXT), 0.0)
    assert decision.primary.pod == B.address
    assert decision.primary.cached_tokens == (LENGTH - 1) // 16 * 16
    assert (decision.prompt_tokens, decision.degraded) == (LENGTH, None)
    assert decision.reason.startswith("longest cached prefix")


def test_a_fully_cached_prompt_still_computes_its_last_block() -> None:
    """For a prompt of exactly four blocks, at most three are served from the cache."""
    bench = Bench().with_pods(A)
    bench.index.hold(A.address, bench.index.block_keys(TINY, IDS))
    assert bench.router.route(completion("r", IDS), 0.0).primary.cached_tokens == 48


def test_a_burst_with_one_context_stays_on_one_pod() -> None:
    """Picks see earlier picks' speculative blocks, so prompts with one context share a pod."""
    bench = Bench().with_pods(A, B)
    picks = [bench.router.route(completion(f"r{n}", f"{TEXT} {n}"), 0.0) for n in range(12)]
    assert {pick.primary.pod for pick in picks} == {picks[0].primary.pod}
    assert picks[1].primary.cached_tokens > 0


def test_a_burst_with_long_tails_spreads_by_cost() -> None:
    """Picks see earlier picks' load, so prompts with long tails spread over both pods."""
    bench = Bench().with_pods(A, B)
    picks = [bench.router.route(completion(f"r{n}", TEXT + long_text(300, n)), 0.0) for n in range(12)]
    on_a = sum(pick.primary.pod == A.address for pick in picks)
    assert 4 <= on_a <= 8


def test_a_long_queue_outweighs_a_short_prefix() -> None:
    """A pod with two cached blocks and a long queue loses to an idle one, and the reason names it."""
    bench = Bench().with_pods(A, B)
    bench.index.hold(A.address, bench.keys(TEXT)[:2])
    bench.router.route(
        msgspec.structs.replace(completion("busy", long_text(4000, 1)), candidates=frozenset({A.address})),
        0.0,
    )
    decision = bench.router.route(completion("r", TEXT), 0.0)
    assert decision.primary.pod == B.address
    assert A.address in decision.reason


def test_host_tier_blocks_cost_a_copy() -> None:
    """Blocks in the host tier count as cached and cost their copy to the device."""
    bench = Bench().with_pods(A, B)
    bench.index.hold(A.address, bench.keys(TEXT), host=True)
    best = bench.router.route(completion("r", TEXT), 0.0).primary
    assert (best.pod, best.host_tokens) == (A.address, best.cached_tokens)
    assert best.copy_s > 0.0


def test_a_cache_salt_separates_caches() -> None:
    """A request with a cache salt has no hit on blocks that were stored without it."""
    bench = Bench().with_pods(A)
    bench.index.hold(A.address, bench.keys(TEXT))
    request = msgspec.structs.replace(completion("r", TEXT), cache_salt="tenant")
    assert bench.router.route(request, 0.0).primary.cached_tokens == 0


def test_without_a_tokenizer_the_shortest_queue_wins() -> None:
    """A model without a tokenizer is routed by queue, and the reason is counted."""
    pods = [ready_pod("10.0.0.1:8000", model="m"), ready_pod("10.0.0.2:8000", model="m")]
    bench = Bench().with_pods(*pods)
    first = bench.router.route(completion("r1", TEXT, model="m"), 0.0)
    second = bench.router.route(completion("r2", TEXT, model="m"), 0.0)
    assert {first.primary.pod, second.primary.pod} == {pod.address for pod in pods}
    assert (first.degraded, first.primary.cached_tokens) == ("no_tokenizer", 0)
    assert bench.sample("kvroute_router_picks_total", degraded="no_tokenizer") == 2


def test_a_partially_known_prompt_is_counted_by_reason() -> None:
    """A prompt with a video is matched up to the video, and counted as partial."""
    bench = Bench().with_pods(A)
    video = {"type": "video_url", "video_url": {"url": "http://x/y.mp4"}}
    messages = [
        {"role": "system", "content": TEXT},
        {"role": "user", "content": [video, {"type": "text", "text": "What is it?"}]},
    ]
    request = RouteRequest("r", RequestKind.CHAT, TINY, {"model": TINY, "messages": messages}, 400)
    decision = bench.router.route(request, 0.0)
    assert (decision.degraded, decision.partial) == (None, "media")
    assert bench.sample("kvroute_router_picks_total", degraded="") == 1
    assert bench.sample("kvroute_router_partial_prompts_total", partial="media") == 1


def test_missing_block_keys_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens without a known model, and tokens that the index rejects, are counted by reason."""
    bench = Bench().with_pods(A)
    nameless = msgspec.structs.replace(completion("r1", IDS), model=None)
    assert bench.router.route(nameless, 0.0).degraded == "no_model"
    monkeypatch.setattr(bench.index, "block_keys", Mock(side_effect=TokenError("no such ids")))
    assert bench.router.route(completion("r2", IDS), 0.0).degraded == "token_error"
    for reason in ("no_model", "token_error"):
        assert bench.sample("kvroute_router_picks_total", degraded=reason) == 1


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [([[1] * 20] * 65, "too_many_prompts"), ([1] * 100_001, "longer_than_context")],
)
def test_oversized_prompts_are_not_matched(prompt: object, reason: str) -> None:
    """Too many prompts, or one longer than the context, are routed by load without speculative blocks."""
    bench = Bench().with_pods(A)
    assert bench.router.route(completion("r", prompt), 0.0).degraded == reason
    assert bench.index.speculative == {}


def test_speculative_blocks_attract_requests_until_the_first_token() -> None:
    """Speculative blocks count as a cache hit until the first token of their request."""
    bench = Bench().with_pods(A, B)
    only_a = msgspec.structs.replace(completion("first", TEXT), candidates=frozenset({A.address}))
    bench.router.route(only_a, 0.0)
    bench.router.route(
        msgspec.structs.replace(only_a, request_id="tail", body=completion("", TEXT + " x").body), 0.0
    )
    drawn = bench.router.route(completion("second", TEXT), 0.0)
    assert (drawn.primary.pod, drawn.primary.cached_tokens > 0) == (A.address, True)
    # The pod reported first tokens but no stored blocks, as if its cache had no room.
    for request_id in ("first", "tail", "second"):
        bench.lifecycle.first_token(request_id, "report", 1.0)
    late = bench.router.route(completion("third", TEXT), 1.0)
    assert {candidate.cached_tokens for candidate in late.ranked} == {0}
    assert late.primary.pod == B.address


def test_time_inside_the_router_is_not_charged_to_the_pod() -> None:
    """The time between arrival and pick is not part of the observed prefill."""
    seconds = iter([5.0, 7.0, 8.0])
    bench = Bench(clock=lambda: next(seconds)).with_pods(A)
    decision = bench.router.route(completion("r", TEXT), 100.0)
    assert decision.decided_s == 102.0
    bench.lifecycle.stored(A.address, bench.keys(TEXT), 102.5)
    assert bench.sample("kvroute_router_prefill_end_seconds_sum", source="blocks") == 0.5


def test_a_running_adapter_attracts_requests() -> None:
    """Of two equal pods, the one that runs the adapter wins over the one that must load it."""
    pods = [ready_pod(pod.address, adapters=["sql"]) for pod in (A, B)]
    loads = [LoraLoad(frozenset(), frozenset(), 2), LoraLoad(frozenset({"sql"}), frozenset(), 2)]
    reports = [EngineLoad(0, 0, 0.0, 10_000, 0.0, lora=lora) for lora in loads]
    bench = Bench().with_pods(*(replace(pod, load=load) for pod, load in zip(pods, reports, strict=True)))
    decision = bench.router.route(completion("r", TEXT, model="sql"), 0.0)
    assert decision.primary.pod == B.address
    assert [candidate.extra_s for candidate in decision.ranked] == [0.0, 0.2]


def with_adapters(count: int, lora: LoraLoad) -> Bench:
    """Return a router with pods that serve four adapters and reported this load at 0.0 s."""
    pods = [ready_pod(f"10.0.0.{number}:8000", adapters=["sql", "fr", "de", "it"]) for number in range(count)]
    load = EngineLoad(0, 0, 0.0, 100_000, 0.0, lora=lora)
    return Bench().with_pods(*(replace(pod, load=load) for pod in pods))


def test_picks_see_adapters_sent_since_the_last_scrape() -> None:
    """Requests for four adapters, sent at once to four pods with one slot each, give each pod one adapter."""
    bench = with_adapters(4, LoraLoad(frozenset(), frozenset(), 1))
    sent: dict[str, set[str]] = {}
    for number, adapter in enumerate(["sql", "fr", "de", "it"] * 3):
        request = completion(f"r{number}", long_text(20, number), model=adapter)
        sent.setdefault(bench.router.route(request, 0.001 * number).primary.pod, set()).add(adapter)
    assert sorted(map(len, sent.values())) == [1, 1, 1, 1]


def test_stale_adapter_metrics_are_ignored() -> None:
    """Adapters cost nothing once the engine's metrics are older than 5 s."""
    bench = with_adapters(1, LoraLoad(frozenset({"fr"}), frozenset(), 1))
    extra_s = [
        bench.router.route(completion(f"r{now_s}", TEXT, model=model), now_s).primary.extra_s
        for now_s, model in ((4.0, "sql"), (6.0, "de"))
    ]
    assert extra_s == pytest.approx([2.2, 0.0])


def test_a_request_rejected_by_priority_does_not_enter_the_ledger() -> None:
    """While the only pod has no metrics, a negative priority is rejected and others are admitted."""
    bench = Bench(priorities={"batch": -1}).with_pods(A)
    batch = msgspec.structs.replace(completion("r", TEXT), headers={"x-llm-d-inference-objective": "batch"})
    with pytest.raises(SaturatedError):
        bench.router.route(batch, 0.0)
    assert len(bench.ledger) == 0
    assert bench.router.route(completion("r", TEXT), 0.0).priority == 0


def test_metrics_of_a_removed_pod_are_deleted() -> None:
    """The series of a removed pod is deleted and does not reappear after a late pick."""
    bench = Bench().with_pods(A)
    bench.router.route(completion("r", TEXT), 0.0)
    labels = {"status": "success", "target_model_name": TINY, "namespace": "", "port": "8000"}
    name = "llm_d_epp_scheduler_attempts_total"
    assert bench.sample(name, endpoint_name=A.address, **labels) == 1
    bench.metrics.keep([B.address])
    bench.router.route(completion("late", TEXT), 0.0)
    assert bench.registry.get_sample_value(name, {"endpoint_name": A.address, **labels}) is None


def test_several_prompts_are_matched_separately() -> None:
    """The hit of a request with two prompts is the sum of both."""
    bench = Bench().with_pods(A)
    other = long_text(100, 9)
    bench.index.hold(A.address, np.concatenate([bench.keys(TEXT), bench.keys(other)]))
    expected = sum((len(TOKENIZER.encode(text)) - 1) // 16 * 16 for text in (TEXT, other))
    assert bench.router.route(completion("r", [TEXT, other]), 0.0).primary.cached_tokens == expected


def test_a_request_without_a_body_is_no_load() -> None:
    """A GET is routed without an entry in the ledger."""
    bench = Bench().with_pods(A)
    bench.router.route(RouteRequest("r", RequestKind.PASSTHROUGH), 0.0)
    assert len(bench.ledger) == 0


def test_the_event_of_the_last_full_block_ends_the_prefill() -> None:
    """The stored event of the prompt's last full block ends its prefill and its speculative blocks."""
    bench = Bench().with_pods(A)
    bench.router.route(completion("r", TEXT), 1.0)
    bench.lifecycle.stored(A.address, bench.keys(TEXT)[-1:], 1.5)
    assert bench.ledger.load_table.work(A.address).decoding == 1
    assert bench.index.settled == ["r"]


@pytest.mark.parametrize("state", [StreamState.STALE, StreamState.RECOVERING])
def test_no_event_is_awaited_without_an_exact_view(state: StreamState) -> None:
    """Without an exact view, a prefill ends by its predicted time, not by an event that may never arrive."""
    bench = Bench().with_pods(A)
    bench.index.state = state
    decision = bench.router.route(completion("r", TEXT), 0.0)
    bench.lifecycle.expire(2 * decision.primary.own_prefill_s + 0.2)
    assert bench.ledger.load_table.work(A.address).decoding == 1


def test_scraped_kv_usage_counts_only_while_it_is_fresh() -> None:
    """A full KV cache loses the pick; stale metrics of one do not."""
    full = EngineLoad(waiting=0, running=9, kv_usage=1.0, kv_capacity_tokens=1600, scraped_s=100.0)
    bench = Bench().with_pods(replace(A, load=full), B)
    assert bench.router.route(completion("r1", TEXT), 101.0).primary.pod == B.address
    ended(bench.lifecycle, "r1", "report", 101.5)
    late = bench.router.route(completion("r2", TEXT), 200.0)
    assert {candidate.kv_pressure_s for candidate in late.ranked} == {0.0}


def test_a_rejected_request_is_counted_but_not_recorded() -> None:
    """A request for an unknown model counts as a failed pick and enters neither ledger nor decision log."""
    bench = Bench().with_pods(A)
    with pytest.raises(RequestError):
        bench.router.route(completion("r", TEXT, model="gpt-9"), 0.0)
    labels = dict.fromkeys(("target_model_name", "endpoint_name", "namespace", "port"), "")
    assert bench.sample("llm_d_epp_scheduler_attempts_total", status="failure", **labels) == 1
    assert (len(bench.ledger), bench.decision_log.latest(9)) == (0, [])


def test_concurrent_picks_lose_no_request() -> None:
    """200 picks from eight threads are all in the ledger, spread over both pods."""
    bench = Bench().with_pods(A, B)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: bench.router.route(completion(f"r{n}", long_text(50, n)), 0.0), range(200)))
    counts = [bench.ledger.load_table.work(pod.address).awaiting for pod in (A, B)]
    assert sum(counts) == len(bench.ledger) == 200
    assert min(counts) > 50


def test_failures_cost_more_than_a_queue() -> None:
    """A pod whose last request failed costs a second more, as extra seconds of its candidate."""
    bench = Bench().with_pods(A, B)
    bench.lifecycle.failures.failed(A.address, 0.0, 0.0)
    ranked = bench.router.route(completion("r", TEXT), 0.0).ranked
    assert [(one.pod, one.extra_s) for one in ranked] == [(B.address, 0.0), (A.address, COST_S)]


def test_a_failing_pod_gets_one_request_as_its_trial() -> None:
    """An excluded pod gets no request until its trial, and then one until that has succeeded."""
    bench = Bench().with_pods(A, B)
    failures, numbers = bench.lifecycle.failures, count()
    # The index prefers the failing pod as soon as it is a candidate.
    bench.index.hold(A.address, bench.keys(TEXT))

    def picks(now_s: float) -> list[str]:
        found = [bench.router.route(completion(f"r{next(numbers)}", TEXT), now_s) for _ in range(5)]
        return [decision.primary.pod for decision in found]

    for _ in range(OUT_AFTER):
        failures.failed(A.address, 0.0, 0.0)
    assert picks(1.0) == [B.address] * 5
    failures.expire(1.0 + RETRY_S)
    assert picks(1.0 + RETRY_S) == [A.address, *[B.address] * 4]
    failures.succeeded(A.address, 1.0 + RETRY_S)
    assert A.address in picks(2.0 + RETRY_S)


def test_only_requests_with_a_body_wake_pods() -> None:
    """A request whose candidates all sleep asks to wake them, unless it has no body or another is awake."""
    bench, asked = Bench().with_pods(A, B), list[list[str]]()
    bench.core.wake = lambda pods: asked.append([pod.address for pod in pods])
    bench.pods.put(replace(A, asleep=True))
    bench.router.route(completion("r1", TEXT), 0.0)
    bench.pods.put(replace(B, asleep=True))
    bench.router.route(RouteRequest("r2", RequestKind.PASSTHROUGH), 0.0)
    assert asked == []
    bench.router.route(completion("r3", TEXT), 0.0)
    assert asked == [[A.address, B.address]]
