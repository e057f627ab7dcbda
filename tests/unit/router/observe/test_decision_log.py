"""Tests of the decision log: its records, and its limits."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from router.config.picker_file import parse_config
from router.feedback.outcomes import REPORT, RESPONSE
from router.observe.decision_log import DecisionLog
from router.plugins.build import build_pipeline
from router.pods.pod_set import ROLE_LABEL, Pod
from router.prompts.request import RequestKind, RouteRequest
from tests.support.router.bench import TINY, Bench, completion, ended, entry, long_text, ready_pod

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


def test_many_candidates_limit_the_decisions_kept() -> None:
    """Beyond `candidates_max` candidates in all, the oldest decisions are dropped, never the newest."""
    bench = Bench().with_pods(*PODS)
    log = DecisionLog(100, str, bench.metrics, candidates_max=25)
    decisions = [bench.router.route(completion(f"r{number}", TEXT), 0.0) for number in range(3)]
    for decision in decisions:
        log.decided(decision)
    assert [record["request_id"] for record in log.latest(100)] == ["r2", "r1"]
    small = DecisionLog(100, str, bench.metrics, candidates_max=5)
    for decision in decisions:
        small.decided(decision)
    assert [record["request_id"] for record in small.latest(100)] == ["r2"]


def test_many_prompts_limit_the_decisions_kept() -> None:
    """A decision with many prompts has a higher weight: eleven prompts count as three decisions."""
    bench = Bench().with_pods(*PODS)
    log = DecisionLog(100, str, bench.metrics, candidates_max=60)
    for number, prompt in enumerate([TEXT, [TEXT] * 11, [TEXT] * 11, TEXT]):
        log.decided(bench.router.route(completion(f"r{number}", prompt), 0.0))
        kept = [record["request_id"] for record in log.latest(100)]
    assert kept == ["r3", "r2"]


def test_page_is_limited_by_pods() -> None:
    """A page has at most `pods_max` pods, including excluded ones, but at least one decision."""
    bench = Bench().with_pods(*PODS, *(ready_pod(f"10.0.1.{number}:8000", model="m") for number in range(5)))
    for number in range(5):
        bench.router.route(completion(f"r{number}", TEXT), 0.0)
    assert len(bench.decision_log.latest(5, pods_max=45)) == 3
    assert len(bench.decision_log.latest(5, pods_max=44)) == 2
    assert len(bench.decision_log.latest(5, pods_max=1)) == 1


def test_partial_prompt_is_recorded() -> None:
    """A decision on a prompt with an image is not degraded, and has the reason "media" as `partial`."""
    bench = Bench().with_pods(*PODS)
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": TEXT}, image]}]
    body = {"model": TINY, "messages": messages}
    bench.router.route(RouteRequest("r", RequestKind.CHAT, TINY, body, body_bytes=500), 0.0)
    record = bench.decision_log.find("r")
    assert record is not None
    assert (record["degraded"], record["partial"], record["prefill_pod"]) == (None, "media", None)


def test_repeated_request_id_replaces_the_decision() -> None:
    """A retry under the same id replaces the former decision, and its candidates count once."""
    bench = Bench().with_pods(*PODS)
    log = DecisionLog(100, str, bench.metrics, candidates_max=25)
    for text in (TEXT, "short"):
        for _ in range(3):
            log.decided(bench.router.route(completion("r", text), 0.0))
    (record,) = log.latest(10)
    assert record["prompt_tokens"] < 10


@pytest.mark.parametrize("second", [PODS[1], PODS[0]], ids=["another_pod", "the_same_pod"])
def test_reports_on_an_earlier_request_of_the_id_are_not_recorded(second: Pod) -> None:
    """With two requests in flight under one id, reports on the first do not change the second's record."""
    bench = Bench().with_pods(*PODS[:2])
    bench.index.hold(PODS[0].address, bench.keys(TEXT))
    bench.index.hold(second.address, bench.keys(OTHER)[:2])
    first = bench.router.route(completion("r", TEXT), 0.0)
    newest = bench.router.route(replace(completion("r", OTHER), candidates=frozenset({second.address})), 1.0)
    assert (first.primary.pod, newest.primary.pod) == (PODS[0].address, second.address)
    bench.lifecycle.first_token("r", REPORT, 2.0, pod=first.primary.pod)
    ended(bench.lifecycle, "r", REPORT, 3.0, pod=first.primary.pod, cached_tokens=500)
    record = bench.decision_log.find("r")
    assert record is not None
    assert (record["prefill_end"], record["delivered_cached_tokens"], record["end"]) == (None, None, None)
    assert bench.sample("kvroute_router_delivered_cached_tokens_total") == 0
    ended(bench.lifecycle, "r", REPORT, 4.0, pod=newest.primary.pod, cached_tokens=32)
    record = bench.decision_log.find("r")
    assert record is not None
    assert record["end"] == {"source": "report", "after_s": 3.0, "failed": False}
    assert bench.sample("kvroute_router_delivered_cached_tokens_total") == 32
    assert bench.sample("kvroute_router_compared_predicted_cached_tokens_total") == 32


def test_late_report_from_another_pod_is_not_recorded() -> None:
    """After the ends of two requests of one id, a report applies only if it names the newest one's pod."""
    bench = Bench().with_pods(*PODS[:2])
    bench.index.hold(PODS[0].address, bench.keys(TEXT))
    bench.index.hold(PODS[1].address, bench.keys(OTHER)[:2])
    for text, pod in ((TEXT, PODS[0]), (OTHER, PODS[1])):
        assert bench.router.route(completion("r", text), 0.0).primary.pod == pod.address
        ended(bench.lifecycle, "r", REPORT, 1.0, pod=pod.address)
    for pod, cached_tokens, recorded in ((PODS[0], 500, None), (PODS[1], 32, 32)):
        ended(bench.lifecycle, "r", RESPONSE, 2.0, pod=pod.address, cached_tokens=cached_tokens)
        record = bench.decision_log.find("r")
        assert record is not None
        assert record["delivered_cached_tokens"] == recorded


def test_output_tokens_are_learnt_by_model() -> None:
    """A record has its output tokens, and the mean before it, in which the last 100 answers weigh most."""
    bench = Bench().with_pods(PODS[0], ready_pod("10.0.1.1:8000", model="other"))

    def answered(now_s: float, tokens: int, *, failed: bool = False, **changes: Any) -> tuple[Any, Any]:
        bench.router.route(replace(completion("r", TEXT), **changes), now_s)
        ended(bench.lifecycle, "r", REPORT, now_s + 0.5, output_tokens=tokens, failed=failed)
        # A second report does not count.
        again = {"output_tokens": 9_999, "cached_tokens": 0}
        ended(bench.lifecycle, "r", RESPONSE, now_s + 0.5, failed=failed, **again)
        record = bench.decision_log.find("r")
        assert record is not None
        return record["output_tokens"], record["model_output_tokens"]

    assert answered(0.0, 10) == (10, None)
    assert answered(1.0, 30) == (30, 10.0)
    for number in range(198):
        answered(2.0 + number, 20)
    assert answered(300.0, 1_020) == (1_020, 20.0)
    assert answered(301.0, 5, failed=True) == (None, pytest.approx(30.0))
    assert answered(302.0, 20) == (20, pytest.approx(30.0))
    assert answered(303.0, 20, model="other") == (20, None)


def test_candidate_has_its_cost_breakdown() -> None:
    """A candidate's record has tokens by tier, uncached tokens, all parts of its cost, load age and view."""
    bench = Bench().with_pods(PODS[0])
    bench.index.hold(PODS[0].address, bench.keys(TEXT)[:2])
    bench.router.route(completion("r", TEXT), 0.0)
    record = bench.decision_log.find("r")
    assert record is not None
    (candidate,) = record["candidates"]
    assert candidate["cached_tokens_by_tier"] == {"gpu": 32}
    assert candidate["uncached_tokens"] == record["prompt_tokens"] - 32
    parts = ("queued_prefill_s", "copy_s", "kv_pressure_s", "extra_s")
    whole_s = sum(candidate[part] for part in parts) + candidate["own_weight"] * candidate["own_prefill_s"]
    assert candidate["cost_s"] == whole_s > 0.0
    assert (candidate["load_age_s"], candidate["view"], candidate["slowdown"]) == (None, "EXACT", 1.0)


def test_record_has_candidates_exclusions_and_end() -> None:
    """A record has candidates with tiers and costs, excluded pods, cached tokens, and the end's source."""
    held = PODS[1].address
    bench = Bench().with_pods(*PODS[:2], ready_pod("10.0.1.1:8000", model="other"))
    bench.index.hold(held, bench.keys(OTHER)[:4])
    bench.index.hold(held, bench.keys(OTHER)[:6], host=True)
    bench.router.route(completion("r", OTHER), 10.0)
    ended(bench.lifecycle, "r", REPORT, 12.0, cached_tokens=40)
    record = bench.decision_log.find("r")
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


def test_pipeline_decision_has_scores_filters_and_prefill_pod() -> None:
    """With a plugin pipeline, a record has scores, the filter of each excluded pod, and the prefill pod."""
    config = parse_config(DISAGGREGATED, "c.yaml")
    ranker = build_pipeline(config, block_tokens=16, random=np.random.default_rng(3))
    a, b = (pod.address for pod in PODS[:2])
    pods = [
        dataclasses.replace(ready_pod(pod), entry=entry(pod, **{ROLE_LABEL: role}))
        for pod, role in ((a, "prefill"), (b, "decode"))
    ]
    bench = Bench(ranker=ranker).with_pods(*pods)
    bench.router.route(completion("r", TEXT), 0.0)
    record = bench.decision_log.find("r")
    assert record is not None
    (candidate,) = record["candidates"]
    assert (candidate["pod"], candidate["score"], record["prefill_pod"]) == (b, 1.0, a)
    assert record["excluded"] == [{"pod": a, "reason": "removed by filter decode-filter"}]
