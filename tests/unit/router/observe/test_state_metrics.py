"""Tests of the gauges of pods, loads and prefill rates."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import CollectorRegistry

from router.observe.metrics import StateCollector
from tests.support.router.bench import Bench, ready_pod
from tests.support.router.pricing import load

A, B = ready_pod("10.0.0.1:8000"), ready_pod("10.0.0.2:8000")


def gauges(bench: Bench) -> CollectorRegistry:
    """Return a registry with the bench's gauges."""
    registry = CollectorRegistry()
    registry.register(StateCollector(bench.pods, bench.ledger, lambda: 1.0))
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
