"""How this process keeps its memory: one heap that grows in large steps, and a collector that seldom looks.

Knows no requests. What is said here costs nothing where it is not understood.
"""

from __future__ import annotations

import ctypes
import gc

# malloc.h of glibc.
_TRIM_THRESHOLD, _TOP_PAD, _ARENA_MAX = -1, -2, -8
_STEP_BYTES = 32 << 20
_KEPT_BYTES = 256 << 20
_FREE_BYTES_MAX = 64 << 20
_COLLECT_AFTER = (20_000, 20, 20)


def use_one_heap() -> None:
    """Has all threads share one heap; call it before there are any.

    glibc gives each thread a heap of its own, which grows by single pages with a system call each: about one
    for each request. Threads that hold the GIL in turns gain nothing from that. With another C library
    nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(_ARENA_MAX, 1)
    mallopt(_TOP_PAD, _STEP_BYTES)
    mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


def give_back() -> None:
    """Return free memory to the system where there is more of it than requests need.

    After a flood of connections or events the heap has large holes, which glibc keeps. With another C library
    nothing happens.
    """
    try:
        libc = ctypes.CDLL(None)
        mallinfo2, malloc_trim = libc.mallinfo2, libc.malloc_trim
    except (AttributeError, OSError):
        return
    mallinfo2.restype = _MallInfo2
    if mallinfo2().fordblks > _FREE_BYTES_MAX:
        malloc_trim(ctypes.c_size_t(_STEP_BYTES))


class _MallInfo2(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def calm_collector() -> None:
    """Lets Python's cycle collector look less often, and never at what lives as long as the process."""
    # Requests leave no cycles behind; what is looked for is only what went wrong.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)
