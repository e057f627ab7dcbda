"""Attention on a GPU by kernels of our own in Triton, which read and write blocks in place.

The single tokens of a step are one launch per layer, the longer spans another. Nothing is uploaded between
`prepare` and the result, and launches do not depend on contexts, so that a step can be captured as a CUDA
graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model_server.attention.gpu_kernel.attend import Plane, Sequences, run_decodes, run_prefills
from model_server.attention.gpu_kernel.rotate_store import run_rotate_and_store
from model_server.attention.heads import HeadNorms, Rotation
from model_server.attention.kv_pool import (
    Fp8KvPool,
    KvLayout,
    KvPool,
    Span,
    StepMeta,
    Upload,
    positions_of,
    to_device,
)
from model_server.shapes.shape import AttentionShape


@dataclass(frozen=True, slots=True)
class TritonMeta(StepMeta):
    """Layout of one step, by KV cache group."""

    all: Sequence[Sequences]
    decodes: Sequence[Sequences]  # the single tokens, which come first
    prefills: Sequence[Sequences]


class TritonAttention:
    """Attention by Triton kernels; see `Attention`."""

    is_capturable = True

    def __init__(
        self,
        shape: AttentionShape,
        layout: KvLayout,
        dtype: torch.dtype,
        device: torch.device,
        *,
        fp8: bool = False,
    ) -> None:
        self._pool = (Fp8KvPool if fp8 else KvPool)(shape, layout, dtype, device)
        self._shape = shape
        self._num_groups = len(layout.groups)
        self._device = device
        self._places = layout.places()
        pool = self._pool
        self._planes = [
            Plane(*pool.plane(plane), pool.scales(plane) if isinstance(pool, Fp8KvPool) else None)
            for plane in range(layout.num_planes)
        ]

    def prepare(self, spans: Sequence[Span], upload: Upload | None = None) -> TritonMeta:
        upload = upload or self._upload
        lengths = np.fromiter((span.length for span in spans), np.int32, len(spans))
        contexts = np.fromiter((span.stop for span in spans), np.int32, len(spans))
        singles = int(np.count_nonzero(lengths == 1))
        assert (lengths[:singles] == 1).all(), "single tokens come first"
        tables = [span.block_tables[group] for group in range(self._num_groups) for span in spans]
        sizes = np.fromiter(map(len, tables), np.int32, len(tables))
        positions = upload(positions_of(spans).astype(np.int32))
        starts = upload(np.concatenate(([0], lengths.cumsum())).astype(np.int32))
        context = upload(contexts)
        table_starts = upload((sizes.cumsum() - sizes).astype(np.int32)).view(-1, len(spans))
        # Last, because their length changes from step to step: a captured graph has the addresses before.
        table = upload(np.concatenate([np.asarray(table, np.int32) for table in tables]))
        longest = int(lengths.max())

        def part(first: int, stop: int, max_query: int) -> list[Sequences]:
            shared = starts[first : stop + 1], context[first:stop], table
            return [Sequences(*shared, of_group[first:stop], max_query) for of_group in table_starts]

        return TritonMeta(
            positions=positions,
            all=part(0, len(spans), longest),
            decodes=part(0, singles, 1),
            prefills=part(singles, len(spans), longest),
        )

    def rotate_and_store(
        self, layer: int, projected: Tensor, rotation: Rotation, norms: HeadNorms | None, meta: StepMeta
    ) -> Tensor:
        assert isinstance(meta, TritonMeta)
        group, plane = self._places[layer]
        return run_rotate_and_store(projected, self._planes[plane], meta.all[group], rotation, norms)

    def attend(self, query: Tensor, layer: int, meta: StepMeta) -> Tensor:
        assert isinstance(meta, TritonMeta)
        group, plane = self._places[layer]
        output = torch.empty_like(query)
        of_layer = self._shape.scale, self._shape.windows[layer]
        for run, sequences in ((run_decodes, meta.decodes[group]), (run_prefills, meta.prefills[group])):
            if len(sequences.contexts):
                run(query, output, self._planes[plane], sequences, *of_layer)
        return output.flatten(1)

    def block_tensors(self) -> Sequence[Tensor]:
        return self._pool.block_tensors()

    def _upload(self, numbers: np.ndarray) -> Tensor:
        return to_device(numbers, self._device, torch.int32)
