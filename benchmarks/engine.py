"""How fast the model server's engine is: `python -m benchmarks.engine [--json] [--threads N] [--clock cpu]`.

Prints medians over rounds, as a table or as one JSON object a line. Each part is a module of its own; what a
figure is compared with runs in the same process and in turns, so that noise meets both sides.
"""

from __future__ import annotations

import argparse
import json
import os
from itertools import chain

import torch

from benchmarks import against_transformers, engine_http, engine_overhead, engine_sampling, host_tier
from benchmarks.against_transformers import CLOCKS

_PARTS = {
    "transformers": against_transformers.measure,
    "overhead": engine_overhead.measure,
    "sampling": engine_sampling.measure,
    "host": host_tier.measure,
    "http": engine_http.measure,
}


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each setting (default: %(default)s)")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu on a busy machine (default: %(default)s)"
    )
    parser.add_argument(
        "--part", choices=_PARTS, nargs="+", default=list(_PARTS), help="measure only these (default: all)"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    setting = {
        "threads": options.threads,
        "cores": os.cpu_count(),
        "clock": options.clock,
        "torch": torch.__version__,
    }
    clock = CLOCKS[options.clock]
    for figure in chain.from_iterable(_PARTS[part](options.rounds, clock) for part in options.part):
        if options.json:
            line = {"name": figure.name, "unit": figure.unit, "value": figure.value, "n": options.rounds}
            print(json.dumps({**line, "setting": {**setting, **figure.setting}}), flush=True)
        else:
            print(f"{figure.name:<40}{figure.value:>12,.2f} {figure.unit}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
