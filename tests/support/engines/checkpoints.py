"""Tiny checkpoints for real engines. A hit depends on the prompt alone, never on the weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, GptOssConfig

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


def eight_layers(directory: Path) -> Path:
    """Save a Llama with enough layers for an EAGLE3 head, which reads the hidden states of three."""
    return llama(directory, num_hidden_layers=8)


def eagle3_head(directory: Path) -> Path:
    """Save an EAGLE3 head for `eight_layers`: its layer reads embeddings and hidden states side by side."""
    save_reference(directory, **{**_LLAMA, "num_hidden_layers": 1})
    weights, config = directory / "model.safetensors", directory / "config.json"
    named = {name.removeprefix("model."): value for name, value in load_file(weights).items()}
    named = {name.replace("layers.0.", "midlayer."): value for name, value in named.items()}
    for name in ("q", "k", "v"):
        projection = named[f"midlayer.self_attn.{name}_proj.weight"]
        named[f"midlayer.self_attn.{name}_proj.weight"] = torch.cat([projection, projection], dim=1)
    named["midlayer.hidden_norm.weight"] = named["midlayer.input_layernorm.weight"].clone()
    save_file({**named, "fc.weight": torch.randn(_HIDDEN, 3 * _HIDDEN)}, weights)
    changes = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCABULARY}
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    return directory


def glm4_moe(directory: Path) -> Path:
    """Write a GLM4-MoE configuration of two layers and an MTP layer, for dummy weights."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1}
    sizes = {"num_hidden_layers": 2, "hidden_size": _HIDDEN, "intermediate_size": _HIDDEN}
    more = {"moe_intermediate_size": _HIDDEN, "topk_group": 1, "first_k_dense_replace": 1}
    limits = {"vocab_size": VOCABULARY, "max_position_embeddings": 4096, "num_nextn_predict_layers": 1}
    config = Glm4MoeConfig(
        architectures=["Glm4MoeForCausalLM"], **heads, **experts, **sizes, **more, **limits
    )
    config.save_pretrained(directory)
    return _with_tokenizer(directory)


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
