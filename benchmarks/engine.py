"""Throughput of the engine: `python -m benchmarks.engine [--json] [--threads N] [--clock cpu]`.

Prints medians over rounds, as a table or as one JSON object per line. Each part is a module of its own.
Compared programs run in the same process and in turns, so that noise affects both. The part `roofline` runs
on a GPU where there is one, the others on the CPU.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import chain

import torch

from benchmarks import (
    against_transformers,
    engine_http,
    engine_overhead,
    engine_sampling,
    host_tier,
    roofline,
)
from benchmarks.against_transformers import CLOCKS
from benchmarks.engine_load import default_device
from benchmarks.report import Figure, options_of, options_parser

_PARTS = {
    "transformers": against_transformers.measure,
    "overhead": engine_overhead.measure,
    "sampling": engine_sampling.measure,
    "host": host_tier.measure,
    "http": engine_http.measure,
}
_ROOFLINE = "roofline"


def main() -> int:
    """Measure and print all figures."""
    parser = options_parser(__doc__, rounds=5)
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default: %(default)s)")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="use cpu on a busy machine (default: %(default)s)"
    )
    parser.add_argument(
        "--part",
        choices=(*_PARTS, _ROOFLINE),
        nargs="+",
        default=[*_PARTS, _ROOFLINE],
        help="measure only these (default: all)",
    )
    parser.add_argument(
        "--device", default=default_device(), help="device of the part roofline (default: %(default)s)"
    )
    parser.add_argument(
        "--model",
        metavar="DIR|NAME",
        help="model of the part roofline, with random weights: config.json's directory, or a preset of "
        "`kvroute plan` (default: llama-3.1-8b on CUDA, one of 91 million parameters on a CPU)",
    )
    read = parser.parse_args()
    options = options_of(read)
    options.report.machine()
    torch.set_num_threads(read.threads)
    setting = {
        "threads": read.threads,
        "cores": os.cpu_count(),
        "clock": read.clock,
        "torch": torch.__version__,
    }

    def figures(part: str) -> Iterator[Figure]:
        if part == _ROOFLINE:
            return roofline.measure(options.rounds, read.device, read.model, quick=options.quick)
        return _PARTS[part](options.rounds, CLOCKS[read.clock])

    for figure in chain.from_iterable(map(figures, read.part)):
        if read.json:
            line = {"name": figure.name, "unit": figure.unit, "value": figure.value, "n": options.rounds}
            print(json.dumps({**line, "setting": {**setting, **figure.setting}}), flush=True)
        else:
            print(f"{figure.name:<40}{figure.value:>12,.2f} {figure.unit}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
