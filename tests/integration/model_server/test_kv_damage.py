"""Damage to the KV cache shows in the next token: the engine reads nothing else."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model_server.config import EngineConfig
from model_server.engine.build import build_engine
from model_server.engine.core import EngineCore
from model_server.kv_cache.request import Request
from model_server.requests import EngineCoreOutput, EngineCoreRequest, SamplingParams, TokenLogprobs
from tests.support.model_server.model import save_reference, text_of

PROMPT_TOKENS = 41
ANSWER_TOKENS = 8
BLOCK_TOKENS = 4
# The last full block of the prompt, inside every window.
BLOCK_INDEX = PROMPT_TOKENS // BLOCK_TOKENS - 1
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "windows": ("mistral", {"sliding_window": 16}),
    "groups": ("gemma3", {"num_hidden_layers": 7, "sliding_window": 16, "tie_word_embeddings": True}),
}
Damage = Callable[[EngineCore, Request], None]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def corrupt(engine: EngineCore, request: Request, kind: int) -> None:
    """Negate the keys (0) or values (1) of one token in one layer, all heads."""
    content = engine.executor.runner.attention.block_tensors()[0]
    plane = kind * (len(content) // 2)
    row = content[plane, request.block_ids[0][BLOCK_INDEX], :, 1]
    assert row.float().abs().max() > 0
    row.copy_((-row.float()).to(row.dtype))


def drop(engine: EngineCore, request: Request, group: int) -> None:
    """Replace one of the request's blocks by a block that was never written."""
    used = {block for table in request.block_ids for block in table}
    unused = next(block for block in range(engine.stats().total_blocks) if block not in used)
    request.block_tables[group].block_ids[BLOCK_INDEX] = unused
    # Other tables than before, as after a preemption, are sent to the model anew.
    request.block_tables = [*request.block_tables]


DAMAGES: dict[str, Damage] = {
    "a wrong key": lambda engine, request: corrupt(engine, request, 0),
    "a wrong value": lambda engine, request: corrupt(engine, request, 1),
    "a missing block": lambda engine, request: drop(engine, request, 0),
    "a missing block of the last group": lambda engine, request: drop(engine, request, -1),
}


def new_engine(directory: Path, name: str, kv_cache_dtype: str) -> EngineCore:
    """Return a small engine."""
    architecture, changes = MODELS[name]
    if not (directory / "config.json").exists():
        save_reference(directory, architecture, **changes)
    config = EngineConfig(
        model=str(directory),
        kv_cache_dtype=kv_cache_dtype,  # type: ignore[arg-type]
        block_tokens=BLOCK_TOKENS,
        gpu_blocks=160,
        max_num_batched_tokens=64,
        max_model_len=80,
    )
    return build_engine(config)


def answer(
    engine: EngineCore, request_id: str, damage: Damage | None = None, after: int = 3
) -> tuple[list[TokenLogprobs], int]:
    """Generate tokens, applying the damage after some of them.

    Returns:
        The log probabilities of each token, and the number of cached prompt tokens.
    """
    outputs: list[EngineCoreOutput] = []
    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True, logprobs=5)
    engine.add_request(EngineCoreRequest(request_id, tuple(text_of(PROMPT_TOKENS)), sampling), outputs.append)
    while engine.step():
        if damage is not None and len(outputs) == after:
            damage(engine, engine.scheduler.running[0])
    return [entry for output in outputs for entry in output.logprobs], outputs[-1].cached_tokens


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", MODELS)
def test_damage_shows_in_the_next_token(tmp_path: Path, name: str, damage: str, kv_cache_dtype: str) -> None:
    """One wrong or missing KV entry of a running request changes its next token's log probabilities."""
    want, _ = answer(new_engine(tmp_path, name, kv_cache_dtype), "undamaged")
    again, _ = answer(new_engine(tmp_path, name, kv_cache_dtype), "undamaged")
    assert again == want, "not even repeatable without damage"
    got, _ = answer(new_engine(tmp_path, name, kv_cache_dtype), "damaged", DAMAGES[damage])
    assert got[:3] == want[:3]
    assert got[3] != want[3]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("name", MODELS)
def test_damage_in_a_cached_prefix_shows_in_later_hits(
    tmp_path: Path, name: str, kv_cache_dtype: str
) -> None:
    """A wrong KV entry in a cached prefix changes the first token of a later request that hits it."""
    firsts = []
    for damage in (None, None, DAMAGES["a wrong value"]):
        engine = new_engine(tmp_path, name, kv_cache_dtype)
        # Late in the first answer, whose own change is not checked here.
        answer(engine, "first", damage, after=ANSWER_TOKENS - 1)
        reused, cached_tokens = answer(engine, "second")
        assert cached_tokens == PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
        firsts.append(reused[0])
    assert firsts[0] == firsts[1]
    assert firsts[2] != firsts[0]
