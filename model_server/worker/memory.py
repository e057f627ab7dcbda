"""Size of the KV pool: what weights, the largest step and other processes leave of a device's memory."""

import os
from contextlib import suppress
from pathlib import Path

import torch

from model_server.errors import ConfigError
from model_server.shapes.deployment import size_text

CGROUP = Path("/sys/fs/cgroup")


def pool_blocks(*, usable_bytes: int, taken_bytes: int, block_bytes: int) -> int:
    """Return how many blocks fit into a device's usable memory; raises a ConfigError if none does.

    Args:
        usable_bytes: The device's memory times its utilization.
        taken_bytes: Bytes of other processes, of the weights and of the largest step.
        block_bytes: Bytes of one block.
    """
    blocks = (usable_bytes - taken_bytes) // block_bytes
    if blocks < 1:
        raise ConfigError(
            f"gpu_memory_utilization leaves {size_text(usable_bytes)}, but weights, the largest step and "
            f"other processes take {size_text(taken_bytes)}; raise it, or lower max_num_batched_tokens or "
            "max_num_seqs"
        )
    return blocks


def cuda_bytes(device: torch.device) -> tuple[int, int]:
    """Return a GPU's total memory, and the bytes that are taken at the peak since its last reset."""
    free, total = torch.cuda.mem_get_info(device)
    # What torch has reserved but not used is free for the pool; the CUDA context and other processes are not.
    foreign = total - free - torch.cuda.memory_reserved(device)
    return total, foreign + torch.cuda.max_memory_allocated(device)


def free_host_bytes() -> int:
    """Return the free memory of this machine, within the limit of its control group."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no Linux, no control group, or one without a limit ("max")
        limit = int((CGROUP / "memory.max").read_text())
        free = min(free, limit - int((CGROUP / "memory.current").read_text()))
    return max(0, free)
