"""Copies of KV blocks between the device's pool and host memory: synchronous on a CPU, on streams with CUDA.

The caller keeps blocks and slots allocated until a copy is done.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model_server.kv_cache.host_tier import TRANSFER_BYTES, Transfer

STAGING_BYTES = 3 * TRANSFER_BYTES  # of the device: two buffers of stores, one of restores


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
        """Give host memory back to the system. No copy can follow."""
        self._host.clear()


class CudaCopies:
    """Asynchronous copies in chunks, through buffers on the device and pinned host memory.

    A store gathers blocks into one of two buffers on the model's stream, so the next step overwrites nothing
    that is still needed. A side stream copies the buffer to the host. A restore uses a stream and a buffer
    of its own. All memory is allocated here, none per transfer; buffers are reused in the order of events.

    Args:
        tensors: The pool, [planes, num_blocks, ...] each, on one device.
        host_blocks: Host slots.
        chunk_bytes: Bytes of each of the three device buffers; at least one block is copied at a time.
        slab_bytes: Most bytes of one allocation of host memory, a power of two.
        streams: Module with the device's streams and events; None for `torch.get_device_module`.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        host_blocks: int,
        *,
        chunk_bytes: int = TRANSFER_BYTES,
        slab_bytes: int = 2**30,
        streams: Any = None,
    ) -> None:
        device = self._torch_device = tensors[0].device
        self._streams = streams or torch.get_device_module(device)
        self._device = [_bytes_by_block(tensor).view(torch.int32) for tensor in tensors]
        self._widths = [blocks[0].numel() for blocks in self._device]
        self.block_bytes = bytes_of_block(tensors)
        width, pinned = sum(self._widths), device.type == "cuda"
        sizes = _slab_sizes(host_blocks, self.block_bytes, slab_bytes)
        self._slabs = [torch.empty((size, width), dtype=torch.int32, pin_memory=pinned) for size in sizes]
        self._first_slots = list(accumulate(sizes, initial=0))
        self._rows = min(host_blocks, max(1, chunk_bytes // self.block_bytes))
        buffers = torch.empty((3, self._rows, width), dtype=torch.int32, device=device)
        self._restore_buffer = buffers[2]
        # Each buffer of stores with the event after which it may be overwritten; the next one to use first.
        self._store_buffers = deque((buffer, self._streams.Event()) for buffer in buffers[:2])
        # A restore of the whole host tier still finds a free row for each chunk.
        ring = 64 + 2 * (host_blocks // max(1, self._rows))
        self._store_numbers = _BlockNumbers(self._rows, device, self._streams, ring)
        self._restore_numbers = _BlockNumbers(self._rows, device, self._streams, ring)
        self._stores = self._streams.Stream(device)
        self._restores = self._streams.Stream(device)

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Transfer:
        model_stream = self._streams.current_stream(self._torch_device)
        for first in range(0, len(blocks), self._rows):
            chunk, targets = blocks[first : first + self._rows], slots[first : first + self._rows]
            buffer, copied = self._store_buffers[0]
            self._store_buffers.rotate()
            model_stream.wait_event(copied)
            numbers = self._store_numbers.upload(chunk)
            for tensor, part in self._parts(buffer[: len(chunk)]):
                torch.index_select(tensor, 0, numbers, out=part)
            self._stores.wait_stream(model_stream)
            with self._streams.stream(self._stores):
                for row, slot, length in _runs(range(len(targets)), targets):
                    for host in self._host_rows(slot, length):
                        host.copy_(buffer[row : row + len(host)], non_blocking=True)
                        row += len(host)
            copied.record(self._stores)
        return self._transfer(self._stores)

    def restore(self, slots: Sequence[int], blocks: Sequence[int]) -> Transfer:
        self._restores.wait_stream(self._streams.current_stream(self._torch_device))
        with self._streams.stream(self._restores):
            for first in range(0, len(blocks), self._rows):
                sources, chunk = slots[first : first + self._rows], blocks[first : first + self._rows]
                buffer = self._restore_buffer[: len(chunk)]
                for slot, row, length in _runs(sources, range(len(sources))):
                    for host in self._host_rows(slot, length):
                        buffer[row : row + len(host)].copy_(host, non_blocking=True)
                        row += len(host)
                numbers = self._restore_numbers.upload(chunk)
                for tensor, part in self._parts(buffer):
                    tensor.index_copy_(0, numbers, part)
        return self._transfer(self._restores)

    def fence(self) -> None:
        self._streams.current_stream(self._torch_device).wait_stream(self._restores)

    def close(self) -> None:
        """Wait for running copies, then give host memory back to the system. No copy can follow."""
        self._streams.synchronize(self._torch_device)
        self._slabs.clear()
        # torch keeps freed pinned memory for its next allocation.
        if self._torch_device.type == "cuda" and hasattr(torch._C, "_host_emptyCache"):
            torch._C._host_emptyCache()

    def _parts(self, buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each tensor of the pool with its part of a buffer's rows, [rows, planes, int32 words]."""
        for tensor, part in zip(self._device, buffer.split(self._widths, dim=1), strict=True):
            yield tensor, part.view(len(buffer), *tensor.shape[1:])

    def _host_rows(self, slot: int, length: int) -> Iterator[Tensor]:
        """Yield views of consecutive host slots, one per slab."""
        end = slot + length
        while slot < end:
            slab = bisect_right(self._first_slots, slot) - 1
            first = self._first_slots[slab]
            rows = self._slabs[slab][slot - first : end - first]
            yield rows
            slot += len(rows)

    def _transfer(self, stream: Any) -> Transfer:
        done = self._streams.Event()
        done.record(stream)
        return _CudaTransfer(done)


class _CudaTransfer:
    def __init__(self, event: Any) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class _BlockNumbers:
    """Uploads of block numbers from a ring of pinned rows, all on the same stream.

    The caller waits only if the uploads of `ring` chunks have not started yet.
    """

    def __init__(self, rows: int, device: torch.device, streams: Any, ring: int) -> None:
        self._pinned = torch.empty((ring, rows), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = torch.empty(rows, dtype=torch.int64, device=device)
        # Each pinned row with the event after which it may be overwritten; the next one to use first.
        self._ring = deque((row, streams.Event()) for row in self._pinned)

    def upload(self, blocks: Sequence[int]) -> Tensor:
        """Upload on the current stream. The result, int64 [blocks], is valid until the next upload."""
        pinned, uploaded = self._ring[0]
        self._ring.rotate(-1)
        uploaded.synchronize()
        pinned[: len(blocks)] = torch.tensor(blocks)
        numbers = self._device[: len(blocks)]
        numbers.copy_(pinned[: len(blocks)], non_blocking=True)
        uploaded.record()
        return numbers


def new_copies(tensors: Sequence[Tensor], host_blocks: int) -> CpuCopies | CudaCopies:
    """Return the `BlockCopies` of a pool's tensors, [planes, num_blocks, ...], with new host slots."""
    if tensors[0].device.type == "cuda":
        return CudaCopies(tensors, host_blocks)
    return CpuCopies(tensors, host_blocks)


def _slab_sizes(rows: int, row_bytes: int, slab_bytes: int) -> list[int]:
    """Divide rows among slabs of at most `slab_bytes`, a power of two, or one row.

    torch pins powers of two bytes. So the last rows are divided into powers of two, too: less than one row
    per slab is pinned in excess.
    """
    sizes = []
    while rows:
        most_bytes = min(slab_bytes, 1 << ((rows * row_bytes).bit_length() - 1))
        sizes.append(max(1, most_bytes // row_bytes))
        rows -= sizes[-1]
    return sizes


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
