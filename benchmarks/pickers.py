"""kvroute and the Gateway API Inference Extension's picker, in turns behind the same Envoy.

`python -m benchmarks.pickers [--json] [--quick]`. Both get the same chats with a new turn each, through
ext_proc with both phases streamed, as by Gateway API gateways; 16 pods. Figures are the picker's CPU per
request at each prompt size, the CPU of picker and Envoy (`*_path_*`), requests per second, and kvroute's CPU
relative to the other's in successive periods (`*_ratio`). `go_picker` describes the other picker.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks import BASE_PORT
from benchmarks.conversations import SIZES, write_bodies
from benchmarks.gateway_stack import Effort, GatewayStack, StackSetting, Stretch, gateway_stack
from benchmarks.go_picker import VERSION, go_picker
from benchmarks.report import Report, options_of, options_parser

_OURS, _OTHER = "kvroute", "gie_epp"
_CLIENTS, _STREAM_CLIENTS = 32, 4
_OTHER_BASE_PORT = BASE_PORT + 500
# Warm-up periods, until the tokenizer's caches contain the words of new turns, as in a long-running router.
_STRETCHES_OF_WORDS = 12
_WARM_STRETCHES = 3
# Seconds of each period with --quick, long enough for streams to end.
_QUICK_S = 0.5

Turn = dict[str, Stretch]
"""One period of load per picker, by name."""


def main() -> int:
    """Measure and print all figures."""
    parser = options_parser(__doc__, rounds=7)
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="seconds of each period of load (default: %(default)s)"
    )
    read = parser.parse_args()
    options = options_of(read)
    options.report.machine()
    with tempfile.TemporaryDirectory(prefix="kvroute-bench-") as name:
        directory = Path(name)
        effort = Effort(options.rounds, _QUICK_S if options.quick else read.seconds, options.quick)
        measure_pickers(write_bodies(directory, tiny=options.quick), directory, effort, options.report)
    return 0


def measure_pickers(bodies: dict[str, Path], directory: Path, effort: Effort, report: Report) -> None:
    """Measure both pickers; skip the comparison if the Go picker is unavailable."""
    setting = StackSetting(door="ext_proc", responses="full")
    with ExitStack() as stacks:
        try:
            picker = go_picker(directory)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"{_OTHER}: not measured: {error}", file=sys.stderr)
            return
        settings = {_OURS: setting, _OTHER: replace(setting, picker=picker, base_port=_OTHER_BASE_PORT)}
        pair = {}
        for name, one in settings.items():
            place = directory / name
            place.mkdir(exist_ok=True)
            pair[name] = stacks.enter_context(gateway_stack(one, bodies["all"], place))
            if not effort.quick:
                pair[name].load(bodies["small"], _CLIENTS, _STRETCHES_OF_WORDS * effort.seconds)
        for size in SIZES:
            turns = _turns(pair, bodies[size], _CLIENTS, effort)
            _report(turns, size, report)
        _chunks(pair, bodies, effort, report)


def _turns(pair: dict[str, GatewayStack], bodies: Path, clients: int, effort: Effort) -> list[Turn]:
    """Run both in turns, after a warm-up that sends each chat once."""
    for stack in pair.values():
        for _ in range(0 if effort.quick else _WARM_STRETCHES):
            stack.load(bodies, clients, effort.seconds, repeated=True)
    return [
        {name: stack.load(bodies, clients, effort.seconds) for name, stack in pair.items()}
        for _ in range(effort.rounds)
    ]


def _report(turns: list[Turn], size: str, report: Report) -> None:
    for name in (_OURS, _OTHER):
        rounds = [turn[name] for turn in turns]
        shown = _shown(rounds, size)
        report.figure(f"picker_{name}_{size}_cpu_ms", "ms", [one.cpu_ms["router"] for one in rounds], **shown)
        path = [one.cpu_ms["router"] + one.cpu_ms["envoy"] for one in rounds]
        report.figure(f"picker_{name}_{size}_path_cpu_ms", "ms", path, **shown)
        for figure, unit in (("per_s", "1/s"), ("p50_ms", "ms"), ("p99_ms", "ms")):
            values = [one.seen[figure] for one in rounds]
            report.figure(f"picker_{name}_{size}_{figure}", unit, values, **shown)
    ratios = [turn[_OURS].cpu_ms["router"] / turn[_OTHER].cpu_ms["router"] for turn in turns]
    report.figure(f"picker_{size}_cpu_ratio", "x", ratios, **{_OTHER: VERSION})


def _chunks(pair: dict[str, GatewayStack], bodies: dict[str, Path], effort: Effort, report: Report) -> None:
    """Print the CPU per additional chunk of a response, see `pick`."""
    few = _turns(pair, bodies["sparse"], _STREAM_CLIENTS, effort)
    many = _turns(pair, bodies["stream"], _STREAM_CLIENTS, effort)
    for name in (_OURS, _OTHER):
        added = [_added_us(short[name], long[name]) for short, long in zip(few, many, strict=True)]
        shown = _shown([turn[name] for turn in many], "stream")
        report.figure(f"picker_{name}_chunk_cpu_us", "us", added, **shown)


def _added_us(short: Stretch, long: Stretch) -> float:
    return 1000 * (long.cpu_ms["router"] - short.cpu_ms["router"]) / (long.answers - short.answers)


def _shown(rounds: list[Stretch], prompt: str) -> dict[str, object]:
    requests = sum(int(one.seen["requests"]) for one in rounds)
    errors = sum(int(one.seen["errors"]) for one in rounds)
    return {"prompt": prompt, "requests": requests, "errors": errors}


if __name__ == "__main__":
    sys.exit(main())
