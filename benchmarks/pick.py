"""CPU of a pick behind a real Envoy, per service.

`python -m benchmarks.pick [--json] [--quick] [--rivals]`. 16 pods, of which 8 have each warm conversation
cached; tokenization and prefix match are included. CPU is read from /proc (Linux); figures are medians over
rounds. `*_floor_*` is the same server with services that do nothing, in the same run. `check_grpc` is Envoy's
ext_authz, `extproc` ext_proc. `route_*` and `end_*` are only the router's own code, see `pick_inside`.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks import schedule
from benchmarks.conversations import SIZES, write_bodies
from benchmarks.gateway_stack import (
    Effort,
    GatewayStack,
    StackSetting,
    Stretch,
    bare_picker,
    gateway_stack,
)
from benchmarks.next_turns import ANSWER_CHARS, QUESTION_CHARS
from benchmarks.pick_inside import measure as measure_inside
from benchmarks.pickers import measure_pickers
from benchmarks.report import Report, options_of, options_parser
from benchmarks.rivals import measure_rivals
from kvroute.envoy_config import Door

EVENT_BLOCKS_PER_S = 50_000
_CLIENTS = 32
# Few concurrent streams, so that Envoy forwards every chunk separately.
_STREAM_CLIENTS = 4
_IDLE_PODS = 100
# Warm-up periods, until the tokenizer's caches contain the words of new turns, as in a long-running router.
_STRETCHES_OF_WORDS = 12
# Requests per period that imply that every chat was sent, and the maximum number of periods until then.
_WARM_REQUESTS = 2 * max(chats for _, chats in SIZES.values())
_WARM_STRETCHES = 10
# Seconds that --quick measures; longer for streams, because some must end.
_QUICK_S, _QUICK_STREAMS_S = 0.1, 0.5
_DOORS: dict[str, Door] = {"check_grpc": "check_grpc", "extproc": "ext_proc"}


def main() -> int:
    """Measure and print all figures."""
    parser = options_parser(__doc__, rivals=True, rounds=5)
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="seconds of each period of load (default: %(default)s)"
    )
    read = parser.parse_args()
    options = options_of(read)
    report = options.report
    report.machine()
    effort = Effort(options.rounds, _QUICK_S if options.quick else read.seconds, options.quick)
    with tempfile.TemporaryDirectory(prefix="kvroute-bench-") as name:
        directory = Path(name)
        bodies = write_bodies(directory, tiny=options.quick)
        if options.quick:
            _quick(bodies, directory, effort, report)
        else:
            for name in _DOORS:
                _door(name, bodies, directory, effort, report)
            _full(bodies, directory, effort, report)
            _routers(bodies, directory, effort, report)
            _floors(bodies, directory, effort, report)
            _idle(bodies, directory, effort, report)
        measure_inside(bodies, options)
        schedule.measure(options)
        if options.rivals:
            measure_rivals(bodies["small"], directory, effort, report)
            measure_pickers(bodies, directory, effort, report)
    return 0


def _quick(bodies: dict[str, Path], directory: Path, effort: Effort, report: Report) -> None:
    """Print every kind of figure once, from two stacks, because starting a stack takes longest."""
    first, *_, last = _DOORS
    setting = StackSetting(door=_DOORS[first])
    with gateway_stack(setting, bodies["small"], directory) as stack:
        _door_figures(first, stack, setting, bodies, effort, report)
        _unary_figure(stack, setting, bodies["small"], effort, report)
        _idle_figure(stack, setting, effort, report)
    setting = StackSetting(door=_DOORS[last], responses="full")
    with gateway_stack(setting, bodies["small"], directory) as stack:
        _door_figures(last, stack, setting, bodies, effort, report)
        _full_figures(stack, setting, bodies, effort, report)
    _floors(bodies, directory, effort, report)


def _door(name: str, bodies: dict[str, Path], directory: Path, effort: Effort, report: Report) -> None:
    """Print one service's CPU per prompt size and its throughput, also under events; the first also unary."""
    setting = StackSetting(door=_DOORS[name])
    with gateway_stack(setting, bodies["all"], directory) as stack:
        stack.load(bodies["small"], _CLIENTS, _STRETCHES_OF_WORDS * effort.seconds)
        _door_figures(name, stack, setting, bodies, effort, report)
    if name == "check_grpc":
        # No ends are reported for these picks, so the ledger must expire them soon.
        flags = ("--request-lifetime", "2s")
        with gateway_stack(replace(setting, router_flags=flags), bodies["all"], directory) as stack:
            stack.pick_load(bodies["small"], _CLIENTS, _STRETCHES_OF_WORDS * effort.seconds)
            _unary_figure(stack, setting, bodies["small"], effort, report)


def _routers(bodies: dict[str, Path], directory: Path, effort: Effort, report: Report) -> None:
    """Print the CPU per request of several routers together, which share their requests in flight."""
    for routers in (1, 2, 4):
        setting = StackSetting(routers=routers)
        with gateway_stack(setting, bodies["all"], directory) as stack:
            stack.load(bodies["small"], _CLIENTS, _STRETCHES_OF_WORDS * effort.seconds)
            rounds = _rounds(effort, partial(stack.load, bodies["small"], _CLIENTS, effort.seconds))
            cpu = [sum(ms for name, ms in one.cpu_ms.items() if "router" in name) for one in rounds]
            shown = _shown(setting, rounds, routers=routers)
            report.figure(f"routers_{routers}_cpu_ms", "ms", cpu, **shown)


def _door_figures(
    name: str,
    stack: GatewayStack,
    setting: StackSetting,
    bodies: dict[str, Path],
    effort: Effort,
    report: Report,
) -> None:
    for size in SIZES:
        rounds = _rounds(effort, partial(stack.load, bodies[size], _CLIENTS, effort.seconds))
        shown = _shown(setting, rounds, prompt=size)
        report.figure(f"{name}_{size}_cpu_ms", "ms", [one.cpu_ms["router"] for one in rounds], **shown)
        if size == "small":
            again = [
                stack.load(bodies[size], _CLIENTS, effort.seconds, repeated=True)
                for _ in range(effort.rounds)
            ]
            repeated = _shown(setting, again, prompt=size, new_chars=0)
            cpu = [one.cpu_ms["router"] for one in again]
            report.figure(f"{name}_small_repeated_cpu_ms", "ms", cpu, **repeated)
            report.figure(f"{name}_per_s", "1/s", [one.seen["per_s"] for one in rounds], **shown)
            report.figure(f"{name}_p99_ms", "ms", [one.seen["p99_ms"] for one in rounds], **shown)
    _under_events(name, stack, bodies["small"], setting, effort, report)


def _unary_figure(
    stack: GatewayStack, setting: StackSetting, bodies: Path, effort: Effort, report: Report
) -> None:
    rounds = _rounds(effort, partial(stack.pick_load, bodies, _CLIENTS, effort.seconds))
    cpu = [one.cpu_ms["router"] for one in rounds]
    report.figure("pick_unary_cpu_ms", "ms", cpu, **_shown(setting, rounds, door="PickEndpoint"))


def _under_events(
    name: str, stack: GatewayStack, bodies: Path, setting: StackSetting, effort: Effort, report: Report
) -> None:
    """Repeat the load of small chats while pods publish blocks; the setting has the number applied."""
    stack.store_blocks(EVENT_BLOCKS_PER_S)
    begun_s, admitted = time.monotonic(), stack.admitted_blocks()
    rounds = _rounds(effort, partial(stack.load, bodies, _CLIENTS, effort.seconds))
    admitted_per_s = (stack.admitted_blocks() - admitted) / (time.monotonic() - begun_s)
    stack.store_blocks(0)
    shown = _shown(
        setting, rounds, blocks_per_s=EVENT_BLOCKS_PER_S, admitted_blocks_per_s=round(admitted_per_s)
    )
    report.figure(f"{name}_p99_under_events_ms", "ms", [one.seen["p99_ms"] for one in rounds], **shown)
    report.figure(f"{name}_per_s_under_events", "1/s", [one.seen["per_s"] for one in rounds], **shown)


def _full(bodies: dict[str, Path], directory: Path, effort: Effort, report: Report) -> None:
    """Print the CPU of both phases of ext_proc, and per additional chunk of a stream."""
    setting = StackSetting(door="ext_proc", responses="full")
    with gateway_stack(setting, bodies["all"], directory) as stack:
        stack.load(bodies["small"], _CLIENTS, _STRETCHES_OF_WORDS * effort.seconds)
        _full_figures(stack, setting, bodies, effort, report)
    setting = replace(setting, picker=bare_picker)
    with gateway_stack(setting, bodies["all"], directory) as stack:
        _chunks("chunk_floor_cpu_us", stack, setting, bodies, effort, report)


def _full_figures(
    stack: GatewayStack, setting: StackSetting, bodies: dict[str, Path], effort: Effort, report: Report
) -> None:
    rounds = _rounds(effort, partial(stack.load, bodies["small"], _CLIENTS, effort.seconds))
    cpu = [one.cpu_ms["router"] for one in rounds]
    report.figure("extproc_full_small_cpu_ms", "ms", cpu, **_shown(setting, rounds))
    _chunks("chunk_full_cpu_us", stack, setting, bodies, effort, report)


def _chunks(
    name: str,
    stack: GatewayStack,
    setting: StackSetting,
    bodies: dict[str, Path],
    effort: Effort,
    report: Report,
) -> None:
    """Print the CPU per additional chunk, from streams of equal duration with many and with few chunks.

    Equal durations give equal request rates, cache conditions and background work. Chunks are ext_proc
    messages as counted by Envoy. For comparison with older results, the setting `by_reads_us` has the figure
    relative to non-streamed responses and with chunks counted by clients' reads, which may join several.
    """
    seconds = max(effort.seconds, _QUICK_STREAMS_S)

    def turn() -> dict[str, Stretch]:
        kinds = ("small", "sparse", "stream")
        return {kind: stack.load(bodies[kind], _STREAM_CLIENTS, seconds) for kind in kinds}

    warm = 0 if effort.quick else 1
    turns = [turn() for _ in range(warm + effort.rounds)][warm:]
    chunk_us, by_reads_us = [], []
    for turn_of in turns:
        plain, few, many = turn_of.values()
        cpu_ms = many.cpu_ms["router"]
        chunk_us.append(1000 * (cpu_ms - few.cpu_ms["router"]) / (many.answers - few.answers))
        reads = many.seen["reads"] - plain.seen["reads"]
        by_reads_us.append(1000 * (cpu_ms - plain.cpu_ms["router"]) / reads)
    streams = [turn_of["stream"] for turn_of in turns]
    shown = _shown(
        setting,
        streams,
        chunks=round(streams[0].answers - turns[0]["sparse"].answers, 1),
        reads=round(streams[0].seen["reads"], 1),
        by_reads_us=round(statistics.median(by_reads_us), 1),
    )
    report.figure(name, "us", chunk_us, **shown)


def _floors(bodies: dict[str, Path], directory: Path, effort: Effort, report: Report) -> None:
    for name, door in list(_DOORS.items())[: 1 if effort.quick else None]:
        setting = StackSetting(door=door, picker=bare_picker)
        with gateway_stack(setting, bodies["all"], directory) as stack:
            rounds = _rounds(effort, partial(stack.load, bodies["small"], _CLIENTS, effort.seconds))
        cpu = [one.cpu_ms["router"] for one in rounds]
        report.figure(f"{name}_floor_cpu_ms", "ms", cpu, **_shown(setting, rounds))


def _idle(bodies: dict[str, Path], directory: Path, effort: Effort, report: Report) -> None:
    setting = StackSetting(pods=_IDLE_PODS, with_events=False)
    with gateway_stack(setting, bodies["small"], directory) as stack:
        time.sleep(2 * effort.seconds)
        _idle_figure(stack, setting, effort, report)


def _idle_figure(stack: GatewayStack, setting: StackSetting, effort: Effort, report: Report) -> None:
    values = []
    for _ in range(effort.rounds):
        before_s, cpu_s = time.monotonic(), stack.cpu_s("router")
        time.sleep(effort.seconds)
        values.append(1000 * (stack.cpu_s("router") - cpu_s) / (time.monotonic() - before_s))
    report.figure("idle_100_pods_mcpu", "mCPU", values, pods=setting.pods)


def _rounds(effort: Effort, stretch: Callable[..., Stretch]) -> list[Stretch]:
    """Run periods of load after a warm-up that sends every chat once."""
    if effort.quick:
        return [stretch()]
    for _ in range(_WARM_STRETCHES):
        if stretch(repeated=True).seen["requests"] >= _WARM_REQUESTS:
            break
    return [stretch() for _ in range(effort.rounds + 1)][1:]


def _shown(setting: StackSetting, rounds: Sequence[Stretch], **more: object) -> dict[str, object]:
    shown: dict[str, object] = {"door": setting.door, "responses": setting.responses, "pods": setting.pods}
    shown["new_chars"] = ANSWER_CHARS + QUESTION_CHARS
    errors = sum(int(one.seen.get("errors", 0)) for one in rounds)
    requests = sum(int(one.seen["requests"]) for one in rounds)
    return {**shown, "requests": requests, "errors": errors, **more}


if __name__ == "__main__":
    sys.exit(main())
