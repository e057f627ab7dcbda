"""Picking an engine's life out of its metrics page."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.audit.engine_counters import EngineReading
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
    started_s=1.7e9, capacity_blocks=100, prompt_tokens=5e12, query_tokens=900.0, hit_tokens=100.0
)


def test_vllms_page_is_read() -> None:
    """Start, size and counters come out, however large they have grown; an awake engine is not asleep."""
    assert EnginePage(PAGE).reading() == READING


def test_a_sleeping_engine_is_known() -> None:
    """It is not awake, and its weights or all of its memory are gone."""
    asleep = PAGE.replace(b'"awake"} 1.0', b'"awake"} 0.0')
    reading = EnginePage(asleep.replace(b'discard_all"} 0.0', b'discard_all"} 1.0')).reading()
    assert reading is not None
    assert reading.asleep


def test_a_paused_engine_sleeps_with_its_cache() -> None:
    """vLLM at sleep level 0 is not awake, and has dropped nothing: its view stays, requests would wait."""
    paused = PAGE.replace(b'"awake"} 1.0', b'"awake"} 0.0')
    paused += b'vllm:engine_sleep_state{engine="0",sleep_state="weights_offloaded"} 0.0\n'
    asleep = paused.replace(b'offloaded"} 0.0', b'offloaded"} 1.0')
    readings = [EnginePage(page).reading() for page in (paused, asleep)]
    assert [reading and reading.asleep for reading in readings] == [False, True]
    assert [EnginePage(page).is_asleep for page in (paused, asleep, PAGE, b"")] == [True, True, False, False]


def test_engines_behind_one_port_sleep_when_all_do() -> None:
    """One that is awake takes requests."""
    other = b'vllm:engine_sleep_state{engine="1",sleep_state="awake"} '
    asleep = PAGE.replace(b'"awake"} 1.0', b'"awake"} 0.0')
    assert [EnginePage(asleep + other + state).is_asleep for state in (b"0.0\n", b"1.0\n")] == [True, False]


def test_several_engines_on_a_page_tell_nothing_of_one_view() -> None:
    """Their sums cannot be held against the blocks of one of them."""
    assert EnginePage(PAGE + PAGE.replace(b'engine="0"', b'engine="1"')).reading() is None


@pytest.mark.parametrize("value", [b"NaN", b"-1", b"+Inf", b"many", b""])
def test_a_senseless_number_is_not_told(value: bytes) -> None:
    """It is left out, so that nothing can be concluded from it; the others stay."""
    reading = EnginePage(PAGE.replace(b" 100.0", b" " + value)).reading()
    assert reading is not None
    assert (reading.hit_tokens, reading.query_tokens) == (None, 900.0)


@given(st.binary(max_size=400), st.integers(0, len(PAGE)))
def test_any_page_is_survived(noise: bytes, at: int) -> None:
    """Noise anywhere leads to a reading or to none, never to an error."""
    reading = EnginePage(PAGE[:at] + noise + PAGE[at:]).reading()
    assert reading is None or isinstance(reading, EngineReading)
