"""Gain and cost of the host tier: a 4k-token prefix restored or recomputed; copies compared with memcpy.

The model is the 91-million-parameter one of `against_transformers`, in bf16 with random weights.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.report import SHAPE, Figure
from model_server.config import EngineConfig
from model_server.engine.build import build_engine
from model_server.engine.core import EngineCore
from model_server.requests import EngineCoreOutput, EngineCoreRequest, SamplingParams
from model_server.worker.block_copies import CpuCopies

_PREFIX_TOKENS = 4096
_BLOCK_TOKENS = 16
_QUESTION_TOKENS = 16
_COPIED_BLOCKS = 256


def measure(rounds: int, clock: Callable[[], float]) -> Iterator[Figure]:
    """Measure the ratio of restored to recomputed time to first token, and of block copies to memcpy."""
    torch.manual_seed(0)
    shape = {**SHAPE, "max_position_embeddings": 2 * _PREFIX_TOKENS}
    with tempfile.TemporaryDirectory(prefix="kvroute-bench-") as directory:
        LlamaForCausalLM(LlamaConfig(**shape)).to(torch.bfloat16).save_pretrained(directory)
        blocks = (_PREFIX_TOKENS + 2 * _QUESTION_TOKENS) // _BLOCK_TOKENS
        config = EngineConfig(
            model=str(Path(directory)),
            block_tokens=_BLOCK_TOKENS,
            gpu_blocks=blocks + 1,
            cpu_blocks=3 * blocks,
            max_num_batched_tokens=_PREFIX_TOKENS,
        )
        engine = build_engine(config)
        yield _restored_by_recomputed(engine, rounds, clock)
        tensors = [tensor.clone() for tensor in engine.executor.runner.attention.block_tensors()]  # type: ignore[attr-defined]
    yield _copy_by_memcpy(tensors, rounds, clock)


def _restored_by_recomputed(engine: EngineCore, rounds: int, clock: Callable[[], float]) -> Figure:
    draw = random.Random(0)
    ratios = []
    first = draw.choices(range(3, 1000), k=_PREFIX_TOKENS)
    _first_token_s(engine, "first", first, clock)
    for number in range(rounds):
        second = draw.choices(range(3, 1000), k=_PREFIX_TOKENS)
        recomputed_s = _first_token_s(engine, f"{number}.cold", second, clock)
        restored_s = _first_token_s(engine, f"{number}.host", first, clock, cached=_PREFIX_TOKENS)
        ratios.append(restored_s / recomputed_s)
    setting = {"prefix_tokens": _PREFIX_TOKENS, "question_tokens": _QUESTION_TOKENS, "dtype": "bfloat16"}
    return Figure("host_restore_ttft_ratio", "x", round(statistics.median(ratios), 4), setting)


def _first_token_s(
    engine: EngineCore, name: str, prefix: list[int], clock: Callable[[], float], *, cached: int = 0
) -> float:
    prompt = (*prefix, *random.Random(name).choices(range(3, 1000), k=_QUESTION_TOKENS))
    outputs: list[EngineCoreOutput] = []
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    started_s = clock()
    engine.add_request(EngineCoreRequest(name, prompt, sampling), outputs.append)
    while not outputs:
        engine.step()
    taken_s = clock() - started_s
    while engine.step():
        pass
    assert outputs[-1].cached_tokens == cached, "not the way that was to be measured"
    return taken_s


def _copy_by_memcpy(tensors: list[torch.Tensor], rounds: int, clock: Callable[[], float]) -> Figure:
    """Return the speed of copying scattered blocks relative to one plain copy per plane."""
    blocks = tensors[0].shape[1]
    copies = CpuCopies(tensors, blocks)
    rows = [plane.view(torch.uint8).flatten(1).numpy() for tensor in tensors for plane in tensor]
    plain = [np.zeros_like(array) for array in rows]
    draw = random.Random(0)
    ratios = []
    for number in range(3 * rounds + 1):
        sources, slots = (draw.sample(range(blocks), _COPIED_BLOCKS) for _ in range(2))
        started_s = clock()
        copies.store(sources, slots)
        stored_s = clock()
        for array, target in zip(rows, plain, strict=True):
            target[:_COPIED_BLOCKS] = array[-_COPIED_BLOCKS:]
        done_s = clock()
        if number:
            ratios.append((done_s - stored_s) / (stored_s - started_s))
    setting = {"blocks": _COPIED_BLOCKS, "block_bytes": copies.block_bytes, "scattered": True}
    return Figure("host_copy_ratio_to_memcpy", "x", round(statistics.median(ratios), 3), setting)
