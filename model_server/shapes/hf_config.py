"""Typed reading of a checkpoint's config.json; its errors name file and field."""

import json
from collections.abc import Mapping
from pathlib import Path

from model_server.config import TINY_MODEL, DType
from model_server.errors import ModelError


class HfConfig:
    """A JSON object that knows which file, and which field of it, it came from."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self._values = values
        self.where = where

    def has(self, field: str) -> bool:
        """Tell whether the field is there and not null."""
        return self._values.get(field) is not None

    def is_set(self, field: str) -> bool:
        """Tell whether the field holds anything but null, false, or an empty list, object or string."""
        return bool(self._values.get(field))

    def is_text(self, field: str) -> bool:
        return isinstance(self._values.get(field), str)

    def integer(self, field: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Read an integer of at least `minimum`, which is 0 or 1."""
        value = self._get(field, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(field, value, "a positive integer" if minimum else "an integer of at least 0")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        value = self._get(field, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.error(field, value, "a positive number")
        return float(value)

    def boolean(self, field: str, default: bool) -> bool:
        value = self._get(field, default)
        if not isinstance(value, bool):
            raise self.error(field, value, "true or false")
        return value

    def text(self, field: str, default: str) -> str:
        value = self._get(field, default)
        if not isinstance(value, str):
            raise self.error(field, value, "a string")
        return value

    def section(self, field: str) -> "HfConfig":
        """Read an object; a missing one is empty."""
        value = self._values.get(field)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.error(field, value, "an object")
        return HfConfig(value, f"{self.where}: {field}")

    def names(self, field: str) -> list[str]:
        """Read a list of strings; a missing one is empty."""
        value = self._values.get(field)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(field, value, "a list of strings")
        return value

    def token_ids(self, field: str) -> frozenset[int]:
        """Read one token id or a list of them; a missing field is empty."""
        value = self._values.get(field)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
            raise self.error(field, value, "a token id or a list of them")
        return frozenset(ids)

    def texts(self) -> list[str]:
        """Return the object's values, all of which must be strings."""
        for field, value in self._values.items():
            if not isinstance(value, str):
                raise self.error(field, value, "a string")
        return [str(value) for value in self._values.values()]

    def error(self, field: str, value: object, wanted: str) -> ModelError:
        """Return the error for a field that cannot be used."""
        return ModelError(f"{self.where}: field {field!r} is {value!r}; it must be {wanted}")

    def _get(self, field: str, default: object) -> object:
        value = self._values.get(field)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.where}: field {field!r} is missing")
        return value


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
