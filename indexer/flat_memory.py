"""Memory that is reserved in advance, and taken as it is touched.

A size comes in, an array of zeros goes out. It lies outside the heap, which would keep what once was used.
"""

from __future__ import annotations

import math
import mmap
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

_Scalar = TypeVar("_Scalar", bound=np.generic)

# From here on in 2 MiB pages: far reads find them faster, but an array's last one is half empty on average.
_HUGE_FROM_BYTES = 16 << 20


def reserved(shape: tuple[int, ...], dtype: type[_Scalar], *, huge_pages: bool = True) -> NDArray[_Scalar]:
    """An array of zeros that takes memory page by page when it is written to, and gives it back when it goes.

    Args:
        shape: As of `numpy.zeros`.
        dtype: As of `numpy.zeros`.
        huge_pages: Let the system take it in pages of 2 MiB, each of which takes 0.1 ms to some milliseconds.

    Raises:
        OSError: There is no address space for it.
    """
    count = math.prod(shape)
    size_bytes = count * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, max(1, size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge_pages and size_bytes > _HUGE_FROM_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE, _HUGE_FROM_BYTES)
    return np.frombuffer(memory, dtype, count).reshape(shape)
