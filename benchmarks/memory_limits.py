"""Latency and bandwidth of the machine's memory, measured in the same run as the figures."""

from __future__ import annotations

import time

import numba
import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Options

_LINE_WORDS = 8
_FAR_BYTES = 256 << 20
_CHILL_BYTES = 128 << 20


def measure_memory(options: Options) -> float:
    """Print latency, the cost of a random read among many independent ones, and bandwidth.

    Returns:
        Nanoseconds of one independent random read: the lower limit for a block that is not in a cache.
    """
    words = options.of_size(_FAR_BYTES, 1 << 16) // 8
    rng = np.random.default_rng(1)
    far = np.zeros(words, np.uint64)
    order = rng.permutation(words // _LINE_WORDS).astype(np.int64) * _LINE_WORDS
    far[order] = np.roll(order, -1).astype(np.uint64)
    reads = options.of_size(1_000_000, 1_000)
    setting = {"bytes": far.nbytes, "reads": reads}
    places = rng.permutation(order)[:reads]
    for kernel, argument in ((_chase, reads), (_gather, places)):
        _timed_ns(kernel, far, argument)
    latency = [_timed_ns(_chase, far, reads) / reads for _ in range(options.rounds)]
    options.report.figure("memory_latency_ns", "ns", latency, what="each read names the next", **setting)
    independent = [_timed_ns(_gather, far, places) / len(places) for _ in range(options.rounds)]
    random_ns = options.report.figure(
        "memory_random_read_ns", "ns", independent, what="reads that do not wait for one another", **setting
    )
    bandwidth = [far.nbytes / _timed_ns(np.sum, far) for _ in range(options.rounds)]
    options.report.figure("memory_bandwidth_gb_per_s", "GB/s", bandwidth, what="one core, read", **setting)
    return random_ns


class Chill:
    """Buffer that evicts everything else from the CPU's caches when read."""

    def __init__(self, options: Options) -> None:
        self._far = np.ones(options.of_size(_CHILL_BYTES, 1 << 16) // 8, np.uint64)
        self.size_bytes = self._far.nbytes

    def __call__(self) -> None:
        """Read all of the memory."""
        self._far.sum()


def _timed_ns(function: object, *arguments: object) -> int:
    started_ns = time.perf_counter_ns()
    function(*arguments)  # type: ignore[operator]
    return time.perf_counter_ns() - started_ns


@numba.njit
def _chase(far: NDArray[np.uint64], reads: int) -> int:
    place = np.uint64(0)
    for _ in range(reads):
        place = far[place]
    return place


@numba.njit
def _gather(far: NDArray[np.uint64], places: NDArray[np.int64]) -> int:
    total = np.uint64(0)
    for place in places:
        total += far[place]
    return total
