"""Loading of checkpoints (config.json and safetensors), of the built-in tiny model, and of LoRA adapters.

Adapters have PEFT's files: adapter_config.json and adapter_model.safetensors.
"""

import hashlib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model_server.config import DType
from model_server.errors import AdapterError, ConfigError, ModelError
from model_server.model.decoder import Decoder, Weight
from model_server.model.lora import LoraAdapter, LoraFactors
from model_server.model.ranks import Ranks
from model_server.shapes.architectures import decoder_shape
from model_server.shapes.hf_config import TINY_CONFIG, HfConfig, computed_dtype, read_config
from model_server.shapes.shape import Shard, check_divisible
from tokenization import TINY_DIRECTORY

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED = frozenset(("F32", "BF16", "F16"))
_LISTED_MAX = 5
_TINY_SEED = 20260
_ADAPTER_RANK_MAX = 512
_ADAPTER_CONFIG, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ADAPTER_TENSOR = re.compile(r"base_model\.model\.model\.layers\.(\d{1,4})\.([\w.]+)\.lora_(A|B)\.weight")
# Adapter settings that are not supported; they must be absent or false.
_REFUSED = (
    *("use_dora", "use_qalora", "use_bdlora", "fan_in_fan_out", "lora_bias", "modules_to_save"),
    *("rank_pattern", "alpha_pattern", "trainable_token_indices", "target_parameters"),
    *("layer_replication", "arrow_config", "alora_invocation_tokens"),
)
_Pairs = dict[tuple[int, str], dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Loaded model with its end-of-sequence tokens."""

    model: Decoder  # with loaded weights
    eos_token_ids: frozenset[int]  # end-of-sequence tokens


def load_checkpoint(
    directory: Path, dtype: DType, device: torch.device, ranks: Ranks | None = None
) -> LoadedModel:
    """Load a checkpoint, or one rank's part of it, reading only that part of the files.

    Raises:
        ModelError: A file or tensor is missing, unsupported, or of the wrong shape.
        ConfigError: The model cannot be divided among so many ranks.
    """
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such model directory")
    model = new_model(read_config(directory / "config.json"), dtype, device, ranks)
    fill(model.weights(), _checkpoint_files(directory), tied=model.shape.tied_embeddings)
    return LoadedModel(model, eos_token_ids(directory))


def new_model(config: HfConfig, dtype: DType, device: torch.device, ranks: Ranks | None = None) -> Decoder:
    """Create a model with uninitialized weights.

    Raises:
        ModelError: The configuration is unsupported, or there is not enough memory.
        ConfigError: The model cannot be divided among so many ranks.
    """
    shape, torch_dtype = decoder_shape(config), _DTYPES[computed_dtype(config, dtype)]
    if ranks is not None:
        check_divisible(shape, ranks.model_rank.size)
    try:
        return Decoder(shape, torch_dtype, device, ranks)
    except (RuntimeError, MemoryError) as error:
        raise ModelError(f"{config.source}: not enough memory on {device}: {error}") from error


def torch_device(name: str) -> torch.device:
    """Return a torch device after a test allocation; raises a ConfigError if it is unusable."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used: {error}") from error
    return device


def eos_token_ids(directory: Path) -> frozenset[int]:
    """Return the end-of-sequence tokens of generation_config.json, else of config.json, else none."""
    for path in (directory / "generation_config.json", directory / "config.json"):
        if path.exists() and (ids := read_config(path).token_ids("eos_token_id")):
            return ids
    return frozenset()


def fill(weights: dict[str, Weight], files: Iterable[Path], *, tied: bool) -> None:
    """Copy the tensors of checkpoint files into `weights`; raises a ModelError unless all are filled."""
    missing = set(weights)
    for path in files:
        try:
            # An invalid file raises when opened, a damaged one possibly at any tensor.
            with safe_open(path, framework="pt", device="cpu") as stored:
                for name in stored.keys():  # noqa: SIM118 (not a mapping)
                    if name in weights:
                        weights[name].tensor.copy_(read_tensor(stored, name, weights[name].shards, path))
                        missing.discard(name)
                    # Redundant tensors of some checkpoints.
                    elif not (name.endswith(".rotary_emb.inv_freq") or (tied and name == "lm_head.weight")):
                        raise ModelError(
                            f"{path}: tensor {name!r} is not part of the model that config.json describes"
                        )
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: cannot be read as safetensors: {error}") from error
    if missing:
        names = sorted(missing)
        raise ModelError(
            f"the checkpoint lacks {len(names)} tensors that config.json requires: "
            f"{', '.join(names[:_LISTED_MAX])}{', ...' if len(names) > _LISTED_MAX else ''}"
        )


def read_tensor(stored: safe_open, name: str, shards: tuple[Shard, ...], path: Path) -> Tensor:
    """Read one tensor of an open file, or its shards; raises a ModelError if shape or type is wrong."""
    view = stored.get_slice(name)  # type: ignore[no-untyped-call]
    shape, wanted = tuple(view.get_shape()), tuple(shard.whole for shard in shards)
    if shape != wanted:
        raise ModelError(f"{path}: tensor {name!r} has shape {shape}; config.json requires {wanted}")
    if view.get_dtype() not in _STORED:
        raise ModelError(
            f"{path}: tensor {name!r} is stored as {view.get_dtype()}; use {', '.join(sorted(_STORED))}"
        )
    if all(shard.is_all for shard in shards):
        tensor: Tensor = stored.get_tensor(name)  # type: ignore[no-untyped-call]
    else:
        tensor = view[tuple(shard.span for shard in shards)]
    return tensor


def _checkpoint_files(directory: Path) -> list[Path]:
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise ModelError(f"{directory}: contains neither {single.name} nor {index.name}")
    weight_map = read_config(index).section("weight_map")
    shards = {weight_map.text(name, "") for name in weight_map.values}
    if outside := [name for name in shards if Path(name).name != name]:
        raise ModelError(f"{index}: weight_map names {outside[0]!r}; only files beside it are read")
    return [directory / name for name in sorted(shards)]


def load_tiny(dtype: DType, device: torch.device, ranks: Ranks | None = None) -> LoadedModel:
    """Create the built-in model, or one rank's part of it: a small Llama with fixed random weights.

    Its text is meaningless, but depends on every token of the context, so a wrong KV block changes the
    output. It has the vocabulary of the packaged tiny tokenizer.
    """
    model = new_model(TINY_CONFIG, dtype, device, ranks)
    ends = eos_token_ids(TINY_DIRECTORY)
    generator = torch.Generator().manual_seed(_TINY_SEED)
    for name, weight in model.weights().items():
        if len(weight.shape) == 1:
            weight.tensor.fill_(1.0)  # norms
            continue
        whole = torch.randn(weight.shape, generator=generator) * _scale(name, weight.shape[1])
        if name == "lm_head.weight":
            # A logit of 0 is never the largest of thousands, so greedy answers have the requested length.
            whole[sorted(ends)] = 0.0
        weight.write(whole)
    return LoadedModel(model, ends)


def _scale(name: str, inputs: int) -> float:
    """Return the standard deviation of a random weight matrix."""
    if "embed_tokens" in name:
        return 1.0
    # With 1 / sqrt(inputs) alone, random attention would be nearly an average over the context. Larger query,
    # key and output weights make single tokens matter: one changed token 600 tokens back changes a third of
    # the output tokens. Rounding errors stay 10^4 times below the usual gap of the two best logits.
    gains = {"q_proj": 1.7, "k_proj": 1.7, "o_proj": 2.0}
    return next((gain for part, gain in gains.items() if part in name), 1.0) / math.sqrt(inputs)


def load_adapter(directory: Path, model: Decoder) -> LoraAdapter:
    """Load an adapter; raises an AdapterError if a file is missing, unsupported or does not fit."""
    path = directory / _ADAPTER_WEIGHTS
    try:
        rank, scaling, targets = _read_adapter_config(read_config(directory / _ADAPTER_CONFIG))
        pairs = _read_pairs(path, rank, model)
        _check_complete(path, pairs, targets)
        content_hash = _hash_files(directory / _ADAPTER_CONFIG, path)
    except ModelError as error:
        raise AdapterError(str(error)) from error
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{path}: cannot be read as safetensors: {error}") from error
    parts = model.projection_parts
    factors = {
        (layer, projection): _fused(pairs, layer, projection, scaling, model)
        for layer, projection in {(layer, parts[part].projection) for layer, part in pairs}
    }
    return LoraAdapter(content_hash, factors)


def _read_adapter_config(config: HfConfig) -> tuple[int, float, list[str]]:
    """Return rank, scaling and, if they are a list, the target modules."""
    if (kind := config.text("peft_type", "LORA")) != "LORA":
        raise config.error("peft_type", kind, "'LORA'")
    if (bias := config.text("bias", "none")) != "none":
        raise config.error("bias", bias, "'none': trained biases are not supported")
    for field in _REFUSED:
        if config.values.get(field):
            raise config.error(field, True, "absent or false: it is not supported")
    rank = config.integer("r")
    if rank > _ADAPTER_RANK_MAX:
        raise config.error("r", rank, f"at most {_ADAPTER_RANK_MAX}")
    use_rslora = config.boolean("use_rslora", False)
    scaling = config.number("lora_alpha") / (math.sqrt(rank) if use_rslora else rank)
    is_pattern = isinstance(config.values.get("target_modules"), str)
    return rank, scaling, [] if is_pattern else config.names("target_modules")


def _read_pairs(path: Path, rank: int, model: Decoder) -> _Pairs:
    """Return this rank's {"A": [rank, inputs], "B": [rows, rank]} by layer and projection."""
    parts, layers = model.projection_parts, model.shape.layers
    pairs: _Pairs = {}
    with safe_open(path, framework="pt", device="cpu") as stored:
        for name in stored.keys():  # noqa: SIM118 (not a mapping)
            match = _ADAPTER_TENSOR.fullmatch(name)
            if match is None or match[2] not in parts or int(match[1]) >= layers:
                raise ModelError(
                    f"{path}: tensor {name!r} is not supported; adapters can change {', '.join(parts)} "
                    f"of the model's {layers} layers"
                )
            part = parts[match[2]]
            rank_shard = Shard.all_of(rank)
            shards = (rank_shard, part.inputs) if match[3] == "A" else (part.rows, rank_shard)
            pairs.setdefault((int(match[1]), match[2]), {})[match[3]] = read_tensor(
                stored, name, shards, path
            )
    return pairs


def _check_complete(path: Path, pairs: _Pairs, targets: list[str]) -> None:
    if not pairs:
        raise ModelError(f"{path}: contains no tensors")
    for (layer, part), pair in pairs.items():
        if len(pair) < 2:
            missing = "B" if "A" in pair else "A"
            raise ModelError(f"{path}: layer {layer} has no lora_{missing} for {part}")
    for target in targets:
        if not any(f".{part}".endswith(f".{target}") for _, part in pairs):
            raise ModelError(f"{path}: has no tensor for target module {target!r} of {_ADAPTER_CONFIG}")


def _fused(pairs: _Pairs, layer: int, projection: str, scaling: float, model: Decoder) -> LoraFactors:
    """Return the factors of a fused projection: stacked `down` and block-diagonal `up` of its parts."""
    parts = {name: part for name, part in model.projection_parts.items() if part.projection == projection}
    own = {name: pairs.get((layer, name)) for name in parts}
    down = torch.cat([pair["A"].float() for pair in own.values() if pair is not None])
    up = torch.block_diag(
        *(
            torch.empty((parts[name].rows.count, 0)) if pair is None else pair["B"].float() * scaling
            for name, pair in own.items()
        )
    )
    return LoraFactors(down.to(model.device, model.dtype), up.to(model.device, model.dtype))


def _hash_files(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
