"""The adapters that are loaded now: at most a fixed number, each under its name.

In: adapter directories. Out: adapters by name. Callable from any thread; a request keeps the adapter that it
began with, also after that was unloaded.
"""

import itertools
import threading
from collections.abc import Callable
from pathlib import Path

from model_server.errors import AdapterError, RequestError
from model_server.lora import LoraRequest

_NAME_CHARACTERS_MAX = 256


class LoraRegistry:
    """Adapters of one model.

    Args:
        load: Loads an adapter from a directory, under a name and a number, or raises AdapterError.
        max_loras: Most adapters loaded at once; 0 refuses all.
    """

    def __init__(self, load: Callable[[Path, str, int], LoraRequest], max_loras: int) -> None:
        self._load = load
        self._max_loras = max_loras
        self._adapters: dict[str, LoraRequest] = {}
        self._ids = itertools.count(1)
        self._lock = threading.Lock()  # also held while a directory is read, so that the bound holds

    def load(self, name: str, directory: Path) -> LoraRequest:
        """Load an adapter.

        Raises:
            AdapterError: It does not fit the model, the name is taken, or there are too many already.
        """
        if not 1 <= len(name) <= _NAME_CHARACTERS_MAX or not name.isprintable():
            raise AdapterError(f"an adapter's name must be 1 to {_NAME_CHARACTERS_MAX} printable characters")
        with self._lock:
            if name in self._adapters:
                raise AdapterError(f"an adapter {name!r} is loaded already; unload it first")
            if len(self._adapters) >= self._max_loras:
                raise AdapterError(
                    f"{len(self._adapters)} adapters are loaded and max_loras is {self._max_loras}; "
                    "unload one first"
                )
            adapter = self._load(directory, name, next(self._ids))
            self._adapters[name] = adapter
            return adapter

    def unload(self, name: str) -> None:
        """Forget an adapter.

        Raises:
            AdapterError: There is none of that name.
        """
        with self._lock:
            if self._adapters.pop(name, None) is None:
                raise AdapterError(f"no adapter {name!r} is loaded")

    def find(self, name: str) -> LoraRequest:
        """Return the adapter of that name.

        Raises:
            RequestError: There is none.
        """
        adapter = self._adapters.get(name)
        if adapter is None:
            raise RequestError(f"no adapter {name!r} is loaded", "model")
        return adapter

    def names(self) -> tuple[str, ...]:
        """Return the names of the loaded adapters, in the order of their loading."""
        return tuple(self._adapters.copy())
