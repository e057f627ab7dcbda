"""Loads a PEFT adapter directory: adapter_config.json and adapter_model.safetensors.

In: a directory and the projections of the model. Out: a LoraAdapter whose factors fit the model's own
projections, or an AdapterError that names the file, the tensor or field, and what was expected.
"""

import hashlib
import math
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model_server.errors import AdapterError, ModelError
from model_server.lora import LoraAdapter, LoraFactors
from model_server.models import Decoder
from model_server.shapes import HfConfig, Share, read_config
from model_server.weights import read_tensor

_RANK_MAX = 512
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.model\.layers\.(\d{1,4})\.([\w.]+)\.lora_(A|B)\.weight")
# Fields that change what an adapter computes in ways that are not supported here, when they are set.
_REFUSED = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "fan_in_fan_out",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "arrow_config",
    "alora_invocation_tokens",
)

_Pairs = dict[tuple[int, str], dict[str, Tensor]]


def load_adapter(directory: Path, model: Decoder) -> LoraAdapter:
    """Load an adapter.

    Args:
        directory: Where adapter_config.json and adapter_model.safetensors are.
        model: What it will change; the factors go to its device, in its dtype.

    Raises:
        AdapterError: Anything is missing, not supported, or does not fit the model.
    """
    path = directory / _WEIGHTS
    try:
        rank, scaling, targets = _read_config(read_config(directory / _CONFIG))
        pairs = _read_pairs(path, rank, model)
        _check_complete(path, pairs, targets)
        content_hash = _hash_files(directory / _CONFIG, path)
    except ModelError as error:
        raise AdapterError(str(error)) from error
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{path}: cannot be read as safetensors: {error}") from error
    parts = model.projection_parts()
    factors = {
        (layer, projection): _fused(pairs, layer, projection, scaling, model)
        for layer, projection in {(layer, parts[part].projection) for layer, part in pairs}
    }
    return LoraAdapter(content_hash, factors)


def _read_config(config: HfConfig) -> tuple[int, float, list[str]]:
    """Return the rank, the scaling, and the target modules if they are a list."""
    if (kind := config.text("peft_type", "LORA")) != "LORA":
        raise config.error("peft_type", kind, "'LORA'")
    if (bias := config.text("bias", "none")) != "none":
        raise config.error("bias", bias, "'none': trained biases are not supported")
    for field in _REFUSED:
        if config.is_set(field):
            raise config.error(field, True, "absent or false: it is not supported")
    rank = config.integer("r")
    if rank > _RANK_MAX:
        raise config.error("r", rank, f"at most {_RANK_MAX}")
    rooted = config.boolean("use_rslora", False)
    scaling = config.number("lora_alpha") / (math.sqrt(rank) if rooted else rank)
    return rank, scaling, [] if config.is_text("target_modules") else config.names("target_modules")


def _read_pairs(path: Path, rank: int, model: Decoder) -> _Pairs:
    """Return the tensors {"A": [rank, inputs], "B": [rows, rank]} by layer and part: what is kept of them."""
    parts, layers = model.projection_parts(), model.shape.layers
    pairs: _Pairs = {}
    with safe_open(path, framework="pt", device="cpu") as stored:
        for name in stored.keys():  # noqa: SIM118 (not a mapping)
            match = _TENSOR.fullmatch(name)
            if match is None or match[2] not in parts or int(match[1]) >= layers:
                raise ModelError(
                    f"{path}: tensor {name!r} has no place; adapters can change {', '.join(parts)} "
                    f"of the model's {layers} layers"
                )
            part = parts[match[2]]
            own_rank = Share.all_of(rank)
            shares = (own_rank, part.inputs) if match[3] == "A" else (part.rows, own_rank)
            pairs.setdefault((int(match[1]), match[2]), {})[match[3]] = read_tensor(
                stored, name, shares, path
            )
    return pairs


def _check_complete(path: Path, pairs: _Pairs, targets: list[str]) -> None:
    if not pairs:
        raise ModelError(f"{path}: has no tensors")
    for (layer, part), pair in pairs.items():
        if len(pair) < 2:
            missing = "B" if "A" in pair else "A"
            raise ModelError(f"{path}: layer {layer} has no lora_{missing} for {part}")
    for target in targets:
        if not any(f".{part}".endswith(f".{target}") for _, part in pairs):
            raise ModelError(f"{path}: has no tensor for target module {target!r} of {_CONFIG}")


def _fused(pairs: _Pairs, layer: int, projection: str, scaling: float, model: Decoder) -> LoraFactors:
    """Join the factors of a projection's parts: their downs above one another, their ups on a diagonal."""
    parts = {name: part for name, part in model.projection_parts().items() if part.projection == projection}
    own = [name for name in parts if (layer, name) in pairs]
    down = torch.cat([pairs[layer, name]["A"].float() for name in own])
    up = torch.zeros((max(part.first_row + part.rows.count for part in parts.values()), len(down)))
    column = 0
    for name in own:
        part, factor = parts[name], pairs[layer, name]["B"].float() * scaling
        up[part.first_row : part.first_row + part.rows.count, column : column + factor.shape[1]] = factor
        column += factor.shape[1]
    return LoraFactors(down.to(model.device, model.dtype), up.to(model.device, model.dtype))


def _hash_files(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
