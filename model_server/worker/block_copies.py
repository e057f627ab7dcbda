"""Copies of KV blocks between the device's pool and host memory: synchronous on a CPU, on streams with CUDA.

The caller keeps blocks and slots allocated until a copy is done.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from model_server.kv_cache.host_tier import BlockCopies, Transfer


class CompletedTransfer:
    """Transfer that was complete when its call returned."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Return at once."""


class CpuCopies:
    """Synchronous copies between two CPU arrays. The planes of a block are contiguous in host memory."""

    def __init__(self, tensors: Sequence[Tensor], host_blocks: int) -> None:
        self._device = [_bytes_by_block(tensor).numpy() for tensor in tensors]
        self._host = [np.zeros((host_blocks, *blocks.shape[1:]), np.uint8) for blocks in self._device]
        self.block_bytes = bytes_of_block(tensors)

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Transfer:
        return _copy(self._device, self._host, list(_runs(blocks, slots)))

    def restore(self, slots: Sequence[int], blocks: Sequence[int]) -> Transfer:
        return _copy(self._host, self._device, list(_runs(slots, blocks)))

    def fence(self) -> None:
        """Do nothing: copies are synchronous."""

    def close(self) -> None:
        """Do nothing: no memory outlives this object."""


class CudaCopies:
    """Asynchronous copies on side streams, through pinned host memory and a staging buffer on the device.

    A store first gathers its blocks into the staging buffer. The next step may overwrite the blocks, so it
    waits for the gathering, but not for the copy to the host. All stores share one stream and all restores
    another, so that each kind keeps its order.
    """

    def __init__(self, tensors: Sequence[Tensor], host_blocks: int) -> None:
        self._device = [_bytes_by_block(tensor).view(torch.int32) for tensor in tensors]
        self._widths = [blocks[0].numel() for blocks in self._device]
        self._torch_device = tensors[0].device
        self._host = torch.empty((host_blocks, sum(self._widths)), dtype=torch.int32, pin_memory=True)
        self.block_bytes = bytes_of_block(tensors)
        self._stores = torch.cuda.Stream(self._torch_device)
        self._restores = torch.cuda.Stream(self._torch_device)

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Transfer:
        compute = torch.cuda.current_stream(self._torch_device)
        self._stores.wait_stream(compute)
        with torch.cuda.stream(self._stores):
            rows = torch.tensor(blocks, device=self._torch_device)
            staged = torch.cat([tensor.index_select(0, rows).flatten(1) for tensor in self._device], dim=1)
            gathered = self._stores.record_event()
            for first, slot, length in _runs(range(len(slots)), slots):
                self._host[slot : slot + length].copy_(staged[first : first + length], non_blocking=True)
            done = self._stores.record_event()
        compute.wait_event(gathered)
        return _CudaTransfer(done, staged)

    def restore(self, slots: Sequence[int], blocks: Sequence[int]) -> Transfer:
        self._restores.wait_stream(torch.cuda.current_stream(self._torch_device))
        with torch.cuda.stream(self._restores):
            rows = torch.tensor(blocks, device=self._torch_device)
            staged = torch.empty(
                (len(slots), sum(self._widths)), dtype=torch.int32, device=self._torch_device
            )
            for slot, first, length in _runs(slots, range(len(slots))):
                staged[first : first + length].copy_(self._host[slot : slot + length], non_blocking=True)
            for tensor, part in zip(self._device, staged.split(self._widths, dim=1), strict=True):
                tensor.index_copy_(0, rows, part.view(len(slots), *tensor.shape[1:]))
            done = self._restores.record_event()
        return _CudaTransfer(done, staged)

    def fence(self) -> None:
        torch.cuda.current_stream(self._torch_device).wait_stream(self._restores)


class _CudaTransfer:
    def __init__(self, event: torch.cuda.Event, staged: Tensor) -> None:
        self._event = event
        self._staged: Tensor | None = staged  # kept alive until the copy is done

    def done(self) -> bool:
        if self._event.query():
            self._staged = None
        return self._staged is None

    def wait(self) -> None:
        self._event.synchronize()


def new_copies(tensors: Sequence[Tensor], host_blocks: int) -> BlockCopies:
    """Return the `BlockCopies` of a pool's tensors, [planes, num_blocks, ...], with new host slots."""
    if tensors[0].device.type == "cuda":
        return CudaCopies(tensors, host_blocks)
    return CpuCopies(tensors, host_blocks)


def bytes_of_block(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of one block in a pool of tensors [planes, num_blocks, ...]."""
    return sum(tensor.nbytes // tensor.shape[1] for tensor in tensors)


def _bytes_by_block(tensor: Tensor) -> Tensor:
    """Return a uint8 view [num_blocks, planes, bytes] of a tensor [planes, num_blocks, ...]."""
    return tensor.view(torch.uint8).flatten(2).transpose(0, 1)


def _copy(
    sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], runs: Sequence[tuple[int, int, int]]
) -> Transfer:
    for source, target in zip(sources, targets, strict=True):
        for from_row, to_row, length in runs:
            target[to_row : to_row + length] = source[from_row : from_row + length]
    return CompletedTransfer()


def _runs(sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (source, target, length) of runs that are contiguous on both sides."""
    start = 0
    for end in range(1, len(sources) + 1):
        length = end - start
        if (
            end < len(sources)
            and sources[end] == sources[start] + length
            and targets[end] == targets[start] + length
        ):
            continue
        yield sources[start], targets[start], length
        start = end
