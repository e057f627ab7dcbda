"""The decoder, compared with transformers, however tokens are split into steps."""

import json
from pathlib import Path

import pytest
import torch

from model_server.attention import KvLayout, SdpaAttention, Span
from model_server.model.weights import load_checkpoint
from model_server.shapes.shape import kv_groups
from tests.support.model_server.model import (
    BLOCK_TOKENS,
    CPU,
    new_pool,
    reference_logits,
    save_reference,
    span,
    step,
    text_of,
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
GEMMA_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
}
GEMMA: dict[str, object] = {
    "num_hidden_layers": 7,
    "head_dim": 10,
    "sliding_window": 9,
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
    "rope_parameters": GEMMA_ROPES,
}
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biased": ("llama", {"attention_bias": True}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear rope": ("llama", {"rope_parameters": LINEAR_ROPE}),
    "yarn rope": ("llama", {"rope_parameters": YARN_ROPE}),
    "yarn rope, all of it": (
        "llama",
        {
            "rope_parameters": YARN_ROPE
            | {"beta_fast": 4.0, "beta_slow": 0.5, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False}
        },
    ),
    "own head_dim": ("llama", {"head_dim": 10}),
    "no groups": ("llama", {"num_key_value_heads": 4}),
    "one kv head": ("llama", {"num_key_value_heads": 1}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral with a window": ("mistral", {"sliding_window": 9}),
    "mistral with a window of one block": ("mistral", {"sliding_window": BLOCK_TOKENS}),
    "mistral with a window of one token": ("mistral", {"sliding_window": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2 with windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 12}),
    "qwen3 biased": ("qwen3", {"head_dim": 8, "attention_bias": True}),
    "gemma3": ("gemma3", GEMMA),
    "gemma3 by types": (
        "gemma3",
        GEMMA | {"layer_types": ["full_attention", "sliding_attention"] * 3 + ["full_attention"]},
    ),
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cuts", [[37], [1] * 37, [16, 16, 5], [3, 1, 20, 1, 12]], ids=str)
def test_logits_equal_transformers(tmp_path: Path, variant: str, cuts: list[int]) -> None:
    """All logits equal those of transformers: whole, token by token, chunked, with blocks in any order."""
    architecture, changes = VARIANTS[variant]
    reference = save_reference(tmp_path, architecture, **changes)
    model = load_checkpoint(tmp_path, "auto", CPU).model
    text, pool = text_of(37), new_pool(model)
    table = [30, 2, 17, 9, 0, 31, 5, 12, 1, 20]
    got, start = [], 0
    for length in cuts:
        got.append(step(model, pool, [(text, span(start, length, table))]))
        start += length
    torch.testing.assert_close(torch.cat(got), reference_logits(reference, text), atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", ["llama", "mistral with a window", "gemma3"])
def test_mixed_steps_keep_sequences_apart(tmp_path: Path, variant: str) -> None:
    """Decodes of different lengths and two prefills in one step see only their own context."""
    architecture, changes = VARIANTS[variant]
    reference = save_reference(tmp_path, architecture, **changes)
    model = load_checkpoint(tmp_path, "auto", CPU).model
    pool = new_pool(model)
    lengths = [2, 3, 41, 7, 30]
    texts = [text_of(length, seed) for seed, length in enumerate(lengths)]
    tables, first = [], 0
    for length in lengths:
        blocks = -(-length // BLOCK_TOKENS)
        tables.append(list(range(first, first + blocks)))
        first += blocks
    starts = [1, 2, 40, 0, 10]
    for text, table, start in zip(texts, tables, starts, strict=True):
        if start:
            step(model, pool, [(text, span(0, start, table))])
    parts = [
        (text, span(start, len(text) - start, table))
        for text, table, start in zip(texts, tables, starts, strict=True)
    ]
    got = step(model, pool, parts)
    want = torch.cat(
        [reference_logits(reference, text)[start:] for text, start in zip(texts, starts, strict=True)]
    )
    torch.testing.assert_close(got, want, atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", ["llama", "qwen3", "gemma3"])
def test_a_shared_prefix_gives_the_same_logits_even_within_its_step(tmp_path: Path, variant: str) -> None:
    """A sequence that shares blocks computed in the same step reads finished KV."""
    architecture, changes = VARIANTS[variant]
    reference = save_reference(tmp_path, architecture, **changes)
    model = load_checkpoint(tmp_path, "auto", CPU).model
    pool = new_pool(model)
    first = text_of(12, 1)
    second = first[:8] + text_of(9, 2)
    # The sharing sequence comes first, so that reading before all KV is written would fail.
    got = step(model, pool, [(second, span(8, 9, [4, 5, 1, 2, 3])), (first, span(0, 12, [4, 5, 6]))])
    want = torch.cat([reference_logits(reference, second)[8:], reference_logits(reference, first)])
    torch.testing.assert_close(got, want, atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 5, 300])
def test_chunks_longer_than_a_tile_are_right(tmp_path: Path, window: int | None) -> None:
    """Tiled attention equals transformers for a chunk that spans several tiles."""
    reference = save_reference(tmp_path, "mistral", sliding_window=window)
    model = load_checkpoint(tmp_path, "auto", CPU).model
    pool = new_pool(model, num_blocks=200)
    text, table = text_of(700), list(range(180))
    got = [step(model, pool, [(text, span(0, 90, table))]), step(model, pool, [(text, span(90, 610, table))])]
    torch.testing.assert_close(torch.cat(got), reference_logits(reference, text), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("variant", ["gemma3", "mistral with a window", "llama"])
def test_each_group_of_layers_reads_its_own_block_table(tmp_path: Path, variant: str) -> None:
    """Separate block tables per KV group, and reuse of blocks behind the windows, change no logit."""
    architecture, changes = VARIANTS[variant]
    reference = save_reference(tmp_path, architecture, **changes)
    model = load_checkpoint(tmp_path, "auto", CPU).model
    groups = kv_groups(model.shape.windows)
    pool = SdpaAttention(model.shape, KvLayout(groups, 130, BLOCK_TOKENS), model.dtype, CPU)
    text = text_of(37)
    tables = [list(range(1 + 12 * index, 11 + 12 * index)) for index in range(len(groups))]
    got, start = [], 0
    for length in [10, 1, 9, *[1] * 5, 12]:
        for table, group in zip(tables, groups, strict=True):
            if group.window_tokens is not None:
                behind = max(0, start + 1 - group.window_tokens) // BLOCK_TOKENS
                table[:behind] = [0] * behind
        got.append(step(model, pool, [(text, Span(start, length, tables))]))
        for tensor in pool.block_tensors():
            tensor[:, 0] = 1e4  # freed blocks now have other content
        start += length
    torch.testing.assert_close(torch.cat(got), reference_logits(reference, text), atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("variant", ["llama", "mistral with a window", "qwen2", "qwen3", "gemma3"])
def test_half_precision_follows_transformers(tmp_path: Path, dtype: str, variant: str) -> None:
    """16-bit logits are as close to the exact ones as those of transformers."""
    architecture, changes = VARIANTS[variant]
    reference = save_reference(tmp_path, architecture, **changes)
    text = text_of(37)
    exact = reference_logits(reference, text)
    theirs = reference_logits(reference.to(getattr(torch, dtype)), text)
    model = load_checkpoint(tmp_path, dtype, CPU).model  # type: ignore[arg-type]
    got = step(model, new_pool(model), [(text, span(0, 37, list(range(10))))])
    assert (got - exact).square().mean().sqrt() < 1.5 * (theirs - exact).square().mean().sqrt()


@pytest.mark.parametrize("rope", [None, LLAMA3_ROPE, LINEAR_ROPE, YARN_ROPE], ids=str)
def test_old_config_keys_mean_the_same(tmp_path: Path, rope: dict[str, object] | None) -> None:
    """Top-level rope_theta, rope_scaling and torch_dtype mean the same as today's keys."""
    reference = save_reference(tmp_path, **({} if rope is None else {"rope_parameters": rope}))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    saved = config.pop("rope_parameters")
    config["rope_theta"] = saved.pop("rope_theta")
    saved["type"] = saved.pop("rope_type")
    config["rope_scaling"] = saved if rope else None
    config["torch_dtype"] = config.pop("dtype")
    del config["head_dim"]
    path.write_text(json.dumps(config))
    model = load_checkpoint(tmp_path, "auto", CPU).model
    text = text_of(30)
    got = step(model, new_pool(model), [(text, span(0, 30, list(range(8))))])
    torch.testing.assert_close(got, reference_logits(reference, text), atol=5e-4, rtol=1e-4)


def test_gemmas_old_config_keys_mean_the_same(tmp_path: Path) -> None:
    """Gemma 3's old keys for window pattern and RoPE mean the same as today's keys."""
    reference = save_reference(tmp_path, "gemma3", **GEMMA)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["layer_types"], config["rope_parameters"], config["tie_word_embeddings"]
    config |= {"sliding_window_pattern": 6, "rope_local_base_freq": 100.0, "rope_theta": 10000.0}
    config |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    path.write_text(json.dumps(config))
    model = load_checkpoint(tmp_path, "auto", CPU).model
    text = text_of(30)
    got = step(model, new_pool(model), [(text, span(0, 30, list(range(8))))])
    torch.testing.assert_close(got, reference_logits(reference, text), atol=5e-4, rtol=1e-4)


def test_yarn_multiplies_the_context(tmp_path: Path) -> None:
    """With YaRN the maximum context is the original one times the factor."""
    changes = {"rope_parameters": YARN_ROPE, "max_position_embeddings": 16}
    save_reference(tmp_path, "qwen2", **changes)
    assert load_checkpoint(tmp_path, "auto", CPU).model.shape.max_positions == 64
