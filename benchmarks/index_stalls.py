"""Time that readers of the index wait for writers: while events arrive, a pod is cleared, tables grow."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from benchmarks.event_payloads import PROMPT_BLOCKS, Shape, in_calls, ingest, make_payloads
from benchmarks.index_load import CHAIN_BLOCKS, PODS, Filled, fill, flat, two_pods
from benchmarks.report import Options, each_us
from indexer.index.index import TURN_BLOCKS
from indexer.index.update import store_blocks

_EVENTS_PER_S = 100_000
_PAYLOADS_PER_CALL = 16
# A router matches once per request, with some concurrency, and does other work in between.
_PAUSE_S = 0.0005
_TOGETHER = 8


def measure_under_events(options: Options) -> None:
    """Print the time of a match while another thread applies 100,000 events of one block a second."""
    blocks = options.of_size(1_000_000, 4 * CHAIN_BLOCKS)
    filled = fill(flat(2 * blocks), blocks, two_pods)
    calls = [partial(filled.match, 0)] * options.of_size(20_000, 16)
    with _events(options, filled) as applied:
        _paused_us(calls[:_TOGETHER])
        before, started_s = applied[0], time.monotonic()
        times = _paused_us(calls)
        per_s = (applied[0] - before) / (time.monotonic() - started_s)
    alone = statistics.median(_paused_us(calls))
    options.report.figure(
        "match_under_100k_events_us",
        "us",
        times,
        events_per_s=round(per_s),
        blocks_per_event=1,
        alone_us=round(alone, 2),
        p99_us=round(float(np.percentile(times, 99)), 1),
        pods=len(PODS),
        pause_us=_PAUSE_S * 1e6,
        matches_between_pauses=_TOGETHER,
    )


def measure_clear(options: Options, filled: Filled) -> None:
    """Print the longest match while one pod is cleared and its blocks are removed from the index."""
    worst = []
    for number in range(options.rounds):
        calls = [partial(filled.match, chain) for chain in range(options.of_size(2_000, 5))]
        quiet = max(_paused_us(calls))
        cleared = threading.Event()
        clear = threading.Thread(target=_clear, args=(filled, PODS[number], cleared))
        clear.start()
        times: list[float] = []
        while not cleared.is_set() or not times:
            times += _paused_us(calls[:10])
        clear.join()
        worst.append(max(times) / 1000)
    blocks = filled.index.stats().blocks
    setting = {"blocks": blocks, "pods": len(PODS), "worst_before_ms": round(quiet / 1000, 3)}
    options.report.figure("clear_pod_stall_ms", "ms", worst, **setting, worst_of_all_ms=round(max(worst), 3))


def measure_growth(options: Options) -> None:
    """Print the maximum CPU time under the lock to grow the tables for a run of blocks."""
    blocks = options.of_size(4_000_000, 8 * TURN_BLOCKS)
    rng = np.random.default_rng(5)
    worst, all_us = [], []
    for _ in range(options.rounds):
        index, chain, run_us = flat(blocks), np.empty(TURN_BLOCKS, np.int64), []
        pod = index.number(PODS[0])
        for _ in range(blocks // TURN_BLOCKS):
            keys, names = rng.integers(1, 2**64, (2, TURN_BLOCKS), np.uint64)
            started_ns = time.thread_time_ns()
            index.prepare(TURN_BLOCKS)
            run_us.append((time.thread_time_ns() - started_ns) / 1000)
            store_blocks(index.arrays, pod, 0, keys, names, chain)
        worst.append(max(run_us) / 1000)
        all_us += run_us
    options.report.figure(
        "growth_turn_ms",
        "ms",
        worst,
        what="CPU time, the worst of each round",
        blocks=blocks,
        blocks_per_turn=TURN_BLOCKS,
        p99_ms=round(float(np.percentile(all_us, 99)) / 1000, 3),
        ns_per_block=round(float(np.mean(all_us)) * 1000 / TURN_BLOCKS, 1),
    )


def _clear(filled: Filled, pod: str, cleared: threading.Event) -> None:
    filled.index.clear_pod(pod)
    # Asking for the size removes cleared blocks.
    filled.index.stats()
    cleared.set()


def _paused_us(calls: list[partial[None]]) -> list[float]:
    times = []
    for start in range(0, len(calls), _TOGETHER):
        time.sleep(_PAUSE_S)
        times += each_us(calls[start : start + _TOGETHER])
    return times


@contextmanager
def _events(options: Options, filled: Filled) -> Iterator[list[int]]:
    """Apply events on a thread at a steady rate; yield a list whose only item is their number."""
    payloads = make_payloads(Shape(1), options.of_size(16 * PROMPT_BLOCKS, 256))
    sink = ingest(filled.index, PODS[:1])
    applied, stop = [0], threading.Event()

    def run() -> None:
        per_call = 16 * _PAYLOADS_PER_CALL
        due_s = time.monotonic()
        while True:
            for some in (*in_calls(payloads.stores, _PAYLOADS_PER_CALL), *in_calls(payloads.removals, 16)):
                if stop.is_set():
                    return
                due_s += per_call / _EVENTS_PER_S
                time.sleep(max(0.0, due_s - time.monotonic()))
                sink.apply(PODS[0], some)
                applied[0] += 16 * len(some)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield applied
    finally:
        stop.set()
        thread.join()
