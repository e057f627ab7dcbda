"""Attention of single tokens on a CPU by a compiled kernel, which reads the blocks where they lie.

In: queries, a pool, and where each sequence's blocks are. Out: attention outputs. It knows neither prefills
nor weights. Sums and softmax weights are float32. The kernel runs on torch's own threads: threads of its own
would compete with them for the cores.
"""

import ctypes
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model_server.attention.kv_pool import KvLayout, KvPool, Span, View, reads_of
from model_server.shapes import AttentionShape

TILE_TOKENS = 64  # whose weights are computed at once
# Room for a query head's scores of a tile, which are written four at a time.
SCORES = TILE_TOKENS + 16

# Types that numba sees instead: it has no 16-bit floats.
SEEN_AS = {torch.bfloat16: np.uint16, torch.float16: np.int16, torch.float32: np.float32}
# A thread's stack is 8 MiB by default; an operator may have chosen less.
_STACK_BYTES = 1 << 19
# Sequences a thread from which on one is a part of the work small enough to share the work out evenly.
_SEQUENCES_PER_THREAD = 4
_LANES, _PART = 16, 32


class Job(ctypes.Structure):
    """One layer's attention; several threads may work on it."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                "ticket",  # parts that somebody has begun; 0 at first
                "keys",  # address of the layer's keys, [blocks, kv_heads, block_tokens, head_dim]
                "values",  # address of its values, likewise
                "queries",  # address of [tokens, query_rows, head_dim]; the first rows are the query heads
                "output",  # address of [tokens, kv_heads * group, head_dim]
                "tables",  # address of int32 [sequences, width]: blocks; the longest should come last
                "rows",  # address of int64 [sequences]: each sequence's token
                "begins",  # address of int64 [sequences]: first position read, counted from the first block
                "stops",  # address of int64 [sequences]: the position after the last
                "sequences",
                "width",  # of the block tables
                "kv_heads",
                "heads_at_once",  # KV heads that are one part of the work, 1 or all: these are read in one go
                "group",  # query heads of a KV head
                "head_dim",  # a multiple of 32
                "block_tokens",
                "query_rows",  # of a token
            )
        ),
        ("scale", ctypes.c_float),  # of the exponents of 2 that scores are
    )


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """Sequences with one token each."""

    job: Job  # what the kernel is told; the same for all layers but for the addresses of their numbers
    arrays: tuple[np.ndarray, ...]  # what the job points to, to keep it


class PagedDecodes:
    """Attends single tokens to the keys and values of a pool; a ValueError for what `paged_fault` tells."""

    def __init__(self, shape: AttentionShape, layout: KvLayout, dtype: torch.dtype, pool: KvPool) -> None:
        if (fault := paged_fault(shape, dtype, torch.device("cpu"))) is not None:
            raise ValueError(fault)
        # Not before it is needed: numba's import takes a second.
        from model_server.attention.cpu_kernel.kernel import decode_kernel

        self._kernel = decode_kernel(SEEN_AS[dtype])
        self._shape = shape
        self._block_tokens = layout.block_tokens
        self._pool = pool
        self._whole_fits = _scratch_bytes(shape.heads, shape.head_dim) <= _STACK_BYTES

    def plan(self, view: View, spans: Sequence[Span], rows: Sequence[int]) -> PagedPlan:
        """Lay out one step of spans of one token each, at these rows of the flat batch."""
        table, begins, stops = reads_of(view, spans, self._block_tokens)
        arrays: tuple[np.ndarray, ...] = table.astype(np.int32), np.array(rows, np.int64), begins, stops
        names = "tables", "rows", "begins", "stops"
        shape, many = self._shape, _SEQUENCES_PER_THREAD * torch.get_num_threads()
        job = Job(
            **{name: array.ctypes.data for name, array in zip(names, arrays, strict=True)},
            sequences=len(spans),
            width=table.shape[1],
            kv_heads=shape.kv_heads,
            heads_at_once=shape.kv_heads if len(spans) >= many and self._whole_fits else 1,
            group=shape.heads // shape.kv_heads,
            head_dim=shape.head_dim,
            block_tokens=self._block_tokens,
            scale=shape.scale / math.log(2.0),
        )
        return PagedPlan(job, arrays)

    def attend(self, query: Tensor, plane: int, plan: PagedPlan, output: Tensor) -> None:
        """Attend, and write the outputs of the plan's rows.

        Args:
            query: [tokens, heads, head_dim]; what lies between two tokens' heads is a whole number of heads.
            output: [tokens, heads, head_dim], contiguous.
        """
        if query.stride()[1:] != (self._shape.head_dim, 1) or query.stride(0) % self._shape.head_dim:
            query = query.contiguous()
        keys, values = self._pool.plane(plane)
        job = plan.job
        job.ticket = 0
        job.keys, job.values = keys.data_ptr(), values.data_ptr()
        job.queries, job.output = query.data_ptr(), output.data_ptr()
        job.query_rows = query.stride(0) // self._shape.head_dim
        # As many threads as torch takes itself: for another number OpenMP would end threads and start others.
        _parallel()(self._kernel.address, ctypes.addressof(job), torch.get_num_threads(), 0)


def paged_fault(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the kernel cannot serve a model here, or None if it can."""
    if device.type != "cpu":
        return f"it runs on the CPU alone, not on {device.type}"
    if dtype not in SEEN_AS:
        return f"it reads 16-bit floats and float32, not {dtype}"
    if shape.head_dim % _PART:
        return f"it takes heads of a multiple of {_PART} elements, not of {shape.head_dim}"
    if find_spec("numba") is None:
        return "numba is not installed, which compiles it"
    import numba

    config: Any = numba.config  # numba defines its settings at import, which mypy cannot see
    if config.DISABLE_JIT:
        return "NUMBA_DISABLE_JIT forbids to compile it"
    if dtype == torch.float16 and not _converts_float16():
        return "this processor does not convert float16"
    if _parallel() is None:
        return "torch's threads cannot be had: it was built without OpenMP, or with one that is not GNU's"
    if _scratch_bytes(shape.heads // shape.kv_heads, shape.head_dim) > _STACK_BYTES:
        return f"{shape.heads // shape.kv_heads} query heads to a KV head are more than its stack holds"
    return None


def _converts_float16() -> bool:
    """Tell whether the processor that kernels are compiled for has instructions for it."""
    import numba
    from numba.core.codegen import get_host_cpu_features

    config: Any = numba.config
    features = config.CPU_FEATURES
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return not is_x86 or "+f16c" in (get_host_cpu_features() if features is None else features)


def _scratch_bytes(query_heads: int, head_dim: int) -> int:
    """Return how much of a thread's stack the kernel takes for `heads_at_once * group` query heads."""
    return 4 * query_heads * (2 * head_dim + SCORES + 2 * _LANES + 1)


@cache
def _parallel() -> Any:
    """Return what a compiler makes of `#pragma omp parallel`, from the library that torch is linked with.

    It calls a C function of one pointer in each of torch's threads, without the GIL. Between two operations
    these wait in a loop: they are there at once. None where torch's OpenMP is not GNU's, nor has its name.
    """
    try:
        parallel = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (AttributeError, OSError):
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel
