"""Loads a Hugging Face checkpoint directory: config.json and safetensors, whole or in shards.

In: a directory. Out: a model with its weights, the tokens that end a text, and how long it may get; or a
ModelError that names the file, the tensor or field, and what was expected.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model_server.config import DType
from model_server.errors import ConfigError, ModelError
from model_server.models import Decoder, Weight
from model_server.parallel.ranks import Ranks
from model_server.shapes import (
    HfConfig,
    Share,
    check_divisible,
    computed_dtype,
    decoder_shape,
    read_config,
)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED = frozenset(("F32", "BF16", "F16"))
_LISTED_MAX = 5


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run."""

    model: Decoder  # with its weights
    eos_token_ids: frozenset[int]  # tokens that end a text
    max_positions: int  # longest text it was made for, in tokens


def load_checkpoint(
    directory: Path, dtype: DType, device: torch.device, ranks: Ranks | None = None
) -> LoadedModel:
    """Load a model, or one rank's part of it: nothing else is read from the files.

    Args:
        directory: Where config.json and the safetensors are.
        dtype: What to compute in; "auto" takes what config.json names.
        device: Where the weights go.
        ranks: Who computes it; None for this process alone.

    Raises:
        ModelError: Anything is missing or does not fit.
        ConfigError: There are as many ranks as the model cannot be divided by.
    """
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such model directory")
    model = new_model(read_config(directory / "config.json"), dtype, device, ranks)
    fill(model.weights(), _checkpoint_files(directory), tied=model.shape.tied_embeddings)
    return LoadedModel(model, eos_token_ids(directory), model.shape.max_positions)


def new_model(config: HfConfig, dtype: DType, device: torch.device, ranks: Ranks | None = None) -> Decoder:
    """Make the model that a configuration describes, its weights not yet written.

    Raises:
        ModelError: The configuration cannot be used, or the weights would not fit the device's memory.
        ConfigError: There are as many ranks as the model cannot be divided by.
    """
    shape, torch_dtype = decoder_shape(config), _DTYPES[computed_dtype(config, dtype)]
    if ranks is not None:
        check_divisible(shape, ranks.division.size)
    try:
        return Decoder(shape, torch_dtype, device, ranks)
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


def eos_token_ids(directory: Path) -> frozenset[int]:
    """Return the end-of-sequence tokens: generation_config.json's, else config.json's, else none."""
    for path in (directory / "generation_config.json", directory / "config.json"):
        if path.exists() and (ids := read_config(path).token_ids("eos_token_id")):
            return ids
    return frozenset()


def fill(weights: dict[str, Weight], files: Iterable[Path], *, tied: bool) -> None:
    """Write every tensor of the files into its place; each place must be written."""
    missing = set(weights)
    for path in files:
        try:
            # A file that is no safetensors file raises at opening, a damaged one may at any tensor.
            with safe_open(path, framework="pt", device="cpu") as stored:
                for name in stored.keys():  # noqa: SIM118 (not a mapping)
                    if name in weights:
                        weights[name].tensor.copy_(read_tensor(stored, name, weights[name].shares, path))
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


def read_tensor(stored: safe_open, name: str, shares: tuple[Share, ...], path: Path) -> Tensor:
    """Read one tensor of an open file, or the part of it that the shares name.

    Raises:
        ModelError: Its shape or type is not what it must be.
    """
    view = stored.get_slice(name)  # type: ignore[no-untyped-call]
    shape, wanted = tuple(view.get_shape()), tuple(share.whole for share in shares)
    if shape != wanted:
        raise ModelError(f"{path}: tensor {name!r} has shape {shape}; config.json asks for {wanted}")
    if view.get_dtype() not in _STORED:
        raise ModelError(
            f"{path}: tensor {name!r} is stored as {view.get_dtype()}; use {', '.join(sorted(_STORED))}"
        )
    if all(share.is_all for share in shares):
        tensor: Tensor = stored.get_tensor(name)  # type: ignore[no-untyped-call]
    else:
        tensor = view[tuple(share.span for share in shares)]
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
