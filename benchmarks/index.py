"""Time of a match, and memory of a block: `python -m benchmarks.index [--json] [--quick] [--rivals]`.

A match finds, for each of 256 pods and per tier, the cached blocks of a 1,000-block prompt. Figures are
medians of the wall time of single calls. Each chain is cached by two pods unless the name says otherwise.
"hot": the same chain repeatedly. "cold": a random chain after reading 128 MB of other memory and matching
another chain, so that code is warm and blocks are not; "cold_code" omits that match. "scattered": cold, with
blocks stored in random order; its floor is two independent random reads of memory per block. Resident memory
is measured in child processes and includes engine hashes.
"""

from __future__ import annotations

import gc
from functools import partial

import numpy as np

from benchmarks.index_load import (
    CHAIN_BLOCKS,
    PODS,
    Filled,
    all_pods,
    fill,
    flat,
    staggered,
    two_pods,
)
from benchmarks.index_memory import measure_resident
from benchmarks.index_stalls import measure_clear, measure_growth, measure_under_events
from benchmarks.memory_limits import Chill, measure_memory
from benchmarks.radix_rival import measure_rival
from benchmarks.report import Options, each_us, read_options
from indexer.views.applier import warm_kernels

_SIZES = {"1M": 1_000_000, "10M": 10_000_000}
_HOT_CALLS = 300
_COLD_CALLS = 40
_NAME = "match_1000x256"


def main() -> int:
    """Measure and print all figures."""
    options = read_options(__doc__, rivals=True)
    options.report.machine()
    warm_kernels()
    random_read_ns = measure_memory(options)
    chill = Chill(options)
    for size, blocks in _SIZES.items():
        _sizes(options, size, options.of_size(blocks, 4 * CHAIN_BLOCKS), chill, random_read_ns)
        gc.collect()
    for shape, depths in (("all", all_pods), ("staggered", staggered)):
        few = fill(flat(4 * CHAIN_BLOCKS), 4 * CHAIN_BLOCKS, depths)
        _hot(options, f"{_NAME}_{shape}_us", few, pods_holding=shape, blocks=4 * CHAIN_BLOCKS)
        _cold(options, f"{_NAME}_{shape}_cold_us", few, chill, pods_holding=shape, blocks=4 * CHAIN_BLOCKS)
    measure_under_events(options)
    measure_growth(options)
    measure_resident(options)
    if options.rivals:
        measure_rival(options, "match")
    return 0


def _sizes(options: Options, size: str, blocks: int, chill: Chill, random_read_ns: float) -> None:
    setting = {"blocks": blocks, "pods_holding": "two"}
    filled = fill(flat(blocks), blocks, two_pods)
    _hot(options, f"{_NAME}_{size}_hot_us", filled, **setting)
    _cold(options, f"{_NAME}_{size}_cold_us", filled, chill, **setting)
    _cold(options, f"{_NAME}_{size}_cold_code_us", filled, chill, warm_code=False, **setting)
    if size == "10M":
        measure_clear(options, filled)
    del filled
    gc.collect()
    scattered = fill(flat(blocks), blocks, two_pods, scattered=True)
    floor_us = 2 * CHAIN_BLOCKS * random_read_ns / 1000
    _cold(options, f"{_NAME}_{size}_scattered_us", scattered, chill, **setting, floor_us=round(floor_us, 1))


def _hot(options: Options, name: str, filled: Filled, **setting: object) -> None:
    calls = [partial(filled.match, 0)] * options.of_size(_HOT_CALLS, 3)
    each_us(calls[:3])
    times = [time for _ in range(options.rounds) for time in each_us(calls)]
    options.report.figure(name, "us", times, state="hot", pods=len(PODS), **setting)


def _cold(
    options: Options, name: str, filled: Filled, chill: Chill, *, warm_code: bool = True, **setting: object
) -> None:
    rng = np.random.default_rng(3)
    times: list[float] = []
    for number in rng.integers(0, len(filled.chains), options.of_size(_COLD_CALLS, 3) * options.rounds):
        chain = filled.chains[number].copy()
        chill()
        if warm_code:
            filled.match(int(number) + 1)
        # The prompt's keys have just been computed, so they are in the CPU's caches.
        chain.sum()
        times += each_us([partial(filled.index.match, chain, filled.pods)])
    options.report.figure(name, "us", times, state="cold", pods=len(PODS), **setting)


if __name__ == "__main__":
    raise SystemExit(main())
