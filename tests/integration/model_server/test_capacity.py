"""Planned capacity equals the engine's: bytes per block, concurrent sequences, and the start-up log."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model_server.config import TINY_MODEL, EngineConfig
from model_server.engine.build import build_engine, deployment_of, log_pool
from model_server.shapes.architectures import decoder_shape
from model_server.shapes.deployment import Deployment
from planning.presets import PRESETS
from tests.support.model_server.engine import Outputs, checking_engine, request
from tests.support.model_server.invariants import check_engine
from tests.support.model_server.model import save_reference

CONTEXT_TOKENS = 40
GPU_BLOCKS = 75
WINDOWS = [(None,), (None, None), (12, None), (12, 12, None)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def ceiling(windows: tuple[int | None, ...], chunk_tokens: int) -> int:
    """Return the planned number of sequences for layers with these windows and blocks of 4 tokens."""
    shape = decoder_shape(PRESETS[TINY_MODEL])
    shape = replace(shape, windows=windows, ropes=shape.ropes[:1] * len(windows))
    deployment = Deployment(shape, block_tokens=4, chunk_tokens=chunk_tokens)
    return deployment.sequences(GPU_BLOCKS, CONTEXT_TOKENS)


def preemptions(windows: tuple[int | None, ...], chunk_tokens: int, sequences: int) -> int:
    """Run sequences together to the end of their context; return the number of preemptions."""
    engine, _, _ = checking_engine(
        windows,
        gpu_blocks=GPU_BLOCKS,
        max_num_seqs=sequences,
        max_num_batched_tokens=chunk_tokens,
        max_model_len=CONTEXT_TOKENS,
        enable_prefix_caching=False,
    )
    outputs = Outputs()
    for number in range(sequences):
        prompt = [1 + (number + place) % 40 for place in range(CONTEXT_TOKENS // 2)]
        engine.add_request(request(f"{number}", prompt, max_tokens=CONTEXT_TOKENS), outputs)
    while engine.step():
        check_engine(engine)
    assert len(outputs.last) == sequences
    return engine.stats().preemptions


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_planned_number_of_sequences_runs_without_preemption(windows: tuple[int | None, ...]) -> None:
    """The planned number of sequences runs to full length without a preemption."""
    planned = ceiling(windows, chunk_tokens=16)
    assert 2 < planned <= 16
    assert preemptions(windows, 16, planned) == 0


def test_one_more_sequence_is_preempted() -> None:
    """With full attention only, one sequence more than planned causes a preemption."""
    planned = ceiling((None,), chunk_tokens=512)
    assert planned == 7
    assert preemptions((None,), 512, planned) == 0
    assert preemptions((None,), 512, planned + 1) > 0


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_planned_block_bytes_equal_the_engines(
    tmp_path: Path, architecture: str, dtype: str, kv_cache_dtype: str
) -> None:
    """The planned bytes per block of a checkpoint equal the engine's."""
    windows = {"num_hidden_layers": 7, "sliding_window": 9} if architecture == "gemma3" else {}
    save_reference(tmp_path, architecture, **windows)
    config = EngineConfig(str(tmp_path), dtype, kv_cache_dtype, gpu_blocks=200, block_tokens=8)  # type: ignore[arg-type]
    engine = build_engine(config)
    assert engine.stats().block_bytes == deployment_of(config).gpu_block_bytes


def test_start_up_log_has_the_pool_size(caplog: pytest.LogCaptureFixture) -> None:
    """The start-up log has one line in vLLM's form and one in kvroute plan's form."""
    config = EngineConfig(gpu_blocks=128, max_model_len=500, dtype="bfloat16")
    with caplog.at_level(logging.INFO, logger="model_server.engine.build"):
        log_pool(build_engine(config), config)
    assert caplog.messages[:2] == [
        "CPU KV cache size: 2,048 tokens, Maximum concurrency for 500 tokens per request: 4.10x",
        "KV pool: 128 blocks of 16 tokens, 2.10 MB, 1,024 bytes per token; "
        "4 concurrent sequences of 500 tokens",
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_start_up_log_on_cuda_has_the_plan(caplog: pytest.LogCaptureFixture) -> None:
    """On CUDA a third line logs the plan for the device's memory."""
    config = EngineConfig(gpu_blocks=128, device="cuda")
    with caplog.at_level(logging.INFO, logger="model_server.engine.build"):
        log_pool(build_engine(config), config)
    assert caplog.messages[2].startswith("kvroute plan, 0.9 of this device's memory: ")
