"""Decisions that are only explained: what they say, and that nothing remains of them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from prometheus_client import generate_latest

from router.config.picker_file import parse_config
from router.errors import RequestError
from router.inflight.failures import OUT_AFTER, RETRY_S
from router.plugins.build import build_pipeline
from router.prompts.request import RequestKind, RouteRequest
from tests.support.router.bench import TINY, Bench, completion, long_text, ready_pod

A, B = ready_pod("10.0.0.1:8000"), ready_pod("10.0.0.2:8000")
TEXT = long_text(200)
PIPELINE = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
  - {type: approx-prefix-cache-producer}
  - {type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: approx-prefix-cache-producer}}
  - {type: no-hit-lru-scorer}
  - {type: session-affinity-filter, parameters: {strategy: session_id}}
"""


def state(bench: Bench) -> tuple[object, ...]:
    """Return what a pick changes."""
    work = [bench.pods.load_table.work(pod) for pod in bench.pods.current]
    plugins = bench.ranker.state() if bench.ranker is not None else {}
    metrics = generate_latest(bench.registry)
    return (
        len(bench.ledger),
        dict(bench.index.speculative),
        work,
        plugins,
        metrics,
        bench.decision_log.latest(9),
    )


@pytest.mark.parametrize("seed", range(3))
def test_an_explained_decision_is_that_of_the_next_pick(seed: int) -> None:
    """The explained pod, order, costs and causes equal those of the pick that follows."""
    bench = Bench(seed=seed).with_pods(A, B)
    bench.index.hold(B.address, bench.keys(TEXT)[: 4 + seed])
    bench.router.route(completion("before", TEXT[:100]), 0.0)
    explained = bench.decision_log.converted(bench.router.explain(completion("r", TEXT), 0.0))
    picked = bench.decision_log.converted(bench.router.route(completion("r", TEXT), 0.0))
    assert explained | {"time": 0.0} == picked | {"time": 0.0}


@pytest.mark.parametrize("configured", [False, True], ids=["cost", "plugins"])
def test_an_explained_request_leaves_nothing_behind(configured: bool) -> None:
    """Ledger, index, sessions, plugins, metrics and decision log are as before the explanation."""
    ranker = build_pipeline(parse_config(PIPELINE, "c"), block_tokens=16, random=np.random.default_rng(0))
    bench = Bench(ranker=ranker if configured else None).with_pods(A, B)
    request = msgspec.structs.replace(completion("r", TEXT), headers={"x-session-id": "s"})
    bench.router.route(completion("before", TEXT), 0.0)
    before = state(bench)
    for _ in range(5):
        bench.router.explain(request, 0.0)
    assert state(bench) == before
    assert bench.router.route(request, 0.0).session_pod is None


def test_an_explained_request_of_a_stored_response_is_not_counted() -> None:
    """A request that names a stored response is explained for its pod, and counted only when it is sent."""
    bench = Bench().with_pods(A, B)
    bench.lifecycle.states.learn("resp_1", B.address)
    body = {"model": TINY, "input": "x", "previous_response_id": "resp_1"}
    request = RouteRequest("r", RequestKind.RESPONSES, TINY, body, 60)
    assert bench.router.explain(request, 0.0).primary.pod == B.address
    assert bench.sample("kvroute_router_stateful_requests_total", outcome="held") == 0
    bench.router.route(request, 0.0)
    assert bench.sample("kvroute_router_stateful_requests_total", outcome="held") == 1


def test_explaining_does_not_use_up_the_trial_of_a_failing_pod() -> None:
    """A pod on trial still waits for its trial request after an explanation that picks the pod."""
    bench = Bench().with_pods(A, B)
    failures = bench.lifecycle.failures
    for _ in range(OUT_AFTER):
        failures.failed(A.address, 0.0, 0.0)
    failures.expire(RETRY_S)
    request = msgspec.structs.replace(completion("r", TEXT), candidates=frozenset({A.address}))
    assert bench.router.explain(request, RETRY_S).primary.pod == A.address
    assert failures.trials == {A.address}
    bench.router.route(request, RETRY_S)
    assert failures.trials == set()


def test_a_request_that_would_be_rejected_has_the_error_of_the_pick() -> None:
    """An explained request for an unknown model raises the pick's error and counts no failure."""
    bench = Bench().with_pods(A)
    before = generate_latest(bench.registry)
    with pytest.raises(RequestError, match="does not exist"):
        bench.router.explain(completion("r", TEXT, model="other"), 0.0)
    assert generate_latest(bench.registry) == before
