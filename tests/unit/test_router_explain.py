"""What explain keeps, and how much of it."""

from __future__ import annotations

from router.explain import Explain
from router.request import RequestKind, RouteRequest
from tests.unit.router_support import TINY, Bench, completion, long_text, ready_pod

PODS = [ready_pod(f"10.0.0.{number}:8000") for number in range(1, 11)]
TEXT = long_text(100)


def test_among_many_pods_fewer_decisions_are_kept() -> None:
    """Beyond so many candidates in all the oldest decisions go, the newest always stays."""
    bench, explain = Bench().with_pods(*PODS), Explain(100, str, candidates_max=25)
    decisions = [bench.router.route(completion(f"r{number}", TEXT), 0.0) for number in range(3)]
    for decision in decisions:
        explain.decided(decision)
    assert [record["request_id"] for record in explain.latest(100)] == ["r2", "r1"]
    small = Explain(100, str, candidates_max=5)
    for decision in decisions:
        small.decided(decision)
    assert [record["request_id"] for record in small.latest(100)] == ["r2"]


def test_a_page_shows_as_many_decisions_as_have_room() -> None:
    """A page of so many candidates ends before the decision that would be too many, but is never empty."""
    bench = Bench().with_pods(*PODS)
    for number in range(5):
        bench.router.route(completion(f"r{number}", TEXT), 0.0)
    assert len(bench.explain.latest(5, candidates_max=30)) == 3
    assert len(bench.explain.latest(5, candidates_max=1)) == 1


def test_a_prompt_that_is_known_in_part_is_told_so() -> None:
    """What stands behind an image counts in the load, and not in the cache: the decision says why."""
    bench = Bench().with_pods(*PODS)
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": TEXT}, image]}]
    body = {"model": TINY, "messages": messages}
    bench.router.route(RouteRequest("r", RequestKind.CHAT, TINY, body, body_bytes=500), 0.0)
    shown = bench.explain.one("r")
    assert shown is not None
    assert (shown["degraded"], shown["partial"], shown["prefill_pod"]) == (None, "media", None)


def test_a_repeated_request_id_keeps_its_newest_decision() -> None:
    """A retry under the same id takes its place, and its candidates are counted once."""
    bench, explain = Bench().with_pods(*PODS), Explain(100, str, candidates_max=25)
    for text in (TEXT, "short"):
        for _ in range(3):
            explain.decided(bench.router.route(completion("r", text), 0.0))
    (record,) = explain.latest(10)
    assert record["prompt_tokens"] < 10


def test_a_candidate_tells_everything_that_its_price_was_made_of() -> None:
    """Tokens by tier, uncached tokens, queue, weight, price, slowdown, the age of its load and its view."""
    bench = Bench().with_pods(PODS[0])
    bench.index.hold(PODS[0].address, bench.keys(TEXT)[:2])
    bench.router.route(completion("r", TEXT), 0.0)
    record = bench.explain.one("r")
    assert record is not None
    (candidate,) = record["candidates"]
    assert candidate["cached_tokens_by_tier"] == {"gpu": 32}
    assert candidate["uncached_tokens"] == record["prompt_tokens"] - 32
    parts = ("queued_prefill_s", "copy_s", "kv_pressure_s", "extra_s")
    whole_s = sum(candidate[part] for part in parts) + candidate["own_weight"] * candidate["own_prefill_s"]
    assert candidate["cost_s"] == whole_s > 0.0
    assert (candidate["load_age_s"], candidate["view"], candidate["slowdown"]) == (None, "EXACT", 1.0)
