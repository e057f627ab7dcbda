"""LoRA adapters: registry by name, and application to the rows of a batch."""

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor
from torch.nn import functional

from model_server.attention import Upload
from model_server.errors import AdapterError, RequestError
from model_server.requests import LoraRequest

_NAME_CHARACTERS_MAX = 256


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """Low-rank factors of one projection: y += up @ (down @ x)."""

    down: Tensor  # [rank, inputs]
    up: Tensor  # [outputs, rank], multiplied by the adapter's scaling


@dataclass(frozen=True, eq=False, slots=True)
class LoraAdapter:
    """Factors of a loaded adapter, or one rank's part of them."""

    content_hash: str  # see `LoraRequest.content_hash`
    factors: Mapping[tuple[int, str], LoraFactors]  # by (layer, fused projection)


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """Rows of a token batch by adapter."""

    parts: Sequence[tuple[LoraAdapter, Tensor]]  # adapters with their rows (int32); rows are disjoint
    sampled: "LoraBatch | None" = None  # the same for the rows whose logits are computed, counted among these

    @classmethod
    def of(
        cls, adapters: Sequence[LoraAdapter | None], sampled: Sequence[int], upload: Upload
    ) -> "LoraBatch | None":
        """Group the rows of a batch by adapter; return None if no row has an adapter.

        Args:
            adapters: Adapter of each row.
            sampled: Rows whose logits are computed.
            upload: Moves numbers to the device.
        """
        if not any(adapters):
            return None
        return cls(
            _rows_by_adapter(adapters, upload),
            cls(_rows_by_adapter([adapters[row] for row in sampled], upload)),
        )

    def add(self, output: Tensor, inputs: Tensor, layer: int, projection: str) -> None:
        """Add the adapters' output for `inputs` [tokens, inputs] to `output` [tokens, outputs], in place."""
        for adapter, rows in self.parts:
            factors = adapter.factors.get((layer, projection))
            if factors is not None:
                lowered = functional.linear(inputs.index_select(0, rows), factors.down)
                output.index_add_(0, rows, functional.linear(lowered, factors.up))


def _rows_by_adapter(
    adapters: Sequence[LoraAdapter | None], upload: Upload
) -> list[tuple[LoraAdapter, Tensor]]:
    members: dict[LoraAdapter, list[int]] = {}
    for row, adapter in enumerate(adapters):
        if adapter is not None:
            members.setdefault(adapter, []).append(row)
    return [(adapter, upload(np.array(rows, np.int32))) for adapter, rows in members.items()]


@dataclass(eq=False)
class LoraRegistry:
    """Registry of the loaded adapters of one model. Thread-safe."""

    load_one: Callable[[Path, str, int], LoraRequest]  # loads (directory, name, lora_id)
    max_loras: int  # maximum of loaded adapters

    def __post_init__(self) -> None:
        self._adapters: dict[str, LoraRequest] = {}
        self._ids = itertools.count(1)
        self._lock = threading.Lock()  # held during a load, which keeps the limit exact

    def load(self, name: str, directory: Path) -> LoraRequest:
        """Load an adapter.

        Raises:
            AdapterError: The name is invalid or in use, the limit is reached, or the adapter does not fit.
        """
        if not 1 <= len(name) <= _NAME_CHARACTERS_MAX or not name.isprintable():
            raise AdapterError(f"an adapter's name must be 1 to {_NAME_CHARACTERS_MAX} printable characters")
        with self._lock:
            if name in self._adapters:
                raise AdapterError(f"an adapter {name!r} is loaded already; unload it first")
            if len(self._adapters) >= self.max_loras:
                raise AdapterError(
                    f"{len(self._adapters)} adapters are loaded and max_loras is {self.max_loras}; "
                    "unload one first"
                )
            adapter = self.load_one(directory, name, next(self._ids))
            self._adapters[name] = adapter
            return adapter

    def unload(self, name: str) -> None:
        """Unload an adapter; raises an AdapterError if no adapter has the name."""
        with self._lock:
            if self._adapters.pop(name, None) is None:
                raise AdapterError(f"no adapter {name!r} is loaded")

    def find(self, name: str) -> LoraRequest:
        """Return the adapter of that name; raises a RequestError if none has it."""
        adapter = self._adapters.get(name)
        if adapter is None:
            raise RequestError(f"no adapter {name!r} is loaded", "model")
        return adapter

    def loaded(self) -> dict[str, LoraRequest]:
        """Return the loaded adapters by name, in load order."""
        return self._adapters.copy()
