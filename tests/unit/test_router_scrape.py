"""Picking the load out of a metrics page."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, Info, generate_latest

from router.scrape import EngineLoad, engine_load

PAGE = b"""# HELP vllm:num_requests_waiting Waiting.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 99.0
vllm:num_requests_running{engine="0",model_name="m {odd} \\"name\\""} 2.0 1700000000000
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0
"""


def test_vllms_page_is_read() -> None:
    """Waiting, running, use and size come out; similar names, odd labels and timestamps do not disturb."""
    assert engine_load(PAGE, 5.0) == EngineLoad(3, 2, 0.25, 1600, 5.0)


def test_data_parallel_ranks_add_up() -> None:
    """Several engines on one page: requests and capacity are sums, use is the mean."""
    page = PAGE + PAGE.replace(b'engine="0"', b'engine="1"').replace(b"0.25", b"0.75")
    assert engine_load(page, 5.0) == EngineLoad(6, 4, 0.5, 3200, 5.0)


def test_what_prometheus_client_writes_is_read() -> None:
    """A page of the real exposition library, without labels, is understood."""
    registry = CollectorRegistry()
    Gauge("vllm:num_requests_waiting", "w", registry=registry).set(1)
    Gauge("vllm:num_requests_running", "r", registry=registry).set(4)
    Gauge("vllm:kv_cache_usage_perc", "u", registry=registry).set(1e-05)
    Info("vllm:cache_config", "c", registry=registry).info({"block_size": "8", "num_gpu_blocks": "10"})
    assert engine_load(generate_latest(registry), 0.0) == EngineLoad(1, 4, 1e-05, 80, 0.0)


@pytest.mark.parametrize("value", [b"NaN", b"+Inf", b"-1", b"1e300", b"many"])
def test_a_page_with_a_senseless_number_tells_nothing(value: bytes) -> None:
    """Senseless values make the page unusable rather than the load wrong."""
    assert engine_load(PAGE.replace(b"0.25", value), 0.0) is None


def test_a_page_without_engine_metrics_tells_nothing() -> None:
    """An empty or foreign page is no load of zero."""
    assert engine_load(b"", 0.0) is None
    assert engine_load(b"process_cpu_seconds_total 1.0\n", 0.0) is None


@given(
    st.binary(max_size=300)
    | st.lists(st.sampled_from(PAGE.split(b"\n")) | st.binary(max_size=40)).map(b"\n".join)
)
def test_any_page_is_survived(page: bytes) -> None:
    """Whatever the bytes, the answer is None or a load within its bounds."""
    load = engine_load(page, 0.0)
    assert load is None or (load.waiting >= 0 and load.running >= 0 and 0.0 <= load.kv_usage <= 1.0)
