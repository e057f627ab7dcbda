"""Typed access to a checkpoint's config.json; errors name the file and the field."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from model_server.config import TINY_MODEL, DType
from model_server.errors import ModelError


class HfConfig:
    """JSON object with its source (file and field) for error messages."""

    def __init__(self, values: Mapping[str, object], source: str) -> None:
        self.values = values
        self.source = source

    def has(self, field: str) -> bool:
        """Return whether the field is present and not null."""
        return self.values.get(field) is not None

    def integer(self, field: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Read an integer of at least `minimum` (0 or 1)."""
        wanted = "a positive integer" if minimum else "an integer of at least 0"
        return int(self._read(field, default, lambda value: type(value) is int and value >= minimum, wanted))

    def number(self, field: str, default: float | None = None) -> float:
        def is_valid(value: Any) -> bool:
            return type(value) in (int, float) and 0 < value < float("inf")

        return float(self._read(field, default, is_valid, "a positive number"))

    def boolean(self, field: str, default: bool) -> bool:
        return bool(self._read(field, default, lambda value: type(value) is bool, "true or false"))

    def text(self, field: str, default: str) -> str:
        return str(self._read(field, default, lambda value: isinstance(value, str), "a string"))

    def section(self, field: str) -> "HfConfig":
        """Read an object; a missing field is empty."""
        value = self._read(field, {}, lambda value: isinstance(value, Mapping), "an object")
        return HfConfig(value, f"{self.source}: {field}")

    def names(self, field: str) -> list[str]:
        """Read a list of strings; a missing field is empty."""
        return list(self._read(field, [], _is_list_of_strings, "a list of strings"))

    def token_ids(self, field: str) -> frozenset[int]:
        """Read one token id or a list of them; a missing field is empty."""

        def is_valid(value: Any) -> bool:
            ids = value if isinstance(value, list) else [value]
            return all(type(item) is int and item >= 0 for item in ids)

        value = self._read(field, [], is_valid, "a token id or a list of them")
        return frozenset(value if isinstance(value, list) else [value])

    def error(self, field: str, value: object, wanted: str) -> ModelError:
        """Return an error for a field with an unsupported value."""
        return ModelError(f"{self.source}: field {field!r} is {value!r}; it must be {wanted}")

    def _read(self, field: str, default: object, is_valid: Callable[[Any], bool], wanted: str) -> Any:
        value = self.values.get(field)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.source}: field {field!r} is missing")
        if not is_valid(value):
            raise self.error(field, value, wanted)
        return value


def _is_list_of_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def read_config(path: Path) -> HfConfig:
    """Read a JSON file with one object; raises a ModelError."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path}: the file is missing") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return HfConfig(values, str(path))


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def computed_dtype(config: HfConfig, dtype: DType) -> str:
    """Return the type of weights and activations; "auto" is the type in config.json."""
    if dtype != "auto":
        return dtype
    named = config.text("dtype", config.text("torch_dtype", "float32"))
    if named not in DTYPE_BYTES:
        raise config.error("dtype", named, f"one of {', '.join(DTYPE_BYTES)} (or set --dtype)")
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
