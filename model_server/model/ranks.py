"""Sums and joins over the processes that compute one model together, through torch.distributed."""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, distributed

from model_server.shapes import Division

# All ranks load before any joins, so the others come at once; and no sane step takes longer.
_TIMEOUT = timedelta(minutes=5)
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class Ranks:
    """All processes of one model, seen from one of them."""

    def __init__(self, division: Division | None = None) -> None:
        self.division = Division() if division is None else division  # which one it is

    def join(self, rendezvous: Path, device: torch.device) -> None:
        """Connect to the other ranks, which call it too, or raise a RuntimeError.

        They meet at a file in a directory of theirs alone, which the first one to come makes.
        """
        on_cuda = device.type == "cuda"
        # All ranks are on this machine: gloo would otherwise listen on an address that others reach.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
        distributed.init_process_group(
            "nccl" if on_cuda else "gloo",
            store=distributed.FileStore(str(rendezvous), self.division.size),  # type: ignore[attr-defined]
            rank=self.division.rank,
            world_size=self.division.size,
            timeout=_TIMEOUT,
            device_id=device if on_cuda else None,
        )

    def leave(self) -> None:
        """Disconnect; nothing can be computed any more."""
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def abort(self) -> None:
        """Let whatever waits for another rank fail; callable from any thread."""
        if distributed.is_initialized() and distributed.group.WORLD is not None:
            distributed.group.WORLD.abort()

    def sum(self, partial: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors, in the memory of this one's."""
        if self.division.size > 1 and partial.numel():
            distributed.all_reduce(partial)
        return partial

    def join_columns(self, columns: Tensor) -> Tensor:
        """Put all ranks' columns, equally many, beside each other; ranks but the first get their own back."""
        division = self.division
        if division.size == 1:
            return columns
        if not len(columns):
            return columns.new_empty((0, division.size * columns.shape[1]))
        if division.rank:
            distributed.gather(columns, dst=0)
            return columns
        parts = [torch.empty_like(columns) for _ in range(division.size)]
        distributed.gather(columns, parts, dst=0)
        return torch.cat(parts, dim=1)
