"""Checkpoints with random weights, for measurements of models that are not on the machine.

Weights are random because multiplying zeros draws less power, which lets a GPU clock higher.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from model_server.model.weights import new_model
from model_server.shapes.hf_config import HfConfig
from tokenization import TINY_DIRECTORY

_NOISE_ELEMENTS = 10_000_019  # a prime: no row of a matrix equals another one
_DEVIATION = 0.02
# Greedy answers consist of these tokens, whole characters of the tiny tokenizer: others have small logits.
_ANSWERS = slice(300, 420)
_SMALL = 0.1


def write_checkpoint(config: HfConfig, directory: Path) -> None:
    """Write config.json, one safetensors file per layer, and the tiny tokenizer; raises a ModelError."""
    shutil.copytree(TINY_DIRECTORY, directory, dirs_exist_ok=True)
    (directory / "generation_config.json").unlink()  # no token ends an answer
    (directory / "config.json").write_text(json.dumps(dict(config.values)))
    model = new_model(config, "auto", torch.device("meta"))
    files: dict[str, list[str]] = defaultdict(list)
    for name in model.weights():
        files[f"{name.split('.')[2] if '.layers.' in name else 'rest'}.safetensors"].append(name)
    shapes = {name: weight.shape for name, weight in model.weights().items()}
    head = "model.embed_tokens.weight" if model.shape.tied_embeddings else "lm_head.weight"
    noise = (_DEVIATION * torch.randn(_NOISE_ELEMENTS)).to(model.dtype)
    for file, names in files.items():
        save_file({name: _tensor(name, shapes[name], noise, head) for name in names}, directory / file)
    weight_map = {name: file for file, names in files.items() for name in names}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _tensor(name: str, shape: tuple[int, ...], noise: Tensor, head: str) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=noise.dtype)
    elements = torch.Size(shape).numel()
    tensor = noise.repeat(-(-elements // len(noise)))[:elements].clone().view(shape)
    if name == head:
        tensor[: _ANSWERS.start] *= _SMALL
        tensor[_ANSWERS.stop :] *= _SMALL
    return tensor
