"""LoRA adapters: which of them requests can name, and which rows of one step each of them changes."""

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from model_server.errors import AdapterError, RequestError
from model_server.requests import LoraRequest

_NAME_CHARACTERS_MAX = 256


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """The change of one projection: y += up @ (down @ x)."""

    down: Tensor  # [rank, inputs]
    up: Tensor  # [outputs, rank], with the adapter's scaling in it


@dataclass(frozen=True, eq=False, slots=True)
class LoraAdapter:
    """One loaded adapter, or one rank's part of it."""

    content_hash: str  # as `LoraRequest.content_hash`
    factors: Mapping[tuple[int, str], LoraFactors]  # by layer and projection


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """The rows of one flat token batch that adapters change."""

    parts: Sequence[tuple[LoraAdapter, Tensor]]  # each adapter with its rows, int64; no row is in two parts

    @classmethod
    def of(cls, rows: Sequence[LoraAdapter | None], device: torch.device) -> "LoraBatch | None":
        """Group rows by adapter; None if no row has one."""
        members: dict[LoraAdapter, list[int]] = {}
        for row, adapter in enumerate(rows):
            if adapter is not None:
                members.setdefault(adapter, []).append(row)
        if not members:
            return None
        return cls([(adapter, torch.tensor(rows, device=device)) for adapter, rows in members.items()])

    def chosen(self, rows: Tensor) -> "LoraBatch":
        """Return the batch of some of the rows, int64, each at most once."""
        places = [(adapter, torch.isin(rows, own).nonzero().flatten()) for adapter, own in self.parts]
        return LoraBatch([(adapter, own) for adapter, own in places if len(own)])

    def add(self, output: Tensor, inputs: Tensor, layer: int, projection: str) -> None:
        """Add the adapters' part to a projection's output, in place.

        Args:
            output: [tokens, outputs].
            inputs: [tokens, inputs], what the base model has projected.
        """
        for adapter, rows in self.parts:
            factors = adapter.factors.get((layer, projection))
            if factors is not None:
                lowered = functional.linear(inputs.index_select(0, rows), factors.down)
                output.index_add_(0, rows, functional.linear(lowered, factors.up))


@dataclass(eq=False)
class LoraRegistry:
    """Adapters of one model."""

    load_one: Callable[[Path, str, int], LoraRequest]  # from a directory, with a name and a number
    max_loras: int  # most adapters loaded at once; 0 refuses all

    def __post_init__(self) -> None:
        self._adapters: dict[str, LoraRequest] = {}
        self._ids = itertools.count(1)
        self._lock = threading.Lock()  # also held while a directory is read, so that the bound holds

    def load(self, name: str, directory: Path) -> LoraRequest:
        """Load an adapter; an AdapterError where it does not fit, its name is taken, or too many are."""
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
        """Forget an adapter; an AdapterError where there is none of that name."""
        with self._lock:
            if self._adapters.pop(name, None) is None:
                raise AdapterError(f"no adapter {name!r} is loaded")

    def find(self, name: str) -> LoraRequest:
        """Return the adapter of that name; a RequestError where there is none."""
        adapter = self._adapters.get(name)
        if adapter is None:
            raise RequestError(f"no adapter {name!r} is loaded", "model")
        return adapter

    def loaded(self) -> dict[str, LoraRequest]:
        """Return the loaded adapters by name, in the order of their loading."""
        return self._adapters.copy()
