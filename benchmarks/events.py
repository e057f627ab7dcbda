"""Blocks per second that one core applies: `python -m benchmarks.events [--json] [--quick] [--rivals]`.

Measures the path from the bytes of ZMQ payloads to blocks in the index, including metrics, without the
socket: blocks per second of CPU time, medians over rounds. A round stores prompts and removes all their
blocks, so the index's memory is already allocated; `*_first_fill` is a new index with page faults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.event_payloads import (
    Payloads,
    Shape,
    in_calls,
    ingest,
    make_payloads,
)
from benchmarks.index_load import PODS
from benchmarks.radix_rival import measure_rival
from benchmarks.report import Options, cpu_s, read_options
from indexer.index.index import FlatIndex
from indexer.views.applier import warm_kernels
from indexer.wire.tiers import Tiers

_POD = PODS[0]
_BLOCKS = {32: 262_144, 1: 65_536}

# Applies a list of payloads.
Apply = Callable[[Sequence[bytes]], object]


def main() -> int:
    """Measure and print all figures."""
    options = read_options(__doc__, rivals=True)
    options.report.machine()
    warm_kernels()
    for blocks_per_event in (32, 1):
        blocks = options.of_size(_BLOCKS[blocks_per_event], 256)
        shape = Shape(blocks_per_event)
        _fast(options, "", shape, blocks, per_call=16)
        _fast(options, "_single_payloads", Shape(blocks_per_event, events_per_payload=1), blocks, per_call=1)
        _fast(options, "_array", Shape(blocks_per_event, layout="array"), blocks, per_call=16)
        _fast(options, "_lora", Shape(blocks_per_event, lora_name="sql-expert"), blocks, per_call=16)
        _first_fill(options, shape, blocks)
    if options.rivals:
        measure_rival(options, "events")
    return 0


def _fast(options: Options, suffix: str, shape: Shape, blocks: int, per_call: int) -> None:
    payloads = make_payloads(shape, blocks)
    sink = ingest(_flat(payloads.blocks), [_POD])
    setting = {**shape.told(), "payloads_per_call": per_call, "blocks": payloads.blocks}
    _rounds(options, suffix, shape, payloads, lambda some: sink.apply(_POD, some), setting, per_call)


def _first_fill(options: Options, shape: Shape, blocks: int) -> None:
    payloads = make_payloads(shape, blocks)
    rates = []
    for _ in range(options.rounds):
        sink = ingest(_flat(payloads.blocks), [_POD])
        rates.append(_rate(payloads.stores, payloads.blocks, lambda some, sink=sink: sink.apply(_POD, some)))
    name = f"ingest_{shape.blocks_per_event}_per_event_first_fill_blocks_per_s"
    setting = {**shape.told(), "payloads_per_call": 16, "blocks": payloads.blocks}
    options.report.figure(name, "blocks/s", rates, **setting)


def _rounds(
    options: Options,
    suffix: str,
    shape: Shape,
    payloads: Payloads,
    apply: Apply,
    setting: dict[str, object],
    per_call: int,
) -> None:
    """Store and remove all payloads repeatedly; the first round warms caches."""
    stored, removed = [], []
    for _ in range(options.rounds + 1):
        stored.append(_rate(payloads.stores, payloads.blocks, apply, per_call))
        removed.append(_rate(payloads.removals, payloads.blocks, apply, per_call))
    for verb, rates in (("ingest", stored), ("remove", removed)):
        name = f"{verb}_{shape.blocks_per_event}_per_event{suffix}_blocks_per_s"
        spread = f"{min(rates[1:]):.4g}..{max(rates[1:]):.4g}"
        options.report.figure(name, "blocks/s", rates[1:], **setting, spread=spread)


def _rate(payloads: Sequence[bytes], blocks: int, apply: Apply, per_call: int = 16) -> float:
    """Return blocks per second of CPU time."""

    def work() -> None:
        for some in in_calls(payloads, per_call):
            apply(some)

    return blocks / cpu_s(work)


def _flat(blocks: int) -> FlatIndex:
    return FlatIndex(256 * (blocks + 4096), Tiers())


if __name__ == "__main__":
    raise SystemExit(main())
