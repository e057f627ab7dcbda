"""The `kvroute bench` command: runs one of the benchmarks of a checkout.

They are for who changes kvroute, and no part of an installed one.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_BENCHMARKS = {
    "keys": "block keys of a prompt",
    "index": "a match against 256 pods, memory of a block, stalls of readers",
    "events": "blocks per second from published payloads to the index",
    "tokens": "token ids of a prompt",
    "pick": "a pick behind a real Envoy, door by door",
    "pickers": "the same picks beside the Go reference's, in turns",
    "pick_inside": "the router's own part of a pick, step by step",
    "pick_counts": "its instructions and cache misses, counted by valgrind",
    "schedule": "a scheduling cycle, from matches to the pod",
    "queues": "first tokens behind each way to price a queue, in virtual time",
    "replicas": "what several routers lose alone, and what sharing their ledgers brings and costs",
    "startup": "the router's start until it is ready",
    "engine": "the model server's engine beside transformers",
    "macs": "multiply-accumulates of a generation with and without a KV cache",
}


def main(argv: Sequence[str]) -> int:
    """Runs a benchmark with the rest of the command line; returns its exit status."""
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        print(_help(), end="")
        return 0
    if name not in _BENCHMARKS:
        known = ", ".join(_BENCHMARKS)
        print(f"kvroute bench: no such benchmark: {name}; there are {known}", file=sys.stderr)
        return 2
    if not (_ROOT / "benchmarks" / f"{name}.py").is_file():
        print("kvroute bench: needs a checkout of kvroute: benchmarks are not installed", file=sys.stderr)
        return 1
    sys.path.insert(0, str(_ROOT))
    sys.argv = [f"kvroute bench {name}", *argv[1:]]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    return 0


def _help() -> str:
    width = max(map(len, _BENCHMARKS))
    lines = "\n".join(f"  {name:<{width}}   {purpose}" for name, purpose in _BENCHMARKS.items())
    return f"""\
usage: kvroute bench NAME [--json] [OPTION ...]

Measures a part of kvroute; needs a checkout. --json prints one JSON object a line.

benchmarks:
{lines}

  kvroute bench NAME --help   tells a benchmark's options
"""
