"""What the metrics page tells of pods, loads and learnt rates."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import CollectorRegistry

from router.observe.metrics import StateCollector
from tests.unit.pricing_support import load
from tests.unit.router_support import Bench, ready_pod

A, B = ready_pod("10.0.0.1:8000"), ready_pod("10.0.0.2:8000")


def shown(bench: Bench) -> CollectorRegistry:
    """The state's gauges."""
    registry = CollectorRegistry()
    registry.register(StateCollector(bench.pods, bench.ledger, lambda: 1.0))
    return registry


def test_a_figure_that_is_not_told_is_named_and_not_shown_as_zero() -> None:
    """Of a pod without a sensible use of its cache the queue is shown, and that the use is missing."""
    bench = Bench().with_pods(replace(A, load=load(waiting=3, kv_usage=None)), replace(B, load=load()))
    page, pod = shown(bench), {"pod": A.address}
    assert page.get_sample_value("kvroute_router_pod_waiting", pod) == 3.0
    assert page.get_sample_value("kvroute_router_pod_kv_usage", pod) is None
    untold = "kvroute_router_pod_load_untold"
    assert page.get_sample_value(untold, {**pod, "figure": "kv_usage"}) == 1.0
    assert page.get_sample_value(untold, {**pod, "figure": "waiting"}) is None
    assert page.get_sample_value(untold, {"pod": B.address, "figure": "kv_usage"}) is None
