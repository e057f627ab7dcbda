"""Picking the load out of a metrics page."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, Info, generate_latest

from router.pods.engine_load import EngineLoad, EnginePage, LoraLoad


def engine_load(page: bytes, now_s: float) -> EngineLoad | None:
    """The load that a page tells."""
    return EnginePage(page).load(now_s)


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


@pytest.mark.parametrize("value", [b"NaN", b"+Inf", b"-1", b"1e300", b"many", b""])
@pytest.mark.parametrize(
    ("told", "load"),
    [
        (b" 0.25", EngineLoad(3, 2, None, 1600, 5.0)),
        (b" 3.0", EngineLoad(None, 2, 0.25, 1600, 5.0)),
        (b" 2.0", EngineLoad(3, None, 0.25, 1600, 5.0)),
    ],
)
def test_a_senseless_number_voids_only_its_figure(value: bytes, told: bytes, load: EngineLoad) -> None:
    """A gauge of no sense is not told, which the load says; the page's other figures stand."""
    found = engine_load(PAGE.replace(told, b" " + value), 5.0)
    assert found == load
    assert len(load.untold) == 1


def test_a_sum_that_lacks_an_engine_is_not_told() -> None:
    """Of two engines one tells no sensible queue: what the other tells is not the pod's."""
    page = PAGE + PAGE.replace(b'engine="0"', b'engine="1"').replace(b" 3.0", b" NaN")
    load = engine_load(page, 5.0)
    assert load == EngineLoad(None, 4, 0.25, 3200, 5.0)
    assert (load.untold, load.requests) == (("waiting",), None)


@pytest.mark.parametrize(
    "page",
    [
        PAGE.replace(b" 3.0", b" NaN").replace(b" 2.0", b" NaN").replace(b" 0.25", b" NaN"),
        b'vllm:kv_cache_usage_perc{engine="0"} NaN\n',
    ],
)
def test_a_page_of_senseless_numbers_tells_nothing(page: bytes) -> None:
    """Where neither queue, running requests nor use of the cache are told there is no load."""
    assert engine_load(page, 5.0) is None


def test_senseless_adapters_and_speeds_are_not_told() -> None:
    """They leave the load as it is, too."""
    lora = b'vllm:lora_requests_info{max_lora="2",running_lora_adapters="sql",waiting_lora_adapters=""} NaN\n'
    speed = b"kvroute_engine_prefill_tokens_per_second NaN\n"
    assert engine_load(PAGE + lora + speed, 5.0) == EngineLoad(3, 2, 0.25, 1600, 5.0)


SGLANG = b"""sglang:num_queue_reqs{model_name="m"} 3.0
sglang:num_running_reqs{model_name="m"} 2.0
sglang:token_usage{model_name="m"} 0.25
sglang:cache_config_info{page_size="16",num_pages="100"} 1.0
"""
# As every scheduler of two data parallel ranks tells it, of which each has two tensor ranks.
SGLANG_SERIES = b'sglang:%b{dp_rank="%d",engine_type="unified",model_name="m",pp_rank="0",tp_rank="%d"} %b\n'
SGLANG_RANKS = b"".join(
    SGLANG_SERIES % (name, dp_rank, tp_rank, value)
    for name, *values in [
        (b"num_queue_reqs", b"3.0", b"1.0"),
        (b"num_running_reqs", b"2.0", b"5.0"),
        (b"token_usage", b"0.25", b"0.75"),
        (b"page_size", b"16.0", b"16.0"),
        (b"num_pages", b"100.0", b"100.0"),
    ]
    for dp_rank, value in enumerate(values)
    for tp_rank in range(2)
)
TRTLLM = b"""trtllm_num_requests_waiting 3
trtllm_num_requests_running 2
trtllm_kv_cache_utilization 0.25
trtllm_kv_cache_tokens_per_block 16
trtllm_kv_cache_max_blocks 100
"""
TRITON = b"""nv_trt_llm_request_metrics{model="m",request_type="waiting",version="1"} 3
nv_trt_llm_request_metrics{model="m",request_type="scheduled",version="1"} 2
nv_trt_llm_request_metrics{model="m",request_type="max",version="1"} 999
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="m",version="1"} 0.25
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="m",version="1"} 16
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="m",version="1"} 100
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="m",version="1"} 25
"""


@pytest.mark.parametrize("page", [SGLANG, TRTLLM, TRITON])
def test_other_engines_tell_the_same_under_their_names(page: bytes) -> None:
    """SGLang, TensorRT-LLM and Triton name their series differently and mean the same."""
    assert engine_load(b"up 1\n" + page, 5.0) == EngineLoad(3, 2, 0.25, 1600, 5.0)


def test_ranks_that_share_their_requests_count_once() -> None:
    """SGLang's tensor and pipeline ranks tell the same again and add nothing; data parallel ranks add up."""
    assert engine_load(SGLANG_RANKS, 5.0) == EngineLoad(4, 7, 0.5, 3200, 5.0)
    one = b"".join(line for line in SGLANG_RANKS.splitlines(keepends=True) if b'dp_rank="0"' in line)
    assert engine_load(one, 5.0) == EngineLoad(3, 2, 0.25, 1600, 5.0)
    stages = one.replace(b'pp_rank="0",tp_rank="1"', b'pp_rank="1",tp_rank="0"')
    assert engine_load(stages, 5.0) == EngineLoad(3, 2, 0.25, 1600, 5.0)


def test_ranks_out_of_step_are_as_loaded_as_the_busiest() -> None:
    """What ranks of one engine tell a moment apart is not added up."""
    lagging = b'sglang:num_queue_reqs{model_name="m",tp_rank="1"} 1.0\n'
    assert engine_load(SGLANG + lagging, 5.0) == EngineLoad(3, 2, 0.25, 1600, 5.0)


def test_parts_of_a_total_are_not_added_to_it() -> None:
    """With priorities SGLang tells the total without one, and besides what each has of it."""
    page = SGLANG.replace(b"reqs{", b'reqs{priority="",')
    parts = b'sglang:num_queue_reqs{model_name="m",priority="1"} 2.0\n'
    parts += parts.replace(b'"1"', b'"5"').replace(b"2.0", b"1.0")
    assert engine_load(page + parts, 5.0) == EngineLoad(3, 2, 0.25, 1600, 5.0)


def test_models_behind_one_triton_add_up() -> None:
    """Each model and version of a Triton server is an engine with a cache of its own."""
    page = TRITON + TRITON.replace(b'model="m"', b'model="n"') + TRITON.replace(b'sion="1"', b'sion="2"')
    assert engine_load(page, 5.0) == EngineLoad(9, 6, 0.25, 4800, 5.0)


def test_a_series_that_is_there_twice_counts_once() -> None:
    """Of the same series with the same labels the last one is true; nothing is added up."""
    again = PAGE.replace(b"} 3.0", b"} 7.0")
    assert engine_load(PAGE + again, 5.0) == EngineLoad(7, 2, 0.25, 1600, 5.0)


def test_a_page_with_endless_series_tells_nothing() -> None:
    """Thousands of engines on one page are no page of an engine."""
    series = (b'vllm:num_requests_waiting{engine="%d"} 1\n' % number for number in range(2000))
    assert engine_load(PAGE + b"".join(series), 5.0) is None


def test_the_newest_account_of_the_adapters_counts() -> None:
    """Engines leave former adapters' series on the page; the value is a timestamp, the greatest is true."""
    labels = b'max_lora="2",running_lora_adapters="%b",waiting_lora_adapters="%b"'
    series = b"vllm:lora_requests_info{" + labels + b"} %b\n"
    old, new = series % (b"old", b"", b"1.7e9"), series % (b"sql, fr", b"de", b"1.8e9")
    load = engine_load(PAGE + new + old, 5.0)
    assert load is not None
    assert load.lora == LoraLoad(frozenset({"sql", "fr"}), frozenset({"de"}), 2)


@pytest.mark.parametrize(
    ("names_engine", "running"), [(True, frozenset({"sql", "fr"})), (False, frozenset({"fr", "former"}))]
)
def test_of_several_engines_each_has_adapters(names_engine: bool, running: frozenset[str]) -> None:
    """Of two engines the newest account of each counts, or the newest two where they name no engine."""
    second = b'vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25\n'
    series = (
        b'vllm:lora_requests_info{%bmax_lora="1",running_lora_adapters="%b",waiting_lora_adapters="%b"} %b\n'
    )
    accounts = [
        (b"0", b"sql", b"", b"1.8e9"),
        (b"1", b"fr", b"de", b"1.9e9"),
        (b"0", b"old", b"", b"1.6e9"),
        (b"1", b"former", b"", b"1.85e9"),
    ]
    pages = [series % (b'engine="%b",' % one if names_engine else b"", *rest) for one, *rest in accounts]
    load = engine_load(PAGE + second + b"".join(pages), 5.0)
    assert load is not None
    assert load.lora == LoraLoad(running, frozenset({"de"}), 2)


def test_our_engine_announces_its_speed() -> None:
    """The engine's own prefill speed is a series of its own."""
    speed = b"kvroute_engine_prefill_tokens_per_second 1234.5\n"
    assert engine_load(PAGE + speed, 5.0) == EngineLoad(3, 2, 0.25, 1600, 5.0, 1234.5)


def test_a_page_without_engine_metrics_tells_nothing() -> None:
    """An empty or foreign page is no load of zero."""
    assert engine_load(b"", 0.0) is None
    assert engine_load(b"process_cpu_seconds_total 1.0\n", 0.0) is None


PAGES = (PAGE + SGLANG + SGLANG_RANKS + TRTLLM + TRITON).split(b"\n")


@given(st.binary(max_size=300) | st.lists(st.sampled_from(PAGES) | st.binary(max_size=40)).map(b"\n".join))
def test_any_page_is_survived(page: bytes) -> None:
    """Whatever the bytes, the answer is None or a load within its bounds."""
    load = engine_load(page, 0.0)
    if load is not None:
        assert load.untold != ("waiting", "running", "kv_usage")
        assert (load.waiting or 0) >= 0 <= (load.running or 0)
        assert 0.0 <= (load.kv_usage or 0.0) <= 1.0
