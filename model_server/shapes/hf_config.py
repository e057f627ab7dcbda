"""Typed reading of a checkpoint's config.json; its errors name file and field."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from model_server.config import TINY_MODEL, DType
from model_server.errors import ModelError


class HfConfig:
    """A JSON object that knows which file, and which field of it, it came from."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values = values
        self.where = where

    def has(self, field: str) -> bool:
        """Tell whether the field is there and not null."""
        return self.values.get(field) is not None

    def is_set(self, field: str) -> bool:
        """Tell whether the field holds anything but null, false, or an empty list, object or string."""
        return bool(self.values.get(field))

    def is_text(self, field: str) -> bool:
        return isinstance(self.values.get(field), str)

    def integer(self, field: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Read an integer of at least `minimum`, which is 0 or 1."""
        wanted = "a positive integer" if minimum else "an integer of at least 0"
        return int(self._read(field, default, lambda value: type(value) is int and value >= minimum, wanted))

    def number(self, field: str, default: float | None = None) -> float:
        def holds(value: Any) -> bool:
            return type(value) in (int, float) and 0 < value < float("inf")

        return float(self._read(field, default, holds, "a positive number"))

    def boolean(self, field: str, default: bool) -> bool:
        return bool(self._read(field, default, lambda value: type(value) is bool, "true or false"))

    def text(self, field: str, default: str) -> str:
        return str(self._read(field, default, lambda value: isinstance(value, str), "a string"))

    def section(self, field: str) -> "HfConfig":
        """Read an object; a missing one is empty."""
        value = self._read(field, {}, lambda value: isinstance(value, Mapping), "an object")
        return HfConfig(value, f"{self.where}: {field}")

    def names(self, field: str) -> list[str]:
        """Read a list of strings; a missing one is empty."""
        return list(self._read(field, [], _is_list_of_strings, "a list of strings"))

    def token_ids(self, field: str) -> frozenset[int]:
        """Read one token id or a list of them; a missing field is empty."""

        def holds(value: Any) -> bool:
            ids = value if isinstance(value, list) else [value]
            return all(type(item) is int and item >= 0 for item in ids)

        value = self._read(field, [], holds, "a token id or a list of them")
        return frozenset(value if isinstance(value, list) else [value])

    def texts(self) -> list[str]:
        """Return the object's values, all of which must be strings."""
        return [self.text(field, "") for field in self.values]

    def error(self, field: str, value: object, wanted: str) -> ModelError:
        """Return the error for a field that cannot be used."""
        return ModelError(f"{self.where}: field {field!r} is {value!r}; it must be {wanted}")

    def _read(self, field: str, default: object, holds: Callable[[Any], bool], wanted: str) -> Any:
        value = self.values.get(field)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.where}: field {field!r} is missing")
        if not holds(value):
            raise self.error(field, value, wanted)
        return value


def _is_list_of_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def read_config(path: Path) -> HfConfig:
    """Read a JSON file that holds one object, or raise a ModelError."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path}: the file is missing") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path}: holds {type(values).__name__} instead of an object")
    return HfConfig(values, str(path))


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def computed_dtype(config: HfConfig, dtype: DType) -> str:
    """Return the type of weights and activations; "auto" takes what config.json names."""
    if dtype != "auto":
        return dtype
    named = config.text("dtype", config.text("torch_dtype", "float32"))
    if named not in DTYPE_BYTES:
        raise config.error("dtype", named, f"one of {', '.join(DTYPE_BYTES)} (or choose one by --dtype)")
    return named


TINY_CONFIG = HfConfig(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 4096,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 688,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "dtype": "float32",
    },
    TINY_MODEL,
)
