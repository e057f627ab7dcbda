"""The decision log: what it stores, and its limits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from msgspec.structs import replace

from router.config.picker_file import parse_config
from router.feedback.lifecycle import REPORT, RESPONSE
from router.observe.decision_log import Explain
from router.plugins.build import build_pipeline
from router.pods.pod_set import ROLE_LABEL, Pod
from router.prompts.request import RequestKind, RouteRequest
from tests.unit.router_support import TINY, Bench, completion, entry, long_text, ready_pod

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
PODS = [ready_pod(f"10.0.0.{number}:8000") for number in range(1, 11)]
TEXT, OTHER = long_text(100), long_text(100, 1)


def test_among_many_pods_fewer_decisions_are_kept() -> None:
    """Above a total number of candidates the oldest decisions are dropped; the newest always stays."""
    bench, explain = Bench().with_pods(*PODS), Explain(100, str, candidates_max=25)
    decisions = [bench.router.route(completion(f"r{number}", TEXT), 0.0) for number in range(3)]
    for decision in decisions:
        explain.decided(decision)
    assert [record["request_id"] for record in explain.latest(100)] == ["r2", "r1"]
    small = Explain(100, str, candidates_max=5)
    for decision in decisions:
        small.decided(decision)
    assert [record["request_id"] for record in small.latest(100)] == ["r2"]


def test_decisions_with_many_prompts_use_more_of_the_log() -> None:
    """Hits are stored per prompt and pod: eleven prompts use the space of three decisions."""
    bench, explain = Bench().with_pods(*PODS), Explain(100, str, candidates_max=60)
    for number, prompt in enumerate([TEXT, [TEXT] * 11, [TEXT] * 11, TEXT]):
        explain.decided(bench.router.route(completion(f"r{number}", prompt), 0.0))
        kept = [record["request_id"] for record in explain.latest(100)]
    assert kept == ["r3", "r2"]


def test_a_page_is_limited_by_its_number_of_pods() -> None:
    """A page ends before its limit of pods, excluded ones included, but has at least one decision."""
    bench = Bench().with_pods(*PODS, *(ready_pod(f"10.0.1.{number}:8000", model="m") for number in range(5)))
    for number in range(5):
        bench.router.route(completion(f"r{number}", TEXT), 0.0)
    assert len(bench.explain.latest(5, pods_max=45)) == 3
    assert len(bench.explain.latest(5, pods_max=44)) == 2
    assert len(bench.explain.latest(5, pods_max=1)) == 1


def test_a_partially_known_prompt_is_recorded_with_its_reason() -> None:
    """A prompt known only up to an image counts in full as load and in part as prefix, with the reason."""
    bench = Bench().with_pods(*PODS)
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": TEXT}, image]}]
    body = {"model": TINY, "messages": messages}
    bench.router.route(RouteRequest("r", RequestKind.CHAT, TINY, body, body_bytes=500), 0.0)
    shown = bench.explain.one("r")
    assert shown is not None
    assert (shown["degraded"], shown["partial"], shown["prefill_pod"]) == (None, "media", None)


def test_a_repeated_request_id_keeps_its_newest_decision() -> None:
    """A retry with the same request id replaces the decision, and its candidates are counted once."""
    bench, explain = Bench().with_pods(*PODS), Explain(100, str, candidates_max=25)
    for text in (TEXT, "short"):
        for _ in range(3):
            explain.decided(bench.router.route(completion("r", text), 0.0))
    (record,) = explain.latest(10)
    assert record["prompt_tokens"] < 10


@pytest.mark.parametrize("second", [PODS[1], PODS[0]], ids=["another_pod", "the_same_pod"])
def test_reports_of_another_request_with_the_id_leave_the_newest_unchanged(second: Pod) -> None:
    """With two requests in flight under one id, reports for the first do not change the second's record."""
    bench = Bench().with_pods(*PODS[:2])
    bench.index.hold(PODS[0].address, bench.keys(TEXT))
    bench.index.hold(second.address, bench.keys(OTHER)[:2])
    first = bench.router.route(completion("r", TEXT), 0.0)
    newest = bench.router.route(replace(completion("r", OTHER), candidates=frozenset({second.address})), 1.0)
    assert (first.primary.pod, newest.primary.pod) == (PODS[0].address, second.address)
    bench.outcomes.first_token("r", REPORT, 2.0, pod=first.primary.pod)
    bench.outcomes.ended("r", REPORT, 3.0, pod=first.primary.pod, cached_tokens=500)
    record = bench.explain.one("r")
    assert record is not None
    assert (record["prefill_end"], record["delivered_cached_tokens"], record["end"]) == (None, None, None)
    assert bench.sample("kvroute_router_delivered_cached_tokens_total") == 0
    bench.outcomes.ended("r", REPORT, 4.0, pod=newest.primary.pod, cached_tokens=32)
    record = bench.explain.one("r")
    assert record is not None
    assert record["end"] == {"source": "report", "after_s": 3.0, "failed": False}
    assert bench.sample("kvroute_router_delivered_cached_tokens_total") == 32
    assert bench.sample("kvroute_router_compared_predicted_cached_tokens_total") == 32


def test_late_reports_of_another_pod_leave_the_newest_unchanged() -> None:
    """After the end, the serving pod distinguishes requests under one id for late reports."""
    bench = Bench().with_pods(*PODS[:2])
    bench.index.hold(PODS[0].address, bench.keys(TEXT))
    bench.index.hold(PODS[1].address, bench.keys(OTHER)[:2])
    for text, pod in ((TEXT, PODS[0]), (OTHER, PODS[1])):
        assert bench.router.route(completion("r", text), 0.0).primary.pod == pod.address
        bench.outcomes.ended("r", REPORT, 1.0, pod=pod.address)
    for pod, cached_tokens, told in ((PODS[0], 500, None), (PODS[1], 32, 32)):
        bench.outcomes.ended("r", RESPONSE, 2.0, pod=pod.address, cached_tokens=cached_tokens)
        record = bench.explain.one("r")
        assert record is not None
        assert record["delivered_cached_tokens"] == told


def test_a_candidate_records_every_input_of_its_cost() -> None:
    """A candidate's record has every input of its cost: tokens by tier, queue, load age, view."""
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


def test_a_decision_records_candidates_prediction_and_end() -> None:
    """A decision's record has candidates with costs, excluded pods, prediction, delivery and end."""
    held = PODS[1].address
    bench = Bench().with_pods(*PODS[:2], ready_pod("10.0.1.1:8000", model="other"))
    bench.index.hold(held, bench.keys(OTHER)[:4])
    bench.index.hold(held, bench.keys(OTHER)[:6], host=True)
    bench.router.route(completion("r", OTHER), 10.0)
    bench.outcomes.ended("r", REPORT, 12.0, cached_tokens=40)
    record = bench.explain.one("r")
    assert record is not None
    best, other = record["candidates"]
    assert (best["pod"], best["pod_name"], best["cached_tokens"]) == (held, "pod-8000", 96)
    assert best["cached_tokens_by_tier"] == {"gpu": 64, "cpu": 32}
    assert (best["host_tokens"], best["uncached_tokens"]) == (32, record["prompt_tokens"] - 96)
    assert best["cost_s"] < other["cost_s"]
    assert other["cached_tokens_by_tier"] == {}
    assert record["excluded"] == [{"pod": "10.0.1.1:8000", "reason": "does not serve the model"}]
    assert (record["predicted_cached_tokens"], record["best_cached_tokens"]) == (96, 96)
    assert record["delivered_cached_tokens"] == 40
    assert (record["prefill_end"], record["end"]["source"], record["end"]["after_s"]) == (None, REPORT, 2.0)
    assert record["reason"].startswith("longest cached prefix")


def test_a_pipelines_decision_records_scores_filters_and_prefill_pod() -> None:
    """A pipeline's decision has scores, the filter that excluded each pod, and the prefill pod."""
    config = parse_config(DISAGGREGATED, "c.yaml")
    ranker = build_pipeline(config, block_tokens=16, random=np.random.default_rng(3))
    a, b = (pod.address for pod in PODS[:2])
    pods = [
        dataclasses.replace(ready_pod(pod), entry=entry(pod, **{ROLE_LABEL: role}))
        for pod, role in ((a, "prefill"), (b, "decode"))
    ]
    bench = Bench(ranker=ranker).with_pods(*pods)
    bench.router.route(completion("r", TEXT), 0.0)
    record = bench.explain.one("r")
    assert record is not None
    (candidate,) = record["candidates"]
    assert (candidate["pod"], candidate["score"], record["prefill_pod"]) == (b, 1.0, a)
    assert record["excluded"] == [{"pod": a, "reason": "removed by filter decode-filter"}]
