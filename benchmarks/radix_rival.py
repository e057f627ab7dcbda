"""Dynamo's `RadixTree` (`ai-dynamo-runtime` from PyPI) on the load of the flat index, in the same run.

It runs in a virtual environment of its own (`rival_environment`), by `radix_rival_child`. Its events are JSON
with precomputed hashes of each block's tokens, so it neither parses msgpack nor hashes tokens, which our
figures include. CPU is that of its whole process, including the tree's thread.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.report import Options
from benchmarks.rival_environment import environment

_PACKAGE = "ai-dynamo-runtime"
_CHILD = Path(__file__).with_name("radix_rival_child.py")
_CHILD_S = 600.0


def measure_rival(options: Options, what: str) -> None:
    """Print the rival's figures, or that it is unavailable.

    Args:
        what: Benchmark to run: "events", "match" or "keys".
    """
    try:
        python = environment(_PACKAGE)
        argv = [str(python), str(_CHILD), what, str(options.rounds), str(int(options.quick))]
        ran = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=_CHILD_S)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"{_PACKAGE}: not measured: {error}", file=sys.stderr)
        return
    for line in ran.stdout.splitlines():
        figure = json.loads(line)
        options.report.figure(figure["name"], figure["unit"], figure["values"], **figure["setting"])
