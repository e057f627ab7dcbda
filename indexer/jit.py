"""How kernels are compiled: by numba, kept on disk.

With NUMBA_DISABLE_JIT=1 the very same functions run as plain Python, for debugging and for coverage.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

import numba
import numpy as np
from xxhash import xxh3_64_hexdigest

_Kernel = TypeVar("_Kernel", bound=Callable[..., object])

# Files with constants that are compiled into kernels; those with kernels import this one.
_CONSTANTS = ("jit.py", "cache_groups.py", "event_rows.py", "events.py", "flat_layout.py")


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


def inlined(function: _Kernel) -> _Kernel:
    """Compiles a small function into its callers: handing arrays over costs more than its work."""
    return _compiled(function, {"forceinline": True})


def _compiled(function: _Kernel, options: dict[str, bool]) -> _Kernel:
    config: Any = numba.config
    if not config.DISABLE_JIT:
        directory = _cache_directory(config.CACHE_DIR)
        before, config.CACHE_DIR = config.CACHE_DIR, directory or config.CACHE_DIR
        # Without reference counts, which cost more than most kernels' work.
        options = {"cache": directory is not None, "_nrt": False, **options}
        try:
            compiled: Any = numba.njit(function, error_model="numpy", **options)  # type: ignore[call-overload]
        finally:
            config.CACHE_DIR = before
        return compiled  # type: ignore[no-any-return]

    @wraps(function)
    def interpreted(*args: object) -> object:
        # Kernels count on unsigned numbers that wrap; numpy's scalars warn where compiled code does not.
        with np.errstate(over="ignore"):
            return function(*args)

    return interpreted  # type: ignore[return-value]


@cache
def _cache_directory(chosen: str) -> str | None:
    """Where compiled kernels are kept: a directory for each state of their sources.

    numba looks at the file of a kernel only, and would not see that one changed which is compiled into it.

    Args:
        chosen: What NUMBA_CACHE_DIR says; empty: below the user's cache directory.

    Returns:
        Its path; None if it cannot be written: kernels are compiled at each start then.
    """
    root = Path(__file__).parents[1]
    texts = {
        path: path.read_bytes() for path in sorted([*root.glob("indexer/*.py"), *root.glob("router/*.py")])
    }
    used = [text for path, text in texts.items() if path.name in _CONSTANTS or b".jit import" in text]
    digest = xxh3_64_hexdigest(b"\0".join(used))
    try:
        below = chosen or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        directory = Path(below) / "kvroute-kernels" / digest
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            return str(directory)
    except (OSError, RuntimeError):
        return None
