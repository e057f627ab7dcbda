"""Why a pod was picked, over gRPC and in a response header, at the real doors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from router._pb import endpoint_picker_pb2 as pb
from router._pb import endpoint_picker_pb2_grpc as pb_grpc
from router.config_file import parse_config
from router.ext_proc import ExtProcOptions
from router.plugins.build import build_pipeline
from router.plugins.labels import ROLE_LABEL
from router.request import MODEL_CHARS_MAX, RequestKind, RouteRequest
from tests.unit.router_support import TINY, Bench, completion, entry, long_text, ready_pod
from tests.wire.router_wire_support import (
    TIMEOUT_S,
    Doors,
    body,
    doors,
    headers,
    response_headers,
    set_headers,
)

pytestmark = pytest.mark.usefixtures("each_transport")

DISAGGREGATED = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
  - {type: always-disagg-pd-decider}
  - {type: disagg-profile-handler, parameters: {deciders: {prefill: always-disagg-pd-decider}}}
  - {type: prefill-filter}
  - {type: decode-filter}
  - {type: queue-scorer}
schedulingProfiles:
  - {name: prefill, plugins: [{pluginRef: prefill-filter}]}
  - {name: decode, plugins: [{pluginRef: decode-filter}, {pluginRef: queue-scorer}]}
"""
A, B = ready_pod("10.0.0.1:8000"), ready_pod("10.0.0.2:8000")
TEXT = long_text(200)
BODY = json.dumps({"model": TINY, "prompt": TEXT}).encode()


def explain(served: Doors, **fields: Any) -> list[pb.ExplainedDecision]:
    """Calls Explain."""
    stub: Any = pb_grpc.DecisionLogStub(served.channel)
    return list(stub.Explain(pb.ExplainRequest(**fields), timeout=TIMEOUT_S).decisions)


def test_a_decisions_whole_story_is_told_over_grpc() -> None:
    """Candidates with tiers and prices, the excluded, prediction and delivery, and who told the end."""
    bench = Bench().with_pods(A, B, ready_pod("10.0.0.3:8000", model="other"))
    bench.index.hold(B.address, bench.keys(TEXT)[:4])
    bench.index.hold(B.address, bench.keys(TEXT)[:8], host=True)
    bench.router.route(completion("r", TEXT), 10.0)
    bench.outcomes.ended("r", "report", 12.0, cached_tokens=100)
    with doors(bench) as served:
        (told,) = explain(served, request_id="r")
    best, other = told.candidates
    assert (best.endpoint.address, best.endpoint.pod_name, best.endpoint.cached_tokens) == (
        B.address,
        "pod-8000",
        128,
    )
    assert dict(best.cached_tokens_by_tier) == {"gpu": 64, "cpu": 64}
    assert (best.host_tokens, best.uncached_tokens) == (64, told.prompt_tokens - 128)
    assert best.endpoint.cost_s < other.endpoint.cost_s
    assert not other.cached_tokens_by_tier
    assert not best.HasField("load_age_s")
    assert dict(told.excluded) == {"10.0.0.3:8000": "does not serve the model"}
    assert (told.predicted_cached_tokens, told.best_cached_tokens, told.delivered_cached_tokens) == (
        128,
        128,
        100,
    )
    assert (told.end.source, told.end.after_s, told.HasField("prefill_end")) == ("report", 2.0, False)
    assert told.reason.startswith("longest cached prefix")


def test_what_a_pipeline_decided_is_told_over_grpc() -> None:
    """Scores, what filters removed, who prefills, and that of the prompt only the beginning was known."""
    config = parse_config(DISAGGREGATED, "c.yaml", Path())
    ranker = build_pipeline(config, block_tokens=16, strict=False, random=np.random.default_rng(3))
    roles = {A.address: "prefill", B.address: "decode"}
    pods = [replace(ready_pod(pod), entry=entry(pod, **{ROLE_LABEL: role})) for pod, role in roles.items()]
    bench = Bench(ranker=ranker).with_pods(*pods)
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": TEXT}, image]}]
    request_body = {"model": TINY, "messages": messages}
    bench.router.route(RouteRequest("r", RequestKind.CHAT, TINY, request_body, body_bytes=500), 0.0)
    with doors(bench) as served:
        (told,) = explain(served, request_id="r")
    (candidate,) = told.candidates
    assert (candidate.endpoint.address, candidate.score) == (B.address, 1.0)
    assert dict(told.excluded) == {A.address: "removed by filter decode-filter"}
    assert (told.prefill_pod, told.partial, told.degraded) == (A.address, "media", "")


@pytest.mark.parametrize(
    ("others", "model", "decisions"), [(1000, TINY, 100), (0, "\U0001d52a" * MODEL_CHARS_MAX, 400)]
)
def test_an_answer_is_never_larger_than_a_client_takes(others: int, model: str, decisions: int) -> None:
    """Asked for more than a message has room for, as by many excluded pods or long names, it ends before."""
    untold = replace(A, models=None) if model != TINY else A
    excluded = [ready_pod(f"10.1.{number // 250}.{number % 250}:8000", model="m") for number in range(others)]
    bench = Bench(decisions_kept=decisions).with_pods(untold, *excluded)
    for number in range(decisions):
        bench.router.route(completion(f"r{number}", "hi", model=model), 0.0)
    with doors(bench) as served:
        told = explain(served, count=decisions)
    assert [one.request_id for one in told] == [f"r{decisions - 1 - place}" for place in range(len(told))]
    assert 10 < len(told) < decisions


def test_the_last_decisions_come_newest_first() -> None:
    """Without an id the last ones are told, as many as asked for; of an unknown id none."""
    bench = Bench().with_pods(A)
    for number in range(30):
        bench.router.route(completion(f"r{number}", "hi"), 0.0)
    with doors(bench) as served:
        assert [told.request_id for told in explain(served, count=3)] == ["r29", "r28", "r27"]
        assert len(explain(served)) == 20
        assert explain(served, request_id="unheard-of") == []


def test_responses_carry_nothing_of_the_decision() -> None:
    """A response gets the mark that it passed here, and no other header."""
    with doors(Bench().with_pods(A), ExtProcOptions(responses_full=True)) as served:
        *_, answer = served.exchange(
            headers(path="/v1/completions"), body(BODY), response_headers(status="200", end=True)
        )
        assert set_headers(answer) == {"x-went-into-resp-headers": "true"}
