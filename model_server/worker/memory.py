"""Size of the KV pool: what weights, the largest step and other processes leave of a device's memory."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from model_server.errors import ConfigError
from model_server.shapes.deployment import size_text

MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
# The sampler's peak per logit, beside the logits: counts, penalties, log probabilities, filters.
SAMPLING_BYTES = 38


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
            f"other processes take {size_text(taken_bytes)}, and one block {size_text(block_bytes)}; raise "
            "it, or lower max_num_batched_tokens or max_num_seqs"
        )
    return blocks


def peak_cuda_bytes(device: torch.device, step: Callable[[], object]) -> tuple[int, int]:
    """Run a step; return the GPU's total memory, and the bytes taken at the step's peak.

    Raises:
        ConfigError: The step does not fit into the memory.
    """
    torch.cuda.reset_peak_memory_stats(device)
    try:
        step()
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the largest step does not fit into the memory of {device} beside the weights: {error}; lower "
            "max_num_batched_tokens or max_num_seqs, or raise tensor_parallel_size"
        ) from error
    free, total = torch.cuda.mem_get_info(device)
    # What torch has reserved but not used is free for the pool; the CUDA context and other processes are not.
    foreign = total - free - torch.cuda.memory_reserved(device)
    return total, foreign + torch.cuda.max_memory_allocated(device)


def free_host_bytes() -> int:
    """Return the memory that is free, or in a cache of files, within the limit of the control group."""
    free = 1024 * _number_of("MemAvailable:", MEMINFO)
    with suppress(OSError, ValueError):  # no control group, or one without a limit ("max")
        used = int((CGROUP / "memory.current").read_text())
        used -= _number_of("inactive_file", CGROUP / "memory.stat")
        free = min(free, int((CGROUP / "memory.max").read_text()) - used)
    return max(0, free)


def _number_of(name: str, path: Path) -> int:
    """Return the number behind a name in a table of the kernel."""
    return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(name))
