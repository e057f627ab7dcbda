"""How kernels are compiled: by numba, kept on disk.

With NUMBA_DISABLE_JIT=1 the very same functions run as plain Python, for debugging and for coverage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import numba
import numpy as np

from common.kernel_cache import cache_directory

_Kernel = TypeVar("_Kernel", bound=Callable[..., object])


def kernel(function: _Kernel) -> _Kernel:
    """Compiles a function, which makes no arrays, when it is first called with arguments of new types.

    The GIL is kept: a kernel of a few microseconds that gave it up could wait milliseconds to have it back,
    with the lock that it runs under.
    """
    return _compiled(function, {})


def kernel_with_arrays(function: _Kernel) -> _Kernel:
    """As `kernel`, for one that makes arrays or gives one back; it counts references."""
    return _compiled(function, {"_nrt": True})


def kernel_without_gil(function: _Kernel) -> _Kernel:
    """As `kernel`, for long work under no lock."""
    return _compiled(function, {"nogil": True})


def kernel_of_sums(function: _Kernel) -> _Kernel:
    """Compiles as `kernel_without_gil`, with float sums in any order, as vector instructions take them."""
    return _compiled(function, {"nogil": True, "fastmath": {"reassoc", "nsz", "contract"}})


def inlined(function: _Kernel) -> _Kernel:
    """Compiles a small function into its callers: handing arrays over costs more than its work."""
    return _compiled(function, {"forceinline": True})


def callback(signature: Any) -> Callable[[_Kernel], Any]:
    """Compiles a function, which may make arrays, for C to call at its `address`; it needs no GIL."""

    def compiled(function: _Kernel) -> Any:
        config: Any = numba.config
        directory = cache_directory(config.CACHE_DIR)
        with _cached_in(directory):
            return numba.cfunc(signature, error_model="numpy", cache=directory is not None)(function)

    return compiled


def _compiled(function: _Kernel, options: dict[str, bool | set[str]]) -> _Kernel:
    config: Any = numba.config
    if not config.DISABLE_JIT:
        directory = cache_directory(config.CACHE_DIR)
        # Without reference counts, which cost more than most kernels' work.
        options = {"cache": directory is not None, "_nrt": False, **options}
        with _cached_in(directory):
            compiled: Any = numba.njit(function, error_model="numpy", **options)  # type: ignore[call-overload]
        return compiled  # type: ignore[no-any-return]

    @wraps(function)
    def interpreted(*args: object) -> object:
        # Kernels count on unsigned numbers that wrap; numpy's scalars warn where compiled code does not.
        with np.errstate(over="ignore"):
            return function(*args)

    return interpreted  # type: ignore[return-value]


@contextmanager
def _cached_in(directory: str | None) -> Iterator[None]:
    """Has numba keep what is compiled meanwhile in a directory."""
    config: Any = numba.config
    before, config.CACHE_DIR = config.CACHE_DIR, directory or config.CACHE_DIR
    try:
        yield
    finally:
        config.CACHE_DIR = before
