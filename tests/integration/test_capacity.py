"""What is planned is what the engine has: bytes of a block, sequences at once; and the log tells it."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model_server.config import TINY_MODEL, EngineConfig
from model_server.engine.build import build_engine, log_pool, served
from model_server.kv_events.events import NullEventPublisher
from model_server.shapes import decoder_shape
from model_server.shapes.deployment import Deployment
from planning.presets import PRESETS
from tests.integration.engine_support import Outputs, checking_engine, request
from tests.support.engine_invariants import check_engine
from tests.unit.model_support import save_reference

CONTEXT_TOKENS = 40
GPU_BLOCKS = 75
WINDOWS = [(None,), (None, None), (12, None), (12, 12, None)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def ceiling(windows: tuple[int | None, ...], chunk_tokens: int) -> int:
    """Return how many sequences are planned for a model with these windows and blocks of 4 tokens."""
    shape = decoder_shape(PRESETS[TINY_MODEL])
    shape = replace(shape, windows=windows, ropes=shape.ropes[:1] * len(windows))
    deployment = Deployment(shape, block_tokens=4, chunk_tokens=chunk_tokens)
    return deployment.sequences(GPU_BLOCKS, CONTEXT_TOKENS)


def preemptions(windows: tuple[int | None, ...], chunk_tokens: int, sequences: int) -> int:
    """Run so many sequences at once to the end of their context; returns how often one lost its blocks."""
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
def test_so_many_sequences_run_at_once(windows: tuple[int | None, ...]) -> None:
    """A pool of blocks runs the planned number of sequences to their full length without preempting any."""
    planned = ceiling(windows, chunk_tokens=16)
    assert 2 < planned <= 16
    assert preemptions(windows, 16, planned) == 0


def test_one_sequence_more_is_too_many() -> None:
    """Where every layer keeps everything, one sequence beyond the plan makes the engine preempt."""
    planned = ceiling((None,), chunk_tokens=512)
    assert planned == 7
    assert preemptions((None,), 512, planned) == 0
    assert preemptions((None,), 512, planned + 1) > 0


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_a_block_is_as_large_as_the_engines(
    tmp_path: Path, architecture: str, dtype: str, kv_cache_dtype: str
) -> None:
    """Of a checkpoint the same bytes are planned as the engine takes for each block."""
    windows = {"num_hidden_layers": 7, "sliding_window": 9} if architecture == "gemma3" else {}
    save_reference(tmp_path, architecture, **windows)
    config = EngineConfig(str(tmp_path), dtype, kv_cache_dtype, gpu_blocks=200, block_tokens=8)  # type: ignore[arg-type]
    engine = build_engine(config, NullEventPublisher())
    assert engine.stats().block_bytes == served(config).gpu_block_bytes


def test_the_log_tells_the_pool(caplog: pytest.LogCaptureFixture) -> None:
    """At start-up one line tells the pool as vLLM does, one as kvroute plan does."""
    config = EngineConfig(gpu_blocks=128, max_model_len=500, dtype="bfloat16")
    with caplog.at_level(logging.INFO, logger="model_server.engine.build"):
        log_pool(build_engine(config, NullEventPublisher()), config)
    assert caplog.messages[:2] == [
        "CPU KV cache size: 2,048 tokens, Maximum concurrency for 500 tokens per request: 4.10x",
        "KV pool: 128 blocks of 16 tokens, 2.10 MB, 1,024 bytes per token; "
        "4 concurrent sequences of 500 tokens",
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_log_has_the_plan_beside_it(caplog: pytest.LogCaptureFixture) -> None:
    """On CUDA a third line tells what the device's memory would hold."""
    config = EngineConfig(gpu_blocks=128, device="cuda")
    with caplog.at_level(logging.INFO, logger="model_server.engine.build"):
        log_pool(build_engine(config, NullEventPublisher()), config)
    assert caplog.messages[2].startswith("kvroute plan, 0.9 of this device's memory: ")
