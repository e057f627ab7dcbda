"""Communication among the tensor parallel ranks of one model, by torch.distributed."""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, distributed

from model_server.shapes.shape import ModelRank

# All ranks load the model before they connect, so none waits long. No step takes longer either.
_TIMEOUT = timedelta(minutes=5)
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class Ranks:
    """Process group of all ranks, as seen by one rank."""

    def __init__(self, model_rank: ModelRank | None = None) -> None:
        self.model_rank = ModelRank() if model_rank is None else model_rank  # this process's rank

    def join(self, rendezvous: Path, device: torch.device) -> None:
        """Connect to the other ranks, which call this method too; raises a RuntimeError on failure.

        Args:
            rendezvous: File in a private directory, created by the first rank.
        """
        on_cuda = device.type == "cuda"
        # All ranks are on this machine. Without this, gloo would listen on an address that others can reach.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
        distributed.init_process_group(
            "nccl" if on_cuda else "gloo",
            store=distributed.FileStore(str(rendezvous), self.model_rank.size),  # type: ignore[attr-defined]
            rank=self.model_rank.rank,
            world_size=self.model_rank.size,
            timeout=_TIMEOUT,
            device_id=device if on_cuda else None,
        )

    def leave(self) -> None:
        """Disconnect from the other ranks. Idempotent."""
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def abort(self) -> None:
        """Make pending communication fail. Callable from any thread."""
        if distributed.is_initialized() and distributed.group.WORLD is not None:
            distributed.group.WORLD.abort()

    def sum(self, partial: Tensor) -> Tensor:
        """Sum a tensor over all ranks in place, and return it."""
        if self.model_rank.size > 1 and partial.numel():
            distributed.all_reduce(partial)
        return partial

    def gather_columns(self, columns: Tensor) -> Tensor:
        """Concatenate the columns of all ranks on rank 0; other ranks get their own columns back."""
        model_rank = self.model_rank
        if model_rank.size == 1:
            return columns
        if not len(columns):
            return columns.new_empty((0, model_rank.size * columns.shape[1]))
        if model_rank.rank:
            distributed.gather(columns, dst=0)
            return columns
        parts = [torch.empty_like(columns) for _ in range(model_rank.size)]
        distributed.gather(columns, parts, dst=0)
        return torch.cat(parts, dim=1)
