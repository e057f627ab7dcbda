"""torch's own threads, for compiled functions: threads of one's own would compete with them for the cores.

In: the address of a C function and of what it works on. Out: nothing; every thread of the team has returned
from it. Between two operations torch's threads wait in a loop: they are there at once.
"""

import ctypes
from functools import cache
from typing import Any

import torch


def has_team() -> bool:
    """Tell whether torch's threads can be had: its OpenMP is GNU's, or one that answers to its name."""
    return _parallel() is not None


def run_together(function: int, work: int) -> None:
    """Call a function in each of torch's threads, this one among them; the GIL is released.

    Args:
        function: Address of a C function of one pointer; it must do with fewer threads, and with one.
        work: The pointer.
    """
    parallel = _parallel()
    assert parallel is not None
    # As many as torch takes itself: for another number OpenMP would end threads and start them anew.
    parallel(function, work, torch.get_num_threads(), 0)


@cache
def _parallel() -> Any:
    """Find what a compiler makes of `#pragma omp parallel`, in the library that torch is linked with."""
    try:
        parallel = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (AttributeError, OSError):
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel
