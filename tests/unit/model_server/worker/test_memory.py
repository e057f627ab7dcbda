"""Size of the KV pool: what is left of the memory, in whole blocks, and clear errors where nothing is."""

import json
from itertools import accumulate, product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_server.config import EngineConfig
from model_server.engine.build import build_engine
from model_server.engine.core import EngineCore
from model_server.errors import ConfigError
from model_server.requests import EngineCoreRequest, SamplingParams
from model_server.worker import memory
from model_server.worker.memory import SAMPLING_BYTES, free_host_bytes, peak_cuda_bytes, pool_blocks
from model_server.worker.sampler import Sampler, SamplingRow
from tests.support.model_server.engine import Outputs

CUDA = torch.device("cuda:0")
SIZES = st.integers(1, 1 << 40)
VOCAB_SIZE = 1 << 14
PENALTIES = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.1}
SAMPLED = [
    SamplingParams(max_tokens=1, top_p=0.9),
    SamplingParams(max_tokens=1, top_p=0.9, logprobs=5, **PENALTIES),
    SamplingParams(max_tokens=1, top_k=1000, logprobs=5, **PENALTIES),
]


def tokens_of(engine: EngineCore, name: str, prompt: tuple[int, ...]) -> list[int]:
    """Return the tokens that an engine generates."""
    outputs = Outputs()
    engine.add_request(
        EngineCoreRequest(name, prompt, SamplingParams(max_tokens=4, temperature=0.0)), outputs
    )
    while engine.step():
        pass
    return outputs.tokens[name]


@given(SIZES, SIZES, SIZES)
def test_blocks_take_what_is_left(usable: int, taken: int, block: int) -> None:
    """As many blocks as fit are used, and not one is an error."""
    if usable - taken < block:
        with pytest.raises(ConfigError, match="gpu_memory_utilization"):
            pool_blocks(usable_bytes=usable, taken_bytes=taken, block_bytes=block)
        return
    blocks = pool_blocks(usable_bytes=usable, taken_bytes=taken, block_bytes=block)
    assert taken + blocks * block <= usable < taken + (blocks + 1) * block


def test_a_control_group_limits_the_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container, the limit of its control group counts, not the machine's memory."""
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemFree: 3 kB\nMemAvailable: 8 kB\n")
    assert free_host_bytes() == 8192
    (tmp_path / "memory.current").write_text("1500\n")
    (tmp_path / "memory.stat").write_text("file 700\ninactive_file 500\n")
    for limit, want in (("max", 8192), ("5000", 4000), ("500", 0), ("90000", 8192)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert free_host_bytes() == want


def test_a_share_of_the_free_memory_makes_the_pool() -> None:
    """On a CPU, twice the share gives about twice the blocks, and the longest request follows."""
    engines = [build_engine(EngineConfig(gpu_memory_utilization=share)) for share in (0.001, 0.002)]
    first, second = (engine.stats().total_blocks for engine in engines)
    assert 1.5 < second / first < 3.0
    for engine in engines:
        engine.close()


def test_defaults_follow_the_device() -> None:
    """A GPU's larger batches and its share of memory are defaults, which flags override."""
    cpu, cuda = EngineConfig(), EngineConfig(device="cuda:1")
    assert (cpu.max_num_seqs, cpu.max_num_batched_tokens, cpu.gpu_blocks) == (64, 2048, 1024)
    assert (cuda.max_num_seqs, cuda.max_num_batched_tokens, cuda.gpu_blocks) == (256, 8192, None)
    assert (cpu.gpu_memory_utilization, cuda.gpu_memory_utilization) == (None, 0.9)
    given_blocks = EngineConfig(device="cuda", gpu_blocks=7, max_num_seqs=3)
    assert (given_blocks.gpu_blocks, given_blocks.max_num_seqs) == (7, 3)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.1, float("nan")])
def test_shares_out_of_range_are_rejected(share: float) -> None:
    """A share must be above 0 and at most 1."""
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        EngineConfig(gpu_memory_utilization=share)


def test_a_pool_that_does_not_fit_is_a_clear_error() -> None:
    """The error of a pool that is too large names its blocks."""
    with pytest.raises(ConfigError, match=r"cannot allocate 10{15} blocks"):
        build_engine(EngineConfig(gpu_blocks=10**15))


def test_the_peak_of_a_step_leaves_room_for_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken is what torch allocated at the peak and what others hold, not what torch keeps for reuse."""
    calls: list[str] = []
    for name, result in {
        "reset_peak_memory_stats": None,
        "synchronize": None,
        "mem_get_info": (30, 100),
        "memory_reserved": 50,
        "max_memory_allocated": 40,
    }.items():
        monkeypatch.setattr(
            torch.cuda, name, lambda _, name=name, result=result: calls.append(name) or result
        )
    assert peak_cuda_bytes(CUDA, lambda: calls.append("step")) == (100, 20 + 40)
    assert calls[:3] == ["reset_peak_memory_stats", "step", "synchronize"]


def test_a_step_that_does_not_fit_names_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lack of memory in the largest step is an error of the settings that make it large."""

    def step() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    with pytest.raises(
        ConfigError, match=r"largest step .* cuda:0 .*lower max_num_batched_tokens or max_num_seqs"
    ):
        peak_cuda_bytes(CUDA, step)


@pytest.mark.parametrize(
    ("tokens", "sequences", "settings"),
    [
        *product((3, 40), (1, 3), ({}, {"kv_cache_dtype": "fp8"}, {"attention_backend": "torch"})),
        (9000, 3, {}),  # more than the model's positions
    ],
)
def test_the_largest_step_runs_and_leaves_no_trace(
    tokens: int, sequences: int, settings: dict[str, str]
) -> None:
    """A warm-up runs at all limits of a step, and changes no output."""
    limits = {
        "max_num_batched_tokens": tokens,
        "max_num_seqs": sequences,
        "gpu_blocks": 16,
        "torch_threads": 1,
    }
    engine = build_engine(EngineConfig(**limits, **settings))  # type: ignore[arg-type]
    before = tokens_of(engine, "before", (5, 6, 7))
    engine.executor.runner.warm_up()
    assert tokens_of(engine, "after", (5, 6, 7)) == before
    engine.close()


@pytest.mark.parametrize("params", SAMPLED, ids=("top_p", "penalties", "top_k"))
def test_the_sampler_stays_within_what_is_counted(
    params: SamplingParams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling the largest batch takes no more bytes per logit than the size of the pool allows for."""
    # A GPU draws for all rows at once, and so does this test.
    monkeypatch.setattr("model_server.worker.sampler.CPU_BATCH_LOGITS", 1 << 40)
    rows = [SamplingRow(params, index, 1, token_ids=(1, 2), arrival_index=index) for index in range(64)]
    sampler, logits = Sampler(len(rows), VOCAB_SIZE, torch.device("cpu")), torch.randn(64, VOCAB_SIZE)
    with torch.profiler.profile(profile_memory=True) as profile:
        sampler.launch(logits, rows).result()
    profile.export_chrome_trace(str(tmp_path / "trace"))
    events = json.loads((tmp_path / "trace").read_text())["traceEvents"]
    changes = sorted((one["ts"], one["args"]["Bytes"]) for one in events if one["name"] == "[memory]")
    assert 0 < max(accumulate(size for _, size in changes)) < SAMPLING_BYTES * logits.numel()


def test_sleep_tells_what_it_gives_back(caplog: pytest.LogCaptureFixture) -> None:
    """The log has the bytes of both tiers, and that the weights stay."""
    engine = build_engine(EngineConfig(gpu_blocks=64, cpu_blocks=8))
    size = (64 + 8) * engine.stats().block_bytes
    with caplog.at_level("INFO"):
        assert engine.sleep()
    assert engine.freed_bytes == size
    assert f"asleep: {size / 1e6:,.2f} MB given back; the weights stay" in caplog.text
    assert engine.wake_up()
    assert engine.stats().total_blocks == 64
    engine.close()
