"""Sums of what was served, saved and lost on the way, and the queue that feeds them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from indexer import Cause, DispatchKey
from router.analysis.feed import Analysis
from router.analysis.funnel import funnel
from router.analysis.shadow import LEAST_REQUESTS, OURS, ROUND_ROBIN, Placed, Shadow
from router.analysis.worth import Flight, Worth
from router.observe.metrics import RouterMetrics
from router.observe.requests import ObservedRouter
from tests.support.depth import examples
from tests.support.router.bench import Bench, completion, ready_pod
from tests.support.router.doors import wait_until

CAUSES = [value for name, value in vars(Cause).items() if name.isupper()]
STAGES = ["prompt_tokens", "cacheable", "cached_in_fleet", "cached_on_pod", "predicted"]
PODS = {OURS: "a", ROUND_ROBIN: "b", LEAST_REQUESTS: "b"}
RATES = {"a": 100.0, "b": 50.0}


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["m", "n"]), st.sampled_from(CAUSES), st.integers(0, 10**6))))
def test_the_funnel_narrows_and_sums_up(counted: list[tuple[str, str, int]]) -> None:
    """For any counts, stages never grow, begin with all known tokens and end with the predicted hits."""
    metrics, sums = RouterMetrics(CollectorRegistry()), Counter[tuple[str, str]]()
    for model, cause, tokens in counted:
        metrics.count("prompt_tokens", model, cause, number=tokens)
        sums[model, cause] += tokens
    page = funnel(metrics)
    assert {(model, cause): n for model, each in page["causes"].items() for cause, n in each.items()} == sums
    for model, stages in page["models"].items():
        values = [stages[stage] for stage in STAGES]
        assert values == sorted(values, reverse=True)
        assert values[0] == sum(
            n for (of, cause), n in sums.items() if of == model and cause != Cause.UNKNOWN
        )
        assert values[-1] == sums[model, Cause.HIT]


class Kit:
    """Sums over requests of 100 tokens, of which 60 are cached, 20 in the host tier."""

    def __init__(self, price: float | None = None) -> None:
        self.worth = Worth(RouterMetrics(CollectorRegistry()), Shadow(16), price, 0.0)

    def request(
        self, number: int, computed: dict[str, int], cached: int | None, tenant: str | None = None
    ) -> None:
        """Record a request, whose pod reports `cached` tokens."""
        placed, key = Placed(PODS, 1.0, computed), DispatchKey(str(number), 0.0)
        self.worth.begin(key, Flight("m", tenant, 100, 60, 20, placed, RATES))
        self.worth.end(key, cached, 1)

    def page(self) -> dict[str, Any]:
        """Return the page after one day."""
        return self.worth.page(86_400.0)


def test_tokens_are_those_reported_or_else_predicted() -> None:
    """By model and by tenant, tokens are computed, from the device or from the host, and sum up to all."""
    kit = Kit()
    for number, cached in enumerate((None, 80, 10)):
        kit.request(number, {}, cached, "t")
    tokens = {"computed": 40 + 20 + 90, "device": 40 + 60 + 0, "host": 20 + 20 + 10}
    assert kit.page()["models"] == {"m": tokens}
    assert kit.page()["tenants"] == {"t": tokens}


def test_savings_are_priced_by_the_pods_speeds() -> None:
    """Saved seconds, GPU hours and money follow from computed tokens and each pod's prefill rate."""
    kit = Kit(price=3.0)
    kit.request(1, {OURS: 40, ROUND_ROBIN: 100, LEAST_REQUESTS: 20}, 60)
    page = kit.page()
    assert page["policies"]["round_robin"] == {"computed_tokens": 100, "prefill_s": 2.0}
    saved = page["saved_per_day"]["round_robin"]
    assert saved == {"prefill_s": 1.6, "gpu_hours": 1.6 / 3600, "money": pytest.approx(3.0 * 1.6 / 3600)}
    assert "Behind round-robin the pods would spend 400% more" in page["verdict"]
    assert "Against least-requests you would lose nothing" in page["verdict"]
    assert "Doubtful" not in page["verdict"]


def test_doubt_and_ignorance_are_said() -> None:
    """The verdict says when nothing is known, and when the estimate contradicts what pods reported."""
    kit = Kit()
    assert kit.page()["verdict"].startswith("Nothing is known yet")
    assert kit.page()["saved_per_day"]["round_robin"]["money"] is None
    kit.request(1, {OURS: 100, ROUND_ROBIN: 100, LEAST_REQUESTS: 100}, 60)
    assert "Doubtful: " in kit.page()["verdict"]


@pytest.fixture
def bench() -> Bench:
    """Provide a router with one pod."""
    return Bench().with_pods(ready_pod("10.0.0.1:8000"))


def routed(bench: Bench, analysis: Analysis) -> ObservedRouter:
    """Return a router that feeds the analysis."""
    bench.core.picked = analysis.queue.picked
    return ObservedRouter(bench.core, bench.metrics)


def dropped(bench: Bench, reason: str) -> float:
    """Return how many requests were not analysed for a reason."""
    return bench.sample("kvroute_router_analysis_dropped_total", reason=reason)


def test_a_full_queue_drops_and_counts(bench: Bench) -> None:
    """Requests beyond the queue's bytes, and large ones, are picked as ever, and counted as not analysed."""
    router = routed(bench, Analysis(bench.pods, bench.index, bench.decision_log))
    for number in range(12):
        request = msgspec.structs.replace(completion(f"r{number}", "hello"), body_bytes=3 << 20)
        router.route(request, 0.0)
    assert dropped(bench, "busy") == 2
    router = routed(bench, Analysis(bench.pods, bench.index, bench.decision_log))
    router.route(msgspec.structs.replace(completion("l", "hello"), body_bytes=5 << 20), 0.0)
    assert dropped(bench, "large") == 1


def test_a_failing_analysis_does_not_end_the_thread(bench: Bench) -> None:
    """A request that cannot be analysed is counted, and the next one is analysed."""
    analysis = Analysis(bench.pods, bench.index, bench.decision_log)
    router = routed(bench, analysis)
    analysis.start()
    try:
        for number, metadata in enumerate(({"user_id": object()}, {"user_id": "u"})):
            request = completion(str(number), "hello " * 40)
            router.route(msgspec.structs.replace(request, body={**request.body, "metadata": metadata}), 0.0)
        wait_until(lambda: dropped(bench, "failed") == 1, "the failure")
        page = analysis.pages()["/debug/prefix_breaks"]
        wait_until(lambda: len(page({})[1]["sessions"]) == 1, "the next request")
    finally:
        analysis.close()
