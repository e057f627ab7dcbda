"""Hand-made PEFT adapter directories, and checkpoints with merged weights."""

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    directory: Path,
    base: PreTrainedModel,
    *,
    seed: int = 0,
    rank: int = 3,
    targets: Sequence[str] = ALL_TARGETS,
    layers: Sequence[int] = (0, 1, 2),
    **changes: object,
) -> Path:
    """Save an adapter with random factors in PEFT's format; `changes` override adapter_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 6,
        "target_modules": list(targets),
        "use_rslora": False,
        "use_dora": False,
        "bias": "none",
        "modules_to_save": None,
        "rank_pattern": {},
    }
    (directory / "adapter_config.json").write_text(json.dumps(config | changes))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in base.named_parameters():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets and int(module.split(".")[2]) in layers:
            for factor, size in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
                key = f"base_model.model.{module}.lora_{factor}.weight"
                tensors[key] = 0.2 * torch.randn(size, generator=generator)
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


@torch.no_grad()
def merged(base: PreTrainedModel, directory: Path) -> PreTrainedModel:
    """Return a copy of the model with the adapter added to its weights (LoRA, arXiv 2106.09685)."""
    config = json.loads((directory / "adapter_config.json").read_text())
    rank = config["r"]
    scaling = config["lora_alpha"] / (math.sqrt(rank) if config["use_rslora"] else rank)
    tensors = load_file(directory / "adapter_model.safetensors")
    model = copy.deepcopy(base)
    for name, weight in model.named_parameters():
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_%s.weight"
        if key % "A" in tensors:
            weight += scaling * tensors[key % "B"] @ tensors[key % "A"]
    return model


def tiny_weights() -> LlamaForCausalLM:
    """Return weights with the tiny model's shapes, without values."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=688,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)
