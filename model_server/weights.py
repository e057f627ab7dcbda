"""Loads a Hugging Face checkpoint directory: config.json and safetensors, whole or in shards.

In: a directory. Out: a model with its weights, the tokens that end a text, and how long it may get; or a
ModelError that names the file, the tensor or field, and what was expected.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model_server.config import DType
from model_server.errors import ConfigError, ModelError
from model_server.models import Decoder, HfConfig, decoder_shape

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED = frozenset(("F32", "BF16", "F16"))
_LISTED_MAX = 5


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: With its weights.
        eos_token_ids: Tokens that end a text.
        max_positions: Longest text it was made for, in tokens.
    """

    model: Decoder
    eos_token_ids: frozenset[int]
    max_positions: int


def load_checkpoint(directory: Path, dtype: DType, device: torch.device) -> LoadedModel:
    """Load a model.

    Args:
        directory: Where config.json and the safetensors are.
        dtype: What to compute in; "auto" takes what config.json names.
        device: Where the weights go.

    Raises:
        ModelError: Anything is missing or does not fit.
    """
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such model directory")
    model = new_model(read_config(directory / "config.json"), dtype, device)
    fill(model.tensors(), _checkpoint_files(directory), tied=model.shape.tied_embeddings)
    return LoadedModel(model, eos_token_ids(directory), model.shape.max_positions)


def new_model(config: HfConfig, dtype: DType, device: torch.device) -> Decoder:
    """Make the model that a configuration describes, its weights not yet written.

    Raises:
        ModelError: The configuration cannot be used, or the weights would not fit the device's memory.
    """
    shape, torch_dtype = decoder_shape(config), _torch_dtype(config, dtype)
    try:
        return Decoder(shape, torch_dtype, device)
    except (RuntimeError, MemoryError) as error:
        raise ModelError(f"{config.where}: no memory for such a model on {device}: {error}") from error


def torch_device(name: str) -> torch.device:
    """Return the device of that name, once it has been seen to work.

    Raises:
        ConfigError: There is no such device here.
    """
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used: {error}") from error
    return device


def read_config(path: Path) -> HfConfig:
    """Read a JSON file that holds one object."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path}: the file is missing") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path}: holds {type(values).__name__} instead of an object")
    return HfConfig(values, str(path))


def eos_token_ids(directory: Path) -> frozenset[int]:
    """Return the end-of-sequence tokens: generation_config.json's, else config.json's, else none."""
    for path in (directory / "generation_config.json", directory / "config.json"):
        if path.exists() and (ids := read_config(path).token_ids("eos_token_id")):
            return ids
    return frozenset()


def fill(tensors: dict[str, Tensor], files: Iterable[Path], *, tied: bool) -> None:
    """Write every tensor of the files into its place; each place must be written."""
    missing = set(tensors)
    for path in files:
        try:
            # A file that is no safetensors file raises at opening, a damaged one may at any tensor.
            with safe_open(path, framework="pt", device="cpu") as stored:
                for name in stored.keys():  # noqa: SIM118 (not a mapping)
                    if name in tensors:
                        tensors[name].copy_(read_tensor(stored, name, tuple(tensors[name].shape), path))
                        missing.discard(name)
                    elif not _is_redundant(name, tied):
                        raise ModelError(
                            f"{path}: tensor {name!r} has no place in the model that config.json describes"
                        )
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: cannot be read as safetensors: {error}") from error
    if missing:
        names = sorted(missing)
        raise ModelError(
            f"the checkpoint lacks {len(names)} tensors that its config.json asks for: "
            f"{', '.join(names[:_LISTED_MAX])}{', ...' if len(names) > _LISTED_MAX else ''}"
        )


def read_tensor(stored: safe_open, name: str, wanted: tuple[int, ...], path: Path) -> Tensor:
    """Read one tensor of an open file.

    Raises:
        ModelError: Its shape or type is not what it must be.
    """
    view = stored.get_slice(name)  # type: ignore[no-untyped-call]
    shape = tuple(view.get_shape())
    if shape != wanted:
        raise ModelError(f"{path}: tensor {name!r} has shape {shape}; config.json asks for {wanted}")
    if view.get_dtype() not in _STORED:
        raise ModelError(
            f"{path}: tensor {name!r} is stored as {view.get_dtype()}; use {', '.join(sorted(_STORED))}"
        )
    tensor: Tensor = stored.get_tensor(name)  # type: ignore[no-untyped-call]
    return tensor


def _checkpoint_files(directory: Path) -> list[Path]:
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise ModelError(f"{directory}: has neither {single.name} nor {index.name}")
    shards = set(read_config(index).section("weight_map").texts())
    if outside := [name for name in shards if Path(name).name != name]:
        raise ModelError(f"{index}: weight_map names {outside[0]!r}; only files beside it are read")
    return [directory / name for name in sorted(shards)]


def _is_redundant(name: str, tied: bool) -> bool:
    """Tell whether a tensor may be in a checkpoint without being needed."""
    return name.endswith(".rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


def _torch_dtype(config: HfConfig, dtype: DType) -> torch.dtype:
    if dtype != "auto":
        return _DTYPES[dtype]
    named = config.text("dtype", config.text("torch_dtype", "float32"))
    if named not in _DTYPES:
        raise config.error("dtype", named, f"one of {', '.join(_DTYPES)} (or choose one by --dtype)")
    return _DTYPES[named]
