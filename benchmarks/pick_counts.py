"""Instructions and cache misses of a pick, counted by valgrind.

`python -m benchmarks.pick_counts [--json] [--quick]`. Runs the small requests of `pick_inside`, with a new
turn each, from request bytes to response bytes and to their ends, on a simulated CPU with the caches of one
Zen 3 core (32 KiB, 32 KiB and 512 KiB). Two runs of the same code agree within 2 %, whatever the load of the
machine. The cost of a miss depends on the machine.
Needs valgrind (Debian: `apt-get install valgrind`).
"""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import llvmlite.binding as llvm

from benchmarks.conversations import write_bodies
from benchmarks.next_turns import next_turns
from benchmarks.pick_inside import Inside
from benchmarks.report import Report, read_options

_INSIDE, _BEFORE = "inside", "before"
_BURST = 32
# Cache size in bytes, associativity, line size in bytes.
_CACHES = ("--I1=32768,8,64", "--D1=32768,8,64", "--LL=524288,8,64")
_VALGRIND = (
    "valgrind",
    "--tool=callgrind",
    "--instr-atstart=no",
    "--cache-sim=yes",
    "--smc-check=all-non-file",
)
# Names of callgrind's events for reads and writes.
_FIGURES = {
    "instructions": ("Ir",),
    "l1i_misses": ("I1mr",),
    "l1d_misses": ("D1mr", "D1mw"),
    "l2_misses": ("ILmr", "DLmr", "DLmw"),
}


class Load(NamedTuple):
    """Requests to serve.

    Attributes:
        warm_bursts: Bursts before counting, so that the tokenizer's caches contain most words of the prose.
        bursts: Counted bursts.
        held: Chats that are cached at pods, see `write_bodies`.
    """

    warm_bursts: int
    bursts: int
    held: str


_FULL, _QUICK = Load(150, 6, "all"), Load(0, 1, "small")


def serve(load: Load, callgrind: Callable[[str], None]) -> None:
    """Serve the requests.

    Args:
        callgrind: Switches valgrind's counting on and off.
    """
    with tempfile.TemporaryDirectory(prefix="kvroute-bench-") as name:
        # Loading a large vocabulary would take minutes under valgrind.
        bodies = write_bodies(Path(name), tiny=True)
        inside = Inside(bodies[load.held])
        try:
            chats = bodies["small"].read_bytes().splitlines()
            _burst(inside, inside.requests(iter(chats), len(chats)))
            lines = next_turns(chats, seed=1)
            for _ in range(load.warm_bursts):
                _burst(inside, inside.requests(lines, _BURST))
            counted = [inside.requests(lines, _BURST) for _ in range(load.bursts)]
            # Same setting as the router makes at start.
            gc.collect()
            gc.freeze()
            callgrind("--instr=on")
            for requests in counted:
                _burst(inside, requests)
            callgrind("--instr=off")
            callgrind("--dump")
        finally:
            inside.close()


def _burst(inside: Inside, requests: list[tuple[str, bytes]]) -> None:
    for _, received in requests:
        inside.answer(received)
    for request_id, _ in requests:
        inside.end(request_id)


def _callgrind(command: str) -> None:
    subprocess.run(["callgrind_control", command, str(os.getpid())], check=True, stdout=subprocess.DEVNULL)


def measure(report: Report, load: Load) -> None:
    """Count and print the figures.

    Raises:
        SystemExit: valgrind is not installed, or the program under it failed.
    """
    if shutil.which(_VALGRIND[0]) is None:
        raise SystemExit("there is no valgrind; on Debian and Ubuntu: apt-get install valgrind")
    with tempfile.TemporaryDirectory(prefix="kvroute-bench-") as name:
        out = Path(name, "counts")
        argv = [*_VALGRIND, *_CACHES, f"--callgrind-out-file={out}", sys.executable, "-m", __spec__.name]
        # Kernels are compiled for the processor, and would be anew for the one that valgrind plays: for both
        # without what valgrind does not know, and before it begins.
        features = re.sub(r"\+(avx512|evex512|avx10)", r"-\1", llvm.get_host_cpu_features().flatten())
        processor = {"NUMBA_CPU_NAME": llvm.get_host_cpu_name(), "NUMBA_CPU_FEATURES": features}
        environment = {**os.environ, **processor, "PYTHONHASHSEED": "0"}
        _run(
            [sys.executable, "-m", __spec__.name, _BEFORE, json.dumps(load._replace(warm_bursts=0))],
            environment,
            "beforehand",
        )
        _run([*argv, _INSIDE, json.dumps(load)], environment, "under valgrind")
        counts = _totals(out.with_name(f"{out.name}.1"))
    for figure, events in _FIGURES.items():
        each = sum(counts[event] for event in events) / (_BURST * load.bursts)
        report.figure(
            f"request_small_{figure}", "count", [each], requests=_BURST * load.bursts, caches=_CACHES
        )


def _run(argv: list[str], environment: dict[str, str], where: str) -> None:
    ran = subprocess.run(argv, env=environment, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"{where} it failed:\n{ran.stderr[-2000:]}")


def _totals(dump: Path) -> dict[str, int]:
    """Return the sums of a dump by event."""
    lines = dict(line.split(": ", 1) for line in dump.read_text("utf-8").splitlines() if ": " in line)
    return dict(zip(lines["events"].split(), map(int, lines["totals"].split()), strict=False))


def main() -> int:
    """Count and print all figures."""
    if sys.argv[1:2] in ([_INSIDE], [_BEFORE]):
        serve(Load(*json.loads(sys.argv[2])), _callgrind if sys.argv[1] == _INSIDE else lambda _command: None)
        return 0
    read = read_options(__doc__)
    read.report.machine()
    measure(read.report, _QUICK if read.quick else _FULL)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
