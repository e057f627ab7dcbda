"""Prompt tokens by cause, in decisions, records and metrics."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from router.prompts.request import RequestKind, RouteRequest
from tests.support.router.bench import TINY, TOKENIZER, Bench, completion, long_text, ready_pod

A, B = (ready_pod(f"10.0.0.{number}:8000") for number in (1, 2))
TEXT, OTHER = long_text(100), long_text(60, 1)
TOTAL, CEILING = "kvroute_router_prompt_tokens_total", "kvroute_router_cacheable_ceiling"


def causes(bench: Bench, request_id: str) -> dict[str, int]:
    """Return a request's tokens by cause, as its record has them."""
    record = bench.decision_log.find(request_id)
    assert record is not None
    assert sum(record["tokens_by_cause"].values()) == record["prompt_tokens"]
    tokens: dict[str, int] = record["tokens_by_cause"]
    return tokens


def test_tokens_are_counted_by_cause() -> None:
    """Record and counters have the predicted hit and each missed token under its cause."""
    bench = Bench().with_pods(A)
    bench.index.hold(A.address, bench.keys(TEXT)[:2])
    decision = bench.router.route(completion("r", TEXT), 0.0)
    length = len(TOKENIZER.encode(TEXT))
    partial = length - (length - 1) // 16 * 16
    expected = {"hit": 32, "never_cached": length - 32 - partial, "partial_block": partial}
    assert causes(bench, "r") == expected
    assert decision.primary.cached_tokens == 32
    for cause, tokens in expected.items():
        assert bench.sample(TOTAL, model=TINY, cause=cause) == tokens
    assert bench.sample(CEILING, model=TINY) == pytest.approx(32 / length)


def test_a_hit_left_for_load_is_elsewhere() -> None:
    """Tokens that a busier candidate would have served count as elsewhere, and as cacheable."""
    bench = Bench().with_pods(A, B)
    bench.index.hold(A.address, bench.keys(TEXT))
    for number in range(10):
        busy = completion(f"b{number}", long_text(900, number + 5))
        bench.router.route(replace(busy, candidates=frozenset({A.address})), 0.0)
    decision = bench.router.route(completion("r", TEXT), 0.0)
    assert decision.primary.pod == B.address
    found = causes(bench, "r")
    assert set(found) == {"elsewhere", "partial_block"}


def test_a_pick_by_load_is_unknown() -> None:
    """The estimated tokens of a degraded pick count as unknown, and not for the ceiling."""
    bench = Bench().with_pods(A)
    bench.router.route(completion("r", TEXT, prompt_logprobs=1), 0.0)
    assert list(causes(bench, "r")) == ["unknown"]
    assert bench.registry.get_sample_value(CEILING, {"model": TINY}) is None


def test_several_prompts_are_added_up() -> None:
    """The tokens of all prompts of a request are counted together."""
    bench = Bench().with_pods(A)
    bench.index.hold(A.address, bench.keys(TEXT)[:2])
    bench.router.route(completion("r", [TEXT, OTHER, TEXT]), 0.0)
    assert causes(bench, "r")["hit"] == 64


def test_tokens_behind_an_image_are_unknown() -> None:
    """Of a prompt that is known up to an image, the rest is unknown."""
    bench = Bench().with_pods(A)
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": TEXT}, image]}]
    body = {"model": TINY, "messages": messages}
    bench.router.route(RouteRequest("r", RequestKind.CHAT, TINY, body, body_bytes=500), 0.0)
    found = causes(bench, "r")
    assert found["unknown"] > 0
