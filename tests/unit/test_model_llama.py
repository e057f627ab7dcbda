"""The Llama decoder computes what transformers' does, however its tokens are cut into steps."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from model_server.attention import SdpaAttention, Span
from model_server.models import DecoderModel
from model_server.weights import load_checkpoint

BLOCK_TOKENS = 4
CPU = torch.device("cpu")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS: dict[str, dict[str, object]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "llama3": {"rope_parameters": LLAMA3_ROPE},
    "own head_dim": {"head_dim": 10},
    "no groups": {"num_key_value_heads": 4},
    "one kv head": {"num_key_value_heads": 1},
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def save_reference(directory: Path, **changes: object) -> LlamaForCausalLM:
    """Save a small random model as a checkpoint and return it."""
    settings: dict[str, object] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**settings | changes)).eval()  # type: ignore[arg-type]
    for parameter in model.parameters():  # norms are saved as ones otherwise, which would hide a wrong one
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(directory)
    return model


def new_pool(model: DecoderModel) -> SdpaAttention:
    """Make a KV pool of 32 blocks for a model."""
    shape = model.shape
    return SdpaAttention(
        num_layers=shape.layers,
        num_blocks=32,
        block_tokens=BLOCK_TOKENS,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=model.dtype,
        device=CPU,
    )


@torch.inference_mode()
def step(model: DecoderModel, pool: SdpaAttention, parts: Sequence[tuple[list[int], Span]]) -> torch.Tensor:
    """Run one step over (text, span) pairs; returns the logits of every token."""
    flat = [token for text, span in parts for token in text[span.start : span.start + span.length]]
    meta = pool.prepare([span for _, span in parts])
    return model.forward(torch.tensor(flat), torch.arange(len(flat)), pool, meta)


def reference_logits(reference: LlamaForCausalLM, text: list[int]) -> torch.Tensor:
    """Return transformers' logits of every token of a text."""
    with torch.inference_mode():
        return reference(torch.tensor([text])).logits[0].float()


def text_of(length: int, seed: int = 0) -> list[int]:
    """Return random tokens."""
    return torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cuts", [[37], [1] * 37, [16, 16, 5], [3, 1, 20, 1, 12]], ids=str)
def test_logits_equal_transformers(tmp_path: Path, variant: str, cuts: list[int]) -> None:
    """Whole, token by token or in chunks, with blocks in any order, every token's logits are the same."""
    reference = save_reference(tmp_path, **VARIANTS[variant])
    model = load_checkpoint(tmp_path, "auto", CPU).model
    text, pool = text_of(37), new_pool(model)
    table = [30, 2, 17, 9, 0, 31, 5, 12, 1, 20]
    got, start = [], 0
    for length in cuts:
        got.append(step(model, pool, [(text, Span(start, length, table))]))
        start += length
    torch.testing.assert_close(torch.cat(got), reference_logits(reference, text), atol=2e-4, rtol=1e-4)


def test_mixed_steps_keep_sequences_apart(tmp_path: Path) -> None:
    """Decodes of very different lengths and two prefills in one step each see their own context only."""
    reference = save_reference(tmp_path)
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
            step(model, pool, [(text, Span(0, start, table))])
    parts = [
        (text, Span(start, len(text) - start, table))
        for text, table, start in zip(texts, tables, starts, strict=True)
    ]
    got = step(model, pool, parts)
    want = torch.cat(
        [reference_logits(reference, text)[start:] for text, start in zip(texts, starts, strict=True)]
    )
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)


def test_a_shared_prefix_gives_the_same_logits_even_within_its_step(tmp_path: Path) -> None:
    """A sequence that starts on another's blocks, computed in the same step, reads finished KV."""
    reference = save_reference(tmp_path)
    model = load_checkpoint(tmp_path, "auto", CPU).model
    pool = new_pool(model)
    first = text_of(12, 1)
    second = first[:8] + text_of(9, 2)
    # The sharer comes first in the batch, so that attending before everything is written would show.
    got = step(model, pool, [(second, Span(8, 9, [4, 5, 1, 2, 3])), (first, Span(0, 12, [4, 5, 6]))])
    want = torch.cat([reference_logits(reference, second)[8:], reference_logits(reference, first)])
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)


def test_chunks_longer_than_a_tile_are_right(tmp_path: Path) -> None:
    """Attention computed tile by tile equals transformers' where a chunk spans several tiles."""
    reference = save_reference(tmp_path, max_position_embeddings=1024)
    model = load_checkpoint(tmp_path, "auto", CPU).model
    pool = SdpaAttention(
        num_layers=3, num_blocks=200, block_tokens=4, kv_heads=2, head_dim=8, dtype=model.dtype, device=CPU
    )
    text, table = text_of(700), list(range(180))
    got = [step(model, pool, [(text, Span(0, 90, table))]), step(model, pool, [(text, Span(90, 610, table))])]
    torch.testing.assert_close(torch.cat(got), reference_logits(reference, text), atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_follows_transformers(tmp_path: Path, dtype: str) -> None:
    """In 16-bit formats the logits agree to that format's precision, and the best token mostly too."""
    reference = save_reference(tmp_path).to(getattr(torch, dtype))
    model = load_checkpoint(tmp_path, dtype, CPU).model  # type: ignore[arg-type]
    text = text_of(37)
    got = step(model, new_pool(model), [(text, Span(0, 37, list(range(10))))])
    want = reference_logits(reference, text)
    assert (got - want).abs().max() < 0.05 * want.abs().max()
    assert (got.argmax(-1) == want.argmax(-1)).float().mean() > 0.8


@pytest.mark.parametrize("scaled", [False, True])
def test_old_config_keys_mean_the_same(tmp_path: Path, scaled: bool) -> None:
    """rope_theta, rope_scaling and torch_dtype at the top level are read as well as today's keys."""
    reference = save_reference(tmp_path, **(VARIANTS["llama3"] if scaled else {}))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope if scaled else None
    config["torch_dtype"] = config.pop("dtype")
    del config["head_dim"]
    path.write_text(json.dumps(config))
    model = load_checkpoint(tmp_path, "auto", CPU).model
    text = text_of(30)
    got = step(model, new_pool(model), [(text, Span(0, 30, list(range(8))))])
    torch.testing.assert_close(got, reference_logits(reference, text), atol=2e-4, rtol=1e-4)
