"""Decorators that compile kernels with numba and cache them on disk.

With NUMBA_DISABLE_JIT=1 the same functions run as plain Python, for debugging and coverage.
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
    """Compile a function that allocates no arrays, at the first call with new argument types.

    The kernel keeps the GIL. If a kernel of a few microseconds released it, getting it back could take
    milliseconds, while the caller holds a lock.
    """
    return _compiled(function, {})


def kernel_with_arrays(function: _Kernel) -> _Kernel:
    """Compile like `kernel`, for a function that allocates or returns arrays (with reference counting)."""
    return _compiled(function, {"_nrt": True})


def inlined(function: _Kernel) -> _Kernel:
    """Compile a small function into its callers, where passing arrays would cost more than the work."""
    return _compiled(function, {"forceinline": True})


def callback(signature: Any) -> Callable[[_Kernel], Any]:
    """Compile a function that C code calls at its `address`, without the GIL. It may allocate arrays."""

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
        # No reference counting: it costs more than the work of most kernels.
        options = {"cache": directory is not None, "_nrt": False, **options}
        with _cached_in(directory):
            compiled: Any = numba.njit(function, error_model="numpy", **options)  # type: ignore[call-overload]
        return compiled  # type: ignore[no-any-return]

    @wraps(function)
    def interpreted(*args: object) -> object:
        # Kernels rely on wrapping unsigned arithmetic. numpy scalars warn about it, compiled code does not.
        with np.errstate(over="ignore"):
            return function(*args)

    return interpreted  # type: ignore[return-value]


@contextmanager
def _cached_in(directory: str | None) -> Iterator[None]:
    """Set numba's cache directory for functions that are decorated within the block."""
    config: Any = numba.config
    before, config.CACHE_DIR = config.CACHE_DIR, directory or config.CACHE_DIR
    try:
        yield
    finally:
        config.CACHE_DIR = before
