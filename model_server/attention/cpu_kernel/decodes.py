"""Attention of single tokens on a CPU by a compiled kernel, which reads blocks in place.

Sums and softmax weights are float32. The kernel runs on torch's OpenMP threads, because further threads would
compete with them for the cores.
"""

import ctypes
import math
import platform
from collections.abc import Sequence
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from numba.core.codegen import get_host_cpu_features
from torch import Tensor

from model_server.attention.cpu_kernel.kernel import SCORES, Job, decode_kernel
from model_server.attention.cpu_kernel.simd import LANES, PART
from model_server.attention.kv_pool import KvLayout, KvPool, Span, View, reads_of
from model_server.shapes.shape import AttentionShape

# numpy types by which numba accesses the pool; numba has no 16-bit floats.
NUMPY_TYPES = {torch.bfloat16: np.uint16, torch.float16: np.int16, torch.float32: np.float32}
# Stack limit of the kernel. A thread's stack is 8 MiB by default, and may be configured smaller.
_STACK_BYTES = 1 << 19
# With this many sequences per thread, one sequence is a work item small enough for an even distribution.
_SEQUENCES_PER_THREAD = 4
_NUMBA: Any = numba.config  # defined at import, which mypy cannot see


class PagedDecodes:
    """Attention of single tokens over a pool; raises a ValueError if `paged_fault` reports a fault."""

    def __init__(self, shape: AttentionShape, layout: KvLayout, dtype: torch.dtype, pool: KvPool) -> None:
        if (fault := paged_fault(shape, dtype, torch.device("cpu"))) is not None:
            raise ValueError(fault)
        self._kernel = decode_kernel(NUMPY_TYPES[dtype])
        self._shape = shape
        self._block_tokens = layout.block_tokens
        self._pool = pool
        self._whole_fits = _scratch_bytes(shape.heads, shape.head_dim) <= _STACK_BYTES

    def plan(self, view: View, spans: Sequence[Span], rows: Sequence[int]) -> Job:
        """Return the kernel's arguments for spans of one token each, at `rows` of the batch."""
        table, begins, stops = reads_of(view, spans, self._block_tokens)
        tables: np.ndarray = table.astype(np.int32)
        arrays = {"tables": tables, "rows": np.array(rows, np.int64), "begins": begins, "stops": stops}
        shape, many = self._shape, _SEQUENCES_PER_THREAD * torch.get_num_threads()
        job = Job(
            **{name: array.ctypes.data for name, array in arrays.items()},
            sequences=len(spans),
            width=table.shape[1],
            kv_heads=shape.kv_heads,
            heads_at_once=shape.kv_heads if len(spans) >= many and self._whole_fits else 1,
            group=shape.heads // shape.kv_heads,
            head_dim=shape.head_dim,
            block_tokens=self._block_tokens,
            scale=shape.scale / math.log(2.0),
        )
        job.arrays = arrays
        return job

    def attend(self, query: Tensor, plane: int, job: Job, output: Tensor) -> None:
        """Compute attention of one plane, and write the output rows of the step's job.

        Args:
            query: [tokens, heads, head_dim].
            plane: Plane of the layer.
            job: Result of `plan`; only addresses change from layer to layer.
            output: [tokens, heads, head_dim], contiguous.
        """
        if query.stride()[1:] != (self._shape.head_dim, 1) or query.stride(0) % self._shape.head_dim:
            query = query.contiguous()
        keys, values = self._pool.plane(plane)
        job.ticket = 0
        job.keys, job.values = keys.data_ptr(), values.data_ptr()
        job.queries, job.output = query.data_ptr(), output.data_ptr()
        job.query_rows = query.stride(0) // self._shape.head_dim
        # The number of threads that torch uses: another number makes OpenMP stop and start threads.
        _parallel()(self._kernel.address, ctypes.addressof(job), torch.get_num_threads(), 0)


def paged_fault(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the kernel cannot be used for a model, or None if it can."""
    if device.type != "cpu":
        return f"it needs a CPU, not {device.type}"
    if dtype not in NUMPY_TYPES:
        return f"it supports float32, bfloat16 and float16, not {dtype}"
    if shape.head_dim % PART:
        return f"it needs a head size that is a multiple of {PART}, not {shape.head_dim}"
    if _NUMBA.DISABLE_JIT:
        return "NUMBA_DISABLE_JIT is set"
    if dtype == torch.float16 and not _converts_float16():
        return "this CPU has no float16 conversion (F16C)"
    if _parallel() is None:
        return "torch was not built with GNU OpenMP"
    if _scratch_bytes(shape.heads // shape.kv_heads, shape.head_dim) > _STACK_BYTES:
        return f"{shape.heads // shape.kv_heads} query heads per KV head exceed its stack"
    return None


def _converts_float16() -> bool:
    """Return whether the CPU that kernels are compiled for can convert float16."""
    features = _NUMBA.CPU_FEATURES
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return not is_x86 or "+f16c" in (get_host_cpu_features() if features is None else features)


def _scratch_bytes(query_heads: int, head_dim: int) -> int:
    """Return the kernel's stack size in bytes for `query_heads` (`heads_at_once * group`) heads."""
    return 4 * query_heads * (2 * head_dim + SCORES + 2 * LANES + 1)


@cache
def _parallel() -> Any:
    """Return `GOMP_parallel` of torch's OpenMP library, the call behind `#pragma omp parallel`.

    It calls a C function in each of torch's threads, without the GIL. Idle threads spin, so they start at
    once. Returns None if torch does not use GNU OpenMP.
    """
    try:
        parallel = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (AttributeError, OSError):
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel
