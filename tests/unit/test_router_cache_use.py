"""Requests that engines serve without their cache, or of whose cache their usage tells a part."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from router.feedback.lifecycle import RESPONSE
from router.prompts.request import CACHE_NOT_READ, RequestKind, RouteRequest, reads_cache, usage_is_comparable
from tests.unit.router_support import TINY, Bench, completion, long_text, ready_pod

A, B = ready_pod("10.0.0.1:8000"), ready_pod("10.0.0.2:8000")
TEXT = long_text(200)
CHAT, COMPLETIONS = RequestKind.CHAT, RequestKind.COMPLETIONS


def asked(kind: RequestKind, **fields: Any) -> RouteRequest:
    """A request with these fields."""
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
def test_log_probabilities_of_the_prompt_are_computed_with_it(
    kind: RequestKind, fields: dict[str, Any], reads: bool
) -> None:
    """What vLLM 0.32 and SGLang take for them reads no cache; all else does."""
    assert reads_cache(asked(kind, **fields)) is reads


def test_a_cache_that_is_not_read_is_neither_predicted_nor_followed() -> None:
    """The whole prompt is work, wherever it is sent; its blocks still end its prefill, and are assumed."""
    bench = Bench().with_pods(A, B)
    bench.index.hold(A.address, bench.keys(TEXT))
    queued = msgspec.structs.replace(completion("first", long_text(40, 1)), candidates=frozenset({A.address}))
    bench.router.route(queued, 0.0)
    decision = bench.router.route(completion("r", TEXT, prompt_logprobs=0), 0.0)
    best = decision.primary
    assert (best.pod, best.cached_tokens, best.uncached_tokens) == (B.address, 0, decision.prompt_tokens)
    assert (decision.degraded, decision.ranked.most_cached_tokens) == (CACHE_NOT_READ, 0)
    assert decision.key in bench.index.speculative
    assert bench.ledger.promised_tokens(B.address) == 0
    bench.outcomes.stored(B.address, bench.keys(TEXT)[-1:], 1.0)
    assert bench.ledger.board.work(B.address).awaiting == 0
    assert bench.sample("kvroute_router_picks_total", degraded=CACHE_NOT_READ) == 1


def test_a_pod_that_holds_the_prompt_announces_it_again() -> None:
    """An engine that does not read its cache stores all of the prompt a second time."""
    bench = Bench().with_pods(A)
    bench.index.hold(A.address, bench.keys(TEXT))
    bench.router.route(completion("r", TEXT, echo=True, logprobs=1), 0.0)
    bench.outcomes.stored(A.address, bench.keys(TEXT), 1.0)
    assert bench.ledger.board.work(A.address).awaiting == 0
    assert bench.rates.board.prefill_tokens_per_s(A.address) == bench.rates.board.fleet_tokens_per_s


@pytest.mark.parametrize(
    ("fields", "prompts", "tells"),
    [
        ({}, 1, True),
        ({"n": 1}, 1, True),
        ({"n": 2}, 1, False),
        ({"sampling_params": {"n": 3}}, 1, False),
        ({}, 2, False),
    ],
)
def test_a_usage_that_tells_a_part_is_known(fields: dict[str, Any], prompts: int, tells: bool) -> None:
    """Of several samples or prompts vLLM tells the cached tokens of one."""
    assert usage_is_comparable(asked(COMPLETIONS, **fields), prompts) is tells


@pytest.mark.parametrize(("prompt", "fields"), [(TEXT, {"n": 2}), ([TEXT, TEXT], {})])
def test_a_prediction_is_not_held_against_a_part(prompt: object, fields: dict[str, Any]) -> None:
    """What one of several samples or prompts was served is shown, and counts as no broken prediction."""
    bench = Bench().with_pods(A)
    bench.index.hold(A.address, bench.keys(TEXT))
    bench.router.route(completion("r", prompt, **fields), 0.0)
    bench.outcomes.ended("r", RESPONSE, 1.0, cached_tokens=16)
    assert bench.sample("kvroute_router_compared_predicted_cached_tokens_total") == 0
    assert bench.sample("kvroute_router_delivered_cached_tokens_total") == 0
    record = bench.explain.one("r")
    assert record is not None
    assert record["delivered_cached_tokens"] == 16
