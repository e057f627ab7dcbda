"""Attention of single tokens on a CPU by a compiled kernel, which reads the blocks where they lie.

In: queries, a pool, and where each sequence's blocks are. Out: attention outputs. It knows neither prefills
nor weights. Sums and softmax weights are float32.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from model_server.attention.batch import KvLayout, Span, View, reads_of
from model_server.attention.kv_pool import KvPool
from model_server.attention.paged_job import Job, scratch_bytes
from model_server.attention.team import has_team, run_together
from model_server.shapes import AttentionShape

# What numba sees instead: it has no bfloat16.
SEEN_AS = {torch.bfloat16: np.uint16, torch.float32: np.float32}
# A thread's stack is 8 MiB by default; an operator may have chosen less.
_STACK_BYTES = 1 << 19
# Sequences a thread from which on one is a part of the work small enough to share the work out evenly.
_SEQUENCES_PER_THREAD = 4


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """Sequences with one token each.

    Attributes:
        job: What the kernel is told; the same for all layers but for the addresses of their numbers.
        arrays: What the job points to, to keep it.
    """

    job: Job
    arrays: tuple[np.ndarray, ...]


class PagedDecodes:
    """Attends single tokens to the keys and values of a pool.

    Raises:
        ValueError: The kernel cannot serve the model here; see `paged_fault`.
    """

    def __init__(self, shape: AttentionShape, layout: KvLayout, dtype: torch.dtype, pool: KvPool) -> None:
        if (fault := paged_fault(shape, dtype, torch.device("cpu"))) is not None:
            raise ValueError(fault)
        # Not before it is needed: numba's import takes a second.
        from model_server.attention.paged_kernel import decode_kernel

        self._kernel = decode_kernel(SEEN_AS[dtype])
        self._shape = shape
        self._block_tokens = layout.block_tokens
        self._pool = pool
        self._whole_fits = scratch_bytes(shape.heads, shape.head_dim) <= _STACK_BYTES

    def plan(self, view: View, spans: Sequence[Span], rows: Sequence[int]) -> PagedPlan:
        """Lay out one step.

        Args:
            view: Of the layers.
            spans: Of one token each.
            rows: Where each is in the flat batch.
        """
        table, begins, stops = reads_of(view, spans, self._block_tokens)
        arrays = table.astype(np.int32), np.array(rows, np.int64), begins, stops
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
            plane: Of the layer.
            plan: Of the step.
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
        run_together(self._kernel.address, ctypes.addressof(job))


def paged_fault(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the kernel cannot serve a model here, or None if it can.

    Args:
        shape: Of the model.
        dtype: Of queries, keys and values.
        device: Where they are.
    """
    if device.type != "cpu":
        return f"it runs on the CPU alone, not on {device.type}"
    if dtype not in SEEN_AS:
        return f"it reads bfloat16 and float32, not {dtype}"
    if shape.head_dim % 2:
        return f"it takes heads of an even number of elements, not of {shape.head_dim}"
    if find_spec("numba") is None:
        return "numba is not installed, which compiles it"
    import numba

    if numba.config.DISABLE_JIT:
        return "NUMBA_DISABLE_JIT forbids to compile it"
    if not has_team():
        return "torch's threads cannot be had: it was built without OpenMP, or with one that is not GNU's"
    if scratch_bytes(shape.heads // shape.kv_heads, shape.head_dim) > _STACK_BYTES:
        return f"{shape.heads // shape.kv_heads} query heads to a KV head are more than its stack holds"
    return None
