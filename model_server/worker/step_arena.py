"""Numbers of one step on their way to the device: one pinned buffer, one copy that nobody waits for."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes


class StepArena:
    """Buffer of a step's numbers on the host, with its copy on the device.

    Equal sequences of `put` give equal addresses on the device, so that a captured graph can be replayed with
    other numbers. The next step may be written once the results of this one have arrived.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._host, self._bytes = host, host.numpy()
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._used = 0

    def begin(self) -> None:
        """Start a new step."""
        self._used = 0

    def put(self, numbers: npt.NDArray[Any]) -> Tensor:
        """Take numbers, and return their tensor on the device, which `upload` fills."""
        start, stop = self._used, self._used + numbers.nbytes
        assert stop <= len(self._bytes), "a step has more numbers than its limits allow"
        self._bytes[start:stop] = np.ascontiguousarray(numbers).view(np.uint8).ravel()
        self._used = -(-stop // _ALIGNMENT) * _ALIGNMENT
        kind = torch.from_numpy(np.empty(0, numbers.dtype)).dtype
        return self._device[start:stop].view(kind).view(numbers.shape)

    def upload(self) -> None:
        """Queue the copy of all numbers since `begin`."""
        self._device[: self._used].copy_(self._host[: self._used], non_blocking=True)


def arena_bytes(*, tokens: int, sequences: int, groups: int, blocks: int) -> int:
    """Return the bytes of a step's numbers, at most.

    Args:
        tokens: Tokens of a step.
        sequences: Sequences of a step.
        groups: KV cache groups.
        blocks: Blocks of one block table.
    """
    # Token ids, positions, rows of adapters and of logits, starts, contexts, starts of tables, and tables.
    numbers = 4 * tokens + (6 + groups + groups * blocks) * (sequences + 1)
    return 4 * numbers + 64 * _ALIGNMENT + _ALIGNMENT * 2 * sequences
