"""Whether the kernel for single tokens compiles, and computes what torch does, on this processor.

In: the type of its numbers. Out: what is wrong, or nothing. It is tried in a process of its own: LLVM ends
the process when it cannot compile, and so does the system when an instruction is missing.
"""

import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from model_server.attention.batch import KvLayout, Span
from model_server.attention.paged_decodes import SEEN_AS
from model_server.attention.sdpa import SdpaAttention
from model_server.shapes import AttentionShape, undivided

_LONGEST_S = 600.0
# Heads of a whole part and the end of one, tokens that are no whole number of fours: all of the kernel runs.
_SHAPE = AttentionShape(heads=6, kv_heads=2, head_dim=34, scale=34**-0.5, windows=(None,))
_BLOCK_TOKENS = 5
_TABLES = [4, 1], [2, 0, 3]
_CONTEXTS = 7, 13
_ROUNDING = {torch.bfloat16: 2.0**-4, torch.float32: 1e-4}


@cache
def trial_fault(dtype: torch.dtype) -> str | None:
    """Return why the kernel does not work here, or None if it does; once it did, it is not tried again.

    Args:
        dtype: Of queries, keys and values; one of those that `paged_fault` lets pass.
    """
    marker = _marker(dtype)
    if marker is None or not marker.exists():
        if (fault := _tried_apart(dtype)) is not None:
            return fault
        if marker is not None:
            with suppress(OSError):
                marker.touch()
    from model_server.attention.paged_kernel import decode_kernel

    try:
        decode_kernel(SEEN_AS[dtype])
    except Exception as error:  # of numba, of LLVM, or of what lies in the cache
        return f"it does not compile: {_first_line(error)}"
    return None


def attempt(dtype_name: str) -> None:
    """Compile the kernel and use it; what is wrong ends the process.

    Args:
        dtype_name: As torch calls the type.
    """
    dtype = getattr(torch, dtype_name)
    try:
        paged, gathered = (_attended(dtype, paged) for paged in (True, False))
    except Exception as error:
        sys.exit(_first_line(error))
    if not torch.allclose(paged, gathered, rtol=_ROUNDING[dtype], atol=_ROUNDING[dtype]):
        sys.exit("its numbers are not those that torch computes")


def _marker(dtype: torch.dtype) -> Path | None:
    """Return the file that says that the kernel works, beside the kernel; None if nothing can be kept."""
    import llvmlite
    import numba
    from llvmlite.binding import get_host_cpu_name
    from numba.core.codegen import get_host_cpu_features

    from compiled.kernel_cache import cache_directory

    directory = cache_directory(numba.config.CACHE_DIR)
    if directory is None:
        return None
    # Machines may share a directory.
    machine = (
        *(numba.__version__, llvmlite.__version__, torch.__version__),
        *(numba.config.CPU_NAME, numba.config.CPU_FEATURES),
        *(get_host_cpu_name(), get_host_cpu_features()),
    )
    return Path(directory) / f"works-{dtype}-{xxh3_64_hexdigest(repr(machine).encode())}"


def _tried_apart(dtype: torch.dtype) -> str | None:
    name = str(dtype).removeprefix("torch.")
    program = f"from model_server.attention.paged_trial import attempt; attempt({name!r})"
    try:
        tried = subprocess.run(
            [sys.executable, "-c", program], stdin=subprocess.DEVNULL, capture_output=True, timeout=_LONGEST_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it cannot be tried: {_first_line(error)}"
    if tried.returncode == 0:
        return None
    code = tried.returncode
    how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
    said = tried.stderr.decode(errors="replace").strip().splitlines()
    return f"trying it ended with {how}: {said[-1] if said else 'no message'}"


def _attended(dtype: torch.dtype, paged: bool) -> Tensor:
    """Attend the last tokens of two sequences of random numbers."""
    generator = torch.Generator().manual_seed(0)
    layout = KvLayout(undivided(1), sum(map(len, _TABLES)), _BLOCK_TOKENS)
    attention = SdpaAttention(_SHAPE, layout, dtype, torch.device("cpu"), paged=paged)
    for context, table in zip(_CONTEXTS, _TABLES, strict=True):
        text = torch.randn((2, context, _SHAPE.kv_heads, _SHAPE.head_dim), generator=generator).to(dtype)
        attention.store(0, *text, attention.prepare([Span(0, context, [table])]))
    last = [Span(context - 1, 1, [table]) for context, table in zip(_CONTEXTS, _TABLES, strict=True)]
    queries = torch.randn((len(last), _SHAPE.heads, _SHAPE.head_dim), generator=generator).to(dtype)
    return attention.attend(queries, 0, attention.prepare(last))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
