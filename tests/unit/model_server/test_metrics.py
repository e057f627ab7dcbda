"""Metrics of the model server: vLLM's names, labels and meanings."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from model_server.kv_events.replay import PublisherStats
from model_server.openai.metrics import (
    ChoiceObserver,
    EngineCollector,
    LoraCollector,
    RequestMetrics,
    new_registry,
)
from model_server.requests import EngineStats

STATS = EngineStats(
    running=2,
    waiting=3,
    kv_usage=0.25,
    total_blocks=128,
    prefix_queries_tokens=100,
    prefix_hits_tokens=60,
    preemptions=1,
    prompt_tokens=110,
    generated_tokens=50,
    steps=40,
    last_step_monotonic_s=0.0,
    healthy=True,
)
LABELS = {"model_name": "m", "engine": "0"}


def test_engine_counters_have_vllms_names() -> None:
    """Every engine statistic is on the page under vLLM's name, with both labels."""
    registry = CollectorRegistry()
    registry.register(EngineCollector("m", lambda: STATS, PublisherStats(9, 8, 7, 6), {"block_size": "16"}))
    expected = {
        "vllm:num_requests_running": 2,
        "vllm:num_requests_waiting": 3,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:prefix_cache_queries_total": 100,
        "vllm:prefix_cache_hits_total": 60,
        "vllm:prompt_tokens_total": 110,
        "vllm:generation_tokens_total": 50,
        "vllm:num_preemptions_total": 1,
        "kvroute_kv_event_batches_published_total": 9,
        "kvroute_kv_event_batches_dropped_total": 8,
        "kvroute_kv_event_replays_total": 7,
        "kvroute_kv_event_replays_rejected_total": 6,
    }
    assert {name: registry.get_sample_value(name, LABELS) for name in expected} == expected
    assert registry.get_sample_value("vllm:cache_config_info", {"block_size": "16", "engine": "0"}) == 1


@pytest.mark.parametrize("asleep", [False, True])
def test_a_sleeping_engine_says_so_under_vllms_name(asleep: bool) -> None:
    """The sleep state is on the page; sleep clears the cache, as vLLM's level 1 does."""
    registry = CollectorRegistry()
    stats = replace(STATS, asleep=asleep)
    registry.register(EngineCollector("m", lambda: stats, None, {"block_size": "16"}))
    told = {
        state: registry.get_sample_value("vllm:engine_sleep_state", LABELS | {"sleep_state": state})
        for state in ("awake", "weights_offloaded", "discard_all")
    }
    assert told == {"awake": not asleep, "weights_offloaded": asleep, "discard_all": 0}


def test_a_choice_is_timed_from_its_arrival() -> None:
    """First token, token intervals and end are observed; outcomes are counted by reason."""
    registry = CollectorRegistry()
    metrics = RequestMetrics("m", registry)
    choice = ChoiceObserver(metrics, arrived_s=10.0, prompt_tokens=30)
    for now_s in (12.0, 12.5, 13.5):
        choice.tokens(now_s, started_s=10.5)
    choice.finished(14.0, "stop", completion_tokens=5)
    metrics.success["abort"].inc()

    def total(name: str) -> tuple[float | None, float | None]:
        return registry.get_sample_value(name + "_count", LABELS), registry.get_sample_value(
            name + "_sum", LABELS
        )

    assert total("vllm:time_to_first_token_seconds") == (1, 2.0)
    assert total("vllm:inter_token_latency_seconds") == (2, 1.5)
    assert total("vllm:e2e_request_latency_seconds") == (1, 4.0)
    assert total("vllm:request_queue_time_seconds") == (1, 0.5)
    assert total("vllm:request_prefill_time_seconds") == (1, 1.5)
    assert total("vllm:request_decode_time_seconds") == (1, 2.0)
    assert total("vllm:request_inference_time_seconds") == (1, 3.5)
    assert total("vllm:request_time_per_output_token_seconds") == (1, 0.5)
    assert total("vllm:request_prompt_tokens") == (1, 30)
    assert total("vllm:request_generation_tokens") == (1, 5)
    reasons = {
        reason: registry.get_sample_value("vllm:request_success_total", {**LABELS, "finished_reason": reason})
        for reason in ("stop", "length", "abort", "error")
    }
    assert reasons == {"stop": 1, "length": 0, "abort": 1, "error": 0}


def test_the_page_can_be_parsed_and_names_the_process() -> None:
    """Prometheus' own parser reads the page, which has the process's start time."""
    registry = new_registry()
    RequestMetrics("m", registry)
    registry.register(EngineCollector("m", lambda: STATS, None, {"block_size": "16"}))
    families = {family.name for family in text_string_to_metric_families(generate_latest(registry).decode())}
    assert {"process_start_time_seconds", "vllm:num_requests_running", "vllm:request_success"} <= families
    assert not any(name.startswith("kvroute_kv_event") for name in families)


def test_adapters_in_use_are_named() -> None:
    """One label set names waiting and running adapters; its value is the current time."""
    registry = CollectorRegistry()
    registry.register(LoraCollector(4, lambda: (["a", "b"], ["c"]), lambda: 1e9))
    labels = {"max_lora": "4", "waiting_lora_adapters": "c", "running_lora_adapters": "a,b"}
    assert registry.get_sample_value("vllm:lora_requests_info", labels) == 1e9


def test_the_two_tiers_are_counted_apart() -> None:
    """Host hits are external cache hits; host queries are the tokens not found on the device."""
    registry = CollectorRegistry()
    stats = replace(STATS, host_blocks=8, host_hits_tokens=20)
    registry.register(EngineCollector("m", lambda: stats, None, {}))
    names = ("prefix_cache_hits", "external_prefix_cache_queries", "external_prefix_cache_hits")
    values = [registry.get_sample_value(f"vllm:{name}_total", LABELS) for name in names]
    assert values == [40, 60, 20]
