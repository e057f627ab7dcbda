"""Tiny checkpoints for real engines. A hit depends on the prompt alone, never on the weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig

from tests.support.model_server.model import save_reference
from tokenization import TINY_DIRECTORY

VOCABULARY = 4096  # of the tiny tokenizer
_HIDDEN = 128
_LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
_LLAMA = {"vocab_size": VOCABULARY, "hidden_size": _HIDDEN, "max_position_embeddings": 4096}


def llama(directory: Path, **changes: object) -> Path:
    """Save a random Llama of two layers with the tiny tokenizer."""
    save_reference(directory, **{**_LLAMA, "num_hidden_layers": 2, **changes})
    return _with_tokenizer(directory)


def hybrid(directory: Path) -> Path:
    """Save a Llama whose first layer has a sliding window, for which vLLM has a cache group of its own."""
    return llama(directory, **_LAYERS)


def eagle_head(directory: Path) -> Path:
    """Save an EAGLE head for `llama`: one layer without its first norm, and a fusion of two hidden states."""
    save_reference(directory, **{**_LLAMA, "num_hidden_layers": 1})
    weights, fusion = directory / "model.safetensors", torch.randn(_HIDDEN, 2 * _HIDDEN)
    layer = {name: value for name, value in load_file(weights).items() if ".layers.0." in name}
    del layer["model.layers.0.input_layernorm.weight"]
    named = {name.removeprefix("model."): value for name, value in layer.items()}
    save_file({**named, "fc.weight": fusion}, weights)
    return directory


def gpt_oss(directory: Path) -> Path:
    """Write a gpt-oss configuration of two layers, for dummy weights."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    sizes = {"num_hidden_layers": 2, "hidden_size": _HIDDEN, "intermediate_size": _HIDDEN}
    config = GptOssConfig(architectures=["GptOssForCausalLM"], **_LAYERS, **heads, **experts, **sizes)
    config.save_pretrained(directory)
    return _with_tokenizer(directory)


def _with_tokenizer(directory: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        shutil.copy(TINY_DIRECTORY / name, directory / name)
    return directory
