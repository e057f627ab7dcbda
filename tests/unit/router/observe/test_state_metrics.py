"""Tests of the gauges of pods, loads and prefill rates."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from router.observe.metrics import StateCollector
from tests.support.router.bench import TINY, Bench, completion, long_text, ready_pod
from tests.support.router.pricing import load

A, B = ready_pod("10.0.0.1:8000"), ready_pod("10.0.0.2:8000")


def gauges(bench: Bench) -> CollectorRegistry:
    """Return a registry with the bench's gauges."""
    registry = CollectorRegistry()
    registry.register(StateCollector(bench.pods, bench.ledger, lambda: 1.0, bench.core.scheduler.queued_s))
    return registry


def test_missing_load_figure_has_no_sample() -> None:
    """A load figure that a pod does not report has no sample, and is listed as missing."""
    bench = Bench().with_pods(replace(A, load=load(waiting=3, kv_usage=None)), replace(B, load=load()))
    page, pod = gauges(bench), {"pod": A.address}
    assert page.get_sample_value("kvroute_router_pod_waiting", pod) == 3.0
    assert page.get_sample_value("kvroute_router_pod_kv_usage", pod) is None
    missing = "kvroute_router_pod_load_untold"
    assert page.get_sample_value(missing, {**pod, "figure": "kv_usage"}) == 1.0
    assert page.get_sample_value(missing, {**pod, "figure": "waiting"}) is None
    assert page.get_sample_value(missing, {"pod": B.address, "figure": "kv_usage"}) is None


def test_queued_work_counts_what_is_not_cached() -> None:
    """The seconds of queued work are the uncached tokens in flight by the pods' rate, mean over the pods."""
    bench, text = Bench().with_pods(A, B), long_text(100)
    bench.index.hold(A.address, bench.keys(text)[:10])
    page, mean = gauges(bench), "kvroute_router_queued_seconds_per_pod"
    assert page.get_sample_value(mean, {"model": TINY}) == 0.0
    decision = bench.router.route(completion("r", text), 1.0)
    (work,) = (decision.prompt_tokens - 160,)
    rate = bench.pods.load_table.prefill_tokens_per_s(A.address)
    queued_s = page.get_sample_value("kvroute_router_pod_queued_seconds", {"pod": A.address})
    assert queued_s == pytest.approx(work / rate)
    assert page.get_sample_value(mean, {"model": TINY}) == pytest.approx(queued_s / 2)
