"""Wiring of a configuration: cost model and admission use the same maximum age of load metrics."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from router.app.config import RouterConfig, parse_flags
from router.app.wiring import build_admission, build_scheduler
from router.errors import ConfigError, SaturatedError
from router.pods.pod_set import PodSet
from tests.support.router.bench import Bench, completion, ended, ready_pod
from tests.support.router.pricing import load

A = ready_pod("10.0.0.1:8000")
LOW = {"x-llm-d-inference-objective": "low"}
RARELY = RouterConfig(refresh_interval_s=10.0)


@pytest.mark.parametrize(
    ("config", "age_max_s"),
    [
        (RouterConfig(), 5.0),
        (RARELY, 30.0),
        (replace(RARELY, load_age_max_s=12.0), 12.0),
        (RouterConfig(load_age_max_s=2.0), 2.0),
    ],
)
def test_load_age_limit_follows_the_probe_interval(config: RouterConfig, age_max_s: float) -> None:
    """Load metrics are used for three probe intervals, at least 5 s, or as long as the flag says."""
    bench = Bench().with_pods(replace(A, load=load(running=3)))
    admission, _ = build_admission(config, {"low": -1}, bench.pods, CollectorRegistry())
    bench.core.scheduler = build_scheduler(config, bench.pods, bench.ledger, None)
    rows = bench.pods.load_table.rows([A.address])
    ages_s = (age_max_s - 0.1, age_max_s + 0.1)
    assert admission.admit(LOW, rows, ages_s[0]) == -1
    with pytest.raises(SaturatedError):
        admission.admit(LOW, rows, ages_s[1])
    decoding = []
    for age_s in ages_s:
        decoding.append(bench.router.route(completion("r", "hello"), age_s).primary.decoding)
        ended(bench.lifecycle, "r", "report", age_s)
    assert decoding == [3, 0]


def test_flow_control_has_one_pool() -> None:
    """Flow control, which measures the saturation of all pods, is rejected with several pools."""
    text = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nfeatureGates: [flowControl]\n"
    argv = ["--config-text", text, "--pool-name", "a", "--pool-port", "b=9012"]
    config, _ = parse_flags(argv)
    with pytest.raises(ConfigError, match="--pool-port: not with flow control"):
        build_admission(config, {}, PodSet(), CollectorRegistry())
