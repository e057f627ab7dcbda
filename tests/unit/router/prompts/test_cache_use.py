"""Tests of requests that bypass the prefix cache, or whose usage reports only some of the cached tokens."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from router.feedback.outcomes import RESPONSE
from router.prompts.request import CACHE_NOT_READ, RequestKind, RouteRequest, reads_cache, sequences_of
from tests.support.router.bench import TINY, Bench, completion, ended, long_text, ready_pod

A, B = ready_pod("10.0.0.1:8000"), ready_pod("10.0.0.2:8000")
TEXT = long_text(200)
CHAT, COMPLETIONS = RequestKind.CHAT, RequestKind.COMPLETIONS


def request_with(kind: RequestKind, **fields: Any) -> RouteRequest:
    """Return a request with these fields."""
    return RouteRequest("r", kind, TINY, {"model": TINY, **fields})


@pytest.mark.parametrize(
    ("kind", "fields", "reads"),
    [
        (COMPLETIONS, {}, True),
        (COMPLETIONS, {"logprobs": 5}, True),
        (COMPLETIONS, {"echo": True}, True),
        (COMPLETIONS, {"echo": True, "logprobs": None}, True),
        (COMPLETIONS, {"echo": True, "logprobs": 0}, False),
        (COMPLETIONS, {"prompt_logprobs": 0}, False),
        (COMPLETIONS, {"prompt_logprobs": None}, True),
        (CHAT, {"logprobs": True, "top_logprobs": 3}, True),
        (CHAT, {"prompt_logprobs": 1}, False),
        (CHAT, {"echo": True}, False),
        (CHAT, {"echo": True, "top_logprobs": None}, True),
        (CHAT, {"echo": False}, True),
        (COMPLETIONS, {"sampling_params": {"prompt_logprobs": 0}}, False),
        (COMPLETIONS, {"sampling_params": {"prompt_logprob_token_ids": [[1]]}}, False),
        (COMPLETIONS, {"sampling_params": {"skip_reading_prefix_cache": True}}, False),
        (
            COMPLETIONS,
            {"sampling_params": {"prompt_logprobs": 0, "skip_reading_prefix_cache": False}},
            True,
        ),
        (COMPLETIONS, {"sampling_params": "none"}, True),
        (COMPLETIONS, {"return_logprob": True, "logprob_start_len": 0}, False),
        (COMPLETIONS, {"return_logprob": True, "logprob_start_len": -1}, True),
        (COMPLETIONS, {"return_logprob": True, "logprob_start_len": "0"}, True),
        (RequestKind.MESSAGES, {"prompt_logprobs": 1, "echo": True}, True),
    ],
)
def test_prompt_logprobs_bypass_the_cache(kind: RequestKind, fields: dict[str, Any], reads: bool) -> None:
    """Only fields by which vLLM 0.32 and SGLang compute prompt logprobs bypass the prefix cache."""
    assert reads_cache(request_with(kind, **fields)) is reads


def test_request_that_bypasses_the_cache_has_no_predicted_hit() -> None:
    """A request that bypasses the cache counts as uncached; its blocks are still expected on the pod."""
    bench = Bench().with_pods(A, B)
    bench.index.hold(A.address, bench.keys(TEXT))
    queued = msgspec.structs.replace(completion("first", long_text(40, 1)), candidates=frozenset({A.address}))
    bench.router.route(queued, 0.0)
    decision = bench.router.route(completion("r", TEXT, prompt_logprobs=0), 0.0)
    best = decision.primary
    assert (best.pod, best.cached_tokens, best.uncached_tokens) == (B.address, 0, decision.prompt_tokens)
    assert (decision.degraded, decision.ranked.most_cached_tokens) == (CACHE_NOT_READ, 0)
    assert decision.key in bench.index.speculative
    assert bench.ledger.predicted_hit_tokens(B.address) == 0
    bench.lifecycle.stored(B.address, bench.keys(TEXT)[-1:], 1.0)
    assert bench.ledger.load_table.work(B.address).awaiting == 0
    assert bench.sample("kvroute_router_picks_total", degraded=CACHE_NOT_READ) == 1


def test_bypassing_request_is_confirmed_by_a_pod_that_holds_the_prompt() -> None:
    """The pod stores the prompt's blocks again, which ends the prefill; its time is no rate sample."""
    bench = Bench().with_pods(A)
    bench.index.hold(A.address, bench.keys(TEXT))
    bench.router.route(completion("r", TEXT, echo=True, logprobs=1), 0.0)
    bench.lifecycle.stored(A.address, bench.keys(TEXT), 1.0)
    assert bench.ledger.load_table.work(A.address).awaiting == 0
    assert bench.rates.load_table.prefill_tokens_per_s(A.address) == bench.rates.load_table.fleet_tokens_per_s


@pytest.mark.parametrize(
    ("fields", "prompts", "sequences"),
    [
        ({}, 1, 1),
        ({"n": 1, "best_of": 1}, 1, 1),
        ({"n": 2, "best_of": 5}, 1, 5),
        ({"n": 4, "use_beam_search": True}, 1, 4),
        ({"sampling_params": {"n": 3}}, 2, 6),
        ({}, 2, 2),
        ({"n": 10**9}, 3, 1024),
        ({"n": True, "best_of": "7", "sampling_params": {"n": -3}}, 0, 1),
    ],
)
def test_samples_beams_and_prompts_are_sequences(
    fields: dict[str, Any], prompts: int, sequences: int
) -> None:
    """The engine decodes each sample or beam of each prompt; invalid numbers count as one."""
    assert sequences_of(request_with(COMPLETIONS, **fields), prompts, 1024) == sequences


@pytest.mark.parametrize(
    ("prompt", "fields", "sequences"), [(TEXT, {"n": 8}, 8), ([TEXT, TEXT], {"n": 2}, 4)]
)
def test_a_request_weighs_as_the_sequences_that_it_decodes(
    prompt: object, fields: dict[str, Any], sequences: int
) -> None:
    """A request waits once for its first token; then its pod decodes all of its sequences, until its end."""
    bench = Bench().with_pods(A)
    bench.router.route(completion("r", prompt, **fields), 0.0)
    assert bench.ledger.load_table.work(A.address).awaiting == 1
    bench.lifecycle.first_token("r", RESPONSE, 1.0)
    assert bench.ledger.load_table.work(A.address).decoding == sequences
    record = bench.decision_log.find("r")
    assert record is not None
    assert record["sequences"] == sequences
    ended(bench.lifecycle, "r", RESPONSE, 2.0, failed=False)
    assert bench.ledger.load_table.work(A.address).decoding == 0


@pytest.mark.parametrize(("prompt", "fields"), [(TEXT, {"n": 2}), ([TEXT, TEXT], {})])
def test_incomplete_usage_is_not_compared(prompt: object, fields: dict[str, Any]) -> None:
    """Cached tokens of one of several samples or prompts are recorded, but not compared with predictions."""
    bench = Bench().with_pods(A)
    bench.index.hold(A.address, bench.keys(TEXT))
    bench.router.route(completion("r", prompt, **fields), 0.0)
    ended(bench.lifecycle, "r", RESPONSE, 1.0, cached_tokens=16)
    assert bench.sample("kvroute_router_compared_predicted_cached_tokens_total") == 0
    assert bench.sample("kvroute_router_delivered_cached_tokens_total") == 0
    record = bench.decision_log.find("r")
    assert record is not None
    assert record["delivered_cached_tokens"] == 16
