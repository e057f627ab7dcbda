"""Engine counters from a metrics page."""

from __future__ import annotations

import pytest

from indexer.audit.engine_counters import CachingFacts, EngineReading
from router.pods.engine_load import EnginePage

PAGE = b"""process_start_time_seconds 1.7e+09
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0
vllm:prompt_tokens_total{engine="0"} 5e+12
vllm:prompt_tokens_created{engine="0"} 1.7e+09
vllm:prefix_cache_queries_total{engine="0"} 900.0
vllm:prefix_cache_hits_total{engine="0"} 100.0
vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",sleep_state="discard_all"} 0.0
"""
READING = EngineReading(
    started_s=1.7e9,
    capacity_blocks=100,
    prompt_tokens=5e12,
    query_tokens=900.0,
    hit_tokens=100.0,
    has_drafter=False,
    caching=CachingFacts(block_tokens=16),
)


def test_vllms_page_is_read() -> None:
    """Start, size and counters are read, however large; an awake engine is not asleep."""
    assert EnginePage(PAGE).reading() == READING


def test_counters_of_speculative_decoding_show_a_drafter() -> None:
    """vLLM reports these counters, even at 0, exactly with a drafter; another engine's page says nothing."""
    drafts = b'vllm:spec_decode_num_drafts_total{engine="0"} 0.0\n'
    readings = [EnginePage(page).reading() for page in (PAGE + drafts, b"process_start_time_seconds 1.0\n")]
    assert [reading and reading.has_drafter for reading in readings] == [True, None]


def test_a_sleeping_engine_is_detected() -> None:
    """An engine that is not awake and has offloaded or discarded its weights is asleep."""
    asleep = PAGE.replace(b'"awake"} 1.0', b'"awake"} 0.0')
    reading = EnginePage(asleep.replace(b'discard_all"} 0.0', b'discard_all"} 1.0')).reading()
    assert reading is not None
    assert reading.asleep


def test_a_paused_engine_keeps_its_cache() -> None:
    """vLLM at sleep level 0 counts as asleep for requests, but keeps its cache."""
    paused = PAGE.replace(b'"awake"} 1.0', b'"awake"} 0.0')
    paused += b'vllm:engine_sleep_state{engine="0",sleep_state="weights_offloaded"} 0.0\n'
    asleep = paused.replace(b'offloaded"} 0.0', b'offloaded"} 1.0')
    readings = [EnginePage(page).reading() for page in (paused, asleep)]
    assert [reading and reading.asleep for reading in readings] == [False, True]
    assert [EnginePage(page).is_asleep for page in (paused, asleep, PAGE, b"")] == [True, True, False, False]


def test_engines_behind_one_port_sleep_if_all_do() -> None:
    """A pod with one awake engine is not asleep."""
    other = b'vllm:engine_sleep_state{engine="1",sleep_state="awake"} '
    asleep = PAGE.replace(b'"awake"} 1.0', b'"awake"} 0.0')
    assert [EnginePage(asleep + other + state).is_asleep for state in (b"0.0\n", b"1.0\n")] == [True, False]


def test_several_engines_on_a_page_have_common_facts_only() -> None:
    """Sums over several engines cannot be compared with one engine's view; their settings are read."""
    page = PAGE + PAGE.replace(b'engine="0"', b'engine="1"')
    assert EnginePage(page).reading() == EngineReading(
        has_drafter=False, caching=CachingFacts(block_tokens=16)
    )


@pytest.mark.parametrize(("told", "caches"), [(b"False", False), (b"True", True)])
def test_prefix_caching_is_read(told: bytes, caches: bool) -> None:
    """The page tells whether prefix caching is on, and how long the prompts are."""
    page = PAGE.replace(b'block_size="16"', b'block_size="16",enable_prefix_caching="%s"' % told)
    for name, value in ((b"sum", b"640.0"), (b"count", b"4.0")):
        page += b'vllm:request_prompt_tokens_%s{engine="0"} %s\n' % (name, value)
    reading = EnginePage(page).reading()
    assert reading is not None
    assert reading.caching == CachingFacts(caches, 16, 4.0, 640.0)


def test_vllms_own_connector_is_recognized() -> None:
    """Metrics of vLLM's OffloadingConnector mean that removals from host memory are published."""
    own = PAGE + b'vllm:kv_offload_load_bytes_total{engine="0"} 0.0\n'
    readings = [EnginePage(page).reading() for page in (own, PAGE)]
    assert [reading and reading.caching.reports_evictions for reading in readings] == [True, False]
