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

from benchmarks import against_transformers, engine_http, engine_overhead, host_tier
from benchmarks.against_transformers import CLOCKS


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each setting (default: %(default)s)")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu on a busy machine (default: %(default)s)"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    setting = {
        "threads": options.threads,
        "cores": os.cpu_count(),
        "clock": options.clock,
        "torch": torch.__version__,
    }
    parts = (
        against_transformers.measure,
        engine_overhead.measure,
        host_tier.measure,
        engine_http.measure,
    )
    clock = CLOCKS[options.clock]
    for figure in chain.from_iterable(measure(options.rounds, clock) for measure in parts):
        if options.json:
            line = {"name": figure.name, "unit": figure.unit, "value": figure.value, "n": options.rounds}
            print(json.dumps({**line, "setting": {**setting, **figure.setting}}), flush=True)
        else:
            print(f"{figure.name:<40}{figure.value:>12,.2f} {figure.unit}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
