"""Load from a metrics page."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, Info, generate_latest

from router.pods.engine_load import EngineLoad, EnginePage, LoraLoad


def engine_load(page: bytes, now_s: float) -> EngineLoad | None:
    """Return the load of a page."""
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
    """Waiting, running, usage and size are read among similar names, unusual labels and timestamps."""
    assert engine_load(PAGE, 5.0) == EngineLoad(3, 2, 0.25, 1600, 5.0)


@pytest.mark.parametrize("engine", [b"vllm", b"sglang"])
def test_tokens_are_the_sum_of_both_counters(engine: bytes) -> None:
    """Prompt and output tokens of all engines add up; without either counter they are unknown."""
    counters = b'%b:prompt_tokens_total 2e10\n%b:generation_tokens_total{e="0"} 3\n' % (engine, engine)
    page = b"%b:kv_cache_usage_perc 0.5\nsglang:token_usage 0.5\n" % engine
    page += counters + b'%b:generation_tokens_total{e="1"} 4\n' % engine
    load = engine_load(page, 5.0)
    assert load is not None
    assert load.tokens == 2e10 + 7
    load = engine_load(PAGE, 5.0)
    assert load is not None
    assert load.tokens is None


def test_data_parallel_ranks_add_up() -> None:
    """Requests of several engines are summed, usage is the mean; each reports the capacity of all."""
    page = PAGE + PAGE.replace(b'engine="0"', b'engine="1"').replace(b"0.25", b"0.75")
    assert engine_load(page, 5.0) == EngineLoad(6, 4, 0.5, 1600, 5.0)


def test_a_page_of_prometheus_client_is_read() -> None:
    """A page written by prometheus_client, without labels, is read."""
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
def test_an_invalid_number_affects_only_its_field(value: bytes, told: bytes, load: EngineLoad) -> None:
    """An invalid gauge is missing, and the page's other fields are used."""
    found = engine_load(PAGE.replace(told, b" " + value), 5.0)
    assert found == load
    assert len(load.missing_figures) == 1


def test_a_sum_without_one_engine_is_missing() -> None:
    """If one of two engines has an invalid queue depth, the pod's queue depth is missing."""
    page = PAGE + PAGE.replace(b'engine="0"', b'engine="1"').replace(b" 3.0", b" NaN")
    load = engine_load(page, 5.0)
    assert load == EngineLoad(None, 4, 0.25, 1600, 5.0)
    assert (load.missing_figures, load.requests) == (("waiting",), None)


@pytest.mark.parametrize(
    "page",
    [
        PAGE.replace(b" 3.0", b" NaN").replace(b" 2.0", b" NaN").replace(b" 0.25", b" NaN"),
        b'vllm:kv_cache_usage_perc{engine="0"} NaN\n',
    ],
)
def test_a_page_of_invalid_numbers_has_no_load(page: bytes) -> None:
    """Without queue depth, running requests and usage there is no load."""
    assert engine_load(page, 5.0) is None


def test_invalid_adapters_and_rates_are_missing() -> None:
    """Invalid LoRA series and prefill rates do not affect the load."""
    lora = b'vllm:lora_requests_info{max_lora="2",running_lora_adapters="sql",waiting_lora_adapters=""} NaN\n'
    speed = b"kvroute_engine_prefill_tokens_per_second NaN\n"
    assert engine_load(PAGE + lora + speed, 5.0) == EngineLoad(3, 2, 0.25, 1600, 5.0)


SGLANG = b"""sglang:num_queue_reqs{model_name="m"} 3.0
sglang:num_running_reqs{model_name="m"} 2.0
sglang:token_usage{model_name="m"} 0.25
sglang:cache_config_info{page_size="16",num_pages="100"} 1.0
"""
# Page of two data-parallel ranks, each with two tensor-parallel ranks that have series of their own.
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
def test_other_engines_are_read_by_their_names(page: bytes) -> None:
    """SGLang, TensorRT-LLM and Triton give the same load under their own names."""
    assert engine_load(b"up 1\n" + page, 5.0) == EngineLoad(3, 2, 0.25, 1600, 5.0)


def test_tensor_parallel_ranks_count_once() -> None:
    """SGLang's tensor and pipeline ranks are duplicates; its data-parallel ranks add up."""
    assert engine_load(SGLANG_RANKS, 5.0) == EngineLoad(4, 7, 0.5, 3200, 5.0)
    one = b"".join(line for line in SGLANG_RANKS.splitlines(keepends=True) if b'dp_rank="0"' in line)
    assert engine_load(one, 5.0) == EngineLoad(3, 2, 0.25, 1600, 5.0)
    stages = one.replace(b'pp_rank="0",tp_rank="1"', b'pp_rank="1",tp_rank="0"')
    assert engine_load(stages, 5.0) == EngineLoad(3, 2, 0.25, 1600, 5.0)


def test_of_duplicate_ranks_the_largest_value_is_used() -> None:
    """Values of one engine's ranks at slightly different times are not added."""
    lagging = b'sglang:num_queue_reqs{model_name="m",tp_rank="1"} 1.0\n'
    assert engine_load(SGLANG + lagging, 5.0) == EngineLoad(3, 2, 0.25, 1600, 5.0)


def test_parts_of_a_total_are_not_added() -> None:
    """With priorities, SGLang's total is the series without a priority."""
    page = SGLANG.replace(b"reqs{", b'reqs{priority="",')
    parts = b'sglang:num_queue_reqs{model_name="m",priority="1"} 2.0\n'
    parts += parts.replace(b'"1"', b'"5"').replace(b"2.0", b"1.0")
    assert engine_load(page + parts, 5.0) == EngineLoad(3, 2, 0.25, 1600, 5.0)


def test_models_behind_one_triton_add_up() -> None:
    """Each model and version of a Triton server is an engine with its own cache."""
    page = TRITON + TRITON.replace(b'model="m"', b'model="n"') + TRITON.replace(b'sion="1"', b'sion="2"')
    assert engine_load(page, 5.0) == EngineLoad(9, 6, 0.25, 4800, 5.0)


def test_a_duplicate_series_counts_once() -> None:
    """Of equal series the last one is used."""
    again = PAGE.replace(b"} 3.0", b"} 7.0")
    assert engine_load(PAGE + again, 5.0) == EngineLoad(7, 2, 0.25, 1600, 5.0)


def test_a_page_with_too_many_series_has_no_load() -> None:
    """A page with thousands of series of one metric is rejected."""
    series = (b'vllm:num_requests_waiting{engine="%d"} 1\n' % number for number in range(2000))
    assert engine_load(PAGE + b"".join(series), 5.0) is None


def test_the_newest_lora_series_is_used() -> None:
    """The series with the largest timestamp is used, because series of former adapters remain."""
    labels = b'max_lora="2",running_lora_adapters="%b",waiting_lora_adapters="%b"'
    series = b"vllm:lora_requests_info{" + labels + b"} %b\n"
    old, new = series % (b"old", b"", b"1.7e9"), series % (b"sql, fr", b"de", b"1.8e9")
    load = engine_load(PAGE + new + old, 5.0)
    assert load is not None
    assert load.lora == LoraLoad(frozenset({"sql", "fr"}), frozenset({"de"}), 2)


@pytest.mark.parametrize(
    ("names_engine", "running"), [(True, frozenset({"sql", "fr"})), (False, frozenset({"fr", "former"}))]
)
def test_each_of_several_engines_has_adapters(names_engine: bool, running: frozenset[str]) -> None:
    """The newest series of each engine is used, or the newest two if they name no engine."""
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


def test_the_model_server_reports_its_prefill_rate() -> None:
    """The prefill rate of kvroute's model server is read from its own series."""
    speed = b"kvroute_engine_prefill_tokens_per_second 1234.5\n"
    assert engine_load(PAGE + speed, 5.0) == EngineLoad(3, 2, 0.25, 1600, 5.0, 1234.5)


@pytest.mark.parametrize(
    ("page", "tokens"),
    [
        (b'vllm:cache_config_info{block_size="128",enable_prefix_caching="False"} 1.0\n', 128),
        (b'sglang:cache_config_info{page_size="64"} 1.0\n', 64),
        (b"sglang:page_size 32\n", 32),
        (b'vllm:cache_config_info{block_size="None"} 1.0\n', None),
        (b"up 1\n", None),
    ],
)
def test_a_page_tells_the_size_of_blocks(page: bytes, tokens: int | None) -> None:
    """The tokens of a block are read under each engine's name, and are unknown where none is a number."""
    assert EnginePage(page).block_tokens == tokens


def test_a_page_without_engine_metrics_has_no_load() -> None:
    """An empty or unrelated page gives no load, not a load of zero."""
    assert engine_load(b"", 0.0) is None
    assert engine_load(b"process_cpu_seconds_total 1.0\n", 0.0) is None


PAGES = (PAGE + SGLANG + SGLANG_RANKS + TRTLLM + TRITON).split(b"\n")


@given(st.binary(max_size=300) | st.lists(st.sampled_from(PAGES) | st.binary(max_size=40)).map(b"\n".join))
def test_any_page_gives_a_valid_load_or_none(page: bytes) -> None:
    """Any bytes give None or a load within its bounds."""
    load = engine_load(page, 0.0)
    if load is not None:
        assert load.missing_figures != ("waiting", "running", "kv_usage")
        assert (load.waiting or 0) >= 0 <= (load.running or 0)
        assert 0.0 <= (load.kv_usage or 0.0) <= 1.0
