"""Test kit of models: small random checkpoints saved by transformers, and steps over a KV pool."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from model_server.attention import Attention, KvLayout, SdpaAttention, Span
from model_server.model.decoder import Decoder
from model_server.model.lora import LoraBatch
from model_server.shapes.shape import single_group

BLOCK_TOKENS = 4
VOCAB_SIZE = 97
CPU = torch.device("cpu")

_CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
}
_SETTINGS: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def save_reference(directory: Path, architecture: str = "llama", **changes: object) -> PreTrainedModel:
    """Save a small random model as a checkpoint and return it."""
    config, model_class = _CLASSES[architecture]
    torch.manual_seed(7)
    model = model_class(config(**_SETTINGS | changes)).eval()
    for name, parameter in model.named_parameters():
        # Norms and biases are initialised to ones and zeros, which would hide a wrong use.
        if parameter.dim() == 1:
            low, high = (-0.5, 0.5) if "bias" in name or architecture == "gemma3" else (0.5, 1.5)
            torch.nn.init.uniform_(parameter, low, high)
    model.save_pretrained(directory)
    return model


def new_pool(model: Decoder, num_blocks: int = 32, *, fp8: bool = False) -> SdpaAttention:
    """Return a KV pool in which all layers share one block table."""
    layout = KvLayout(single_group(model.shape.layers), num_blocks, BLOCK_TOKENS)
    return SdpaAttention(model.shape, layout, model.dtype, CPU, fp8=fp8)


def span(start: int, length: int, table: Sequence[int]) -> Span:
    """Return a span of a sequence that has one block table."""
    return Span(start, length, (table,))


@torch.inference_mode()
def step(
    model: Decoder,
    pool: Attention,
    parts: Sequence[tuple[list[int], Span]],
    lora: LoraBatch | None = None,
) -> torch.Tensor:
    """Run one step over (text, span) pairs; return the logits of every token."""
    flat = [token for text, part in parts for token in text[part.start : part.stop]]
    device = model.device
    meta = pool.prepare([part for _, part in parts])
    rows = torch.arange(len(flat), device=device)
    return model.forward(torch.tensor(flat, device=device), rows, pool, meta, lora)


def reference_logits(reference: PreTrainedModel, text: list[int]) -> torch.Tensor:
    """Return transformers' logits of every token of a text."""
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([text])).logits[0].float()
    return logits


def text_of(length: int, seed: int = 0) -> list[int]:
    """Return random tokens."""
    numbers = torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed))
    return [int(number) for number in numbers]
