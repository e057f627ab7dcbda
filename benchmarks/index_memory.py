"""Resident memory of a flat index, each case in a process of its own.

Measured is the growth of the process's resident memory, including everything that events need: engine
hashes, tables, the parser's arrays. Each case runs this module with its blocks, its holders, and its ceiling
in bytes or 0.
"""

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
from pathlib import Path

from benchmarks.event_payloads import Shape, in_calls, ingest, make_payloads
from benchmarks.index_load import PODS
from benchmarks.report import Options
from indexer.config import PodStream
from indexer.index.index import FlatIndex
from indexer.views.applier import warm_kernels
from indexer.wire.tiers import Tiers

_POOL_BLOCKS = 131_072
_THOUSANDS = (300, 500, 750, 1000, 1200, 1500, 1800, 2000, 2500, 3000, 4000, 8000)
_PAGE_BYTES = resource.getpagesize()
_ROOT = Path(__file__).parents[1]


def measure_resident(options: Options) -> None:
    """Print bytes per block and per further holder, and resident bytes per ceiling under churn."""
    sizes = [4096] if options.quick else [thousands * 1000 for thousands in _THOUSANDS]
    per_block = {blocks: _child(blocks, 1, 0) / blocks for blocks in sizes}
    by_size = {str(blocks): round(value, 1) for blocks, value in per_block.items()}
    worst = [max(per_block.values())]
    options.report.figure("bytes_per_block_1_holder", "B", worst, what="the worst of", by_blocks=by_size)
    blocks = options.of_size(262_144, 4096)
    one = per_block[blocks] * blocks if blocks in per_block else _child(blocks, 1, 0)
    for holders in (64,) if options.quick else (64, 16, 5, 4):
        extra = (_child(blocks, holders, 0) - one) / blocks / (holders - 1)
        suffix = "" if holders == 64 else f"_{holders}"
        name = f"bytes_per_extra_holder{suffix}"
        options.report.figure(name, "B", [extra], holders=holders, pods=holders, blocks=blocks)
    churn = options.of_size(50_000_000, 20_000)
    capacity = options.of_size(256 << 20, 1 << 20)
    ratio = _child(churn, 1, capacity) / capacity
    setting = {"churn_blocks": churn, "capacity_bytes": capacity}
    options.report.figure("churn_50M_resident_over_capacity", "ratio", [ratio], **setting)


def main() -> int:
    """Run one case; print the growth of resident memory in bytes."""
    blocks, holders, capacity_bytes = map(int, sys.argv[1:4])
    warm_kernels()
    pool = make_payloads(Shape(32), min(_POOL_BLOCKS, blocks))
    _apply(FlatIndex(1 << 24, Tiers()), pool.stores[:64], "warm", PODS[:1])
    before = _resident_bytes()
    index = FlatIndex(capacity_bytes or 256 * (blocks + 4096), Tiers())
    done = 0
    while done < blocks:
        # Under another model's name the same payloads give other blocks with other engine hashes.
        _apply(index, pool.stores, f"model-{done}", PODS[:holders])
        done += pool.blocks
    grown = _resident_bytes() - before
    # Scaled to the requested blocks: the last pool may exceed them.
    print(json.dumps(grown if capacity_bytes else grown * blocks / done))
    return 0


def _apply(index: FlatIndex, payloads: list[bytes], model: str, pods: tuple[str, ...]) -> None:
    sink = ingest(index, ())
    for pod in pods:
        sink.opened(PodStream(pod, model, "tcp://127.0.0.1:1"))
        for some in in_calls(payloads, 16):
            sink.apply(pod, some)


def _child(blocks: int, holders: int, capacity_bytes: int) -> float:
    arguments = [str(blocks), str(holders), str(capacity_bytes)]
    argv = [sys.executable, "-m", "benchmarks.index_memory", *arguments]
    ran = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, cwd=_ROOT)
    return float(ran.stdout)


def _resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * _PAGE_BYTES


if __name__ == "__main__":
    raise SystemExit(main())
