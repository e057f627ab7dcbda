"""Output of a benchmark: JSON lines or a table, after one line about the machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_MANY = 100
# The Llama of the engine's benchmarks: 91 million parameters.
SHAPE = {
    "vocab_size": 10_000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number.

    Attributes:
        name: Name of the figure.
        unit: Unit of the value; "x" is a ratio.
        value: Median over rounds.
        setting: Parameters of the measurement.
    """

    name: str
    unit: str
    value: float
    setting: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the command line.

    Attributes:
        quick: Use tiny sizes, only to check that the benchmark runs.
        rounds: Number of measurements of each figure.
        rivals: Also measure other programs on the same load.
    """

    report: Report
    quick: bool
    rounds: int
    rivals: bool

    def of_size(self, full: int, quick: int) -> int:
        """Return the amount for a full or a quick run."""
        return quick if self.quick else full


class Report:
    """Print figures."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def figure(self, name: str, unit: str, values: Sequence[float], **setting: object) -> float:
        """Print and return the median of some rounds; for many rounds also print the fastest tenth."""
        value = statistics.median(values)
        if len(values) >= _MANY:
            setting["p10"] = float(f"{sorted(values)[len(values) // 10]:.4g}")
        if self._as_json:
            line = {"name": name, "unit": unit, "value": float(f"{value:.5g}"), "n": len(values)}
            print(json.dumps({**line, "setting": setting}), flush=True)
        else:
            shown = " ".join(f"{name}={value}" for name, value in setting.items())
            print(f"{name:<44} {value:>14,.2f} {unit:<9} n={len(values):<5} {shown}", flush=True)
        return value

    def machine(self) -> None:
        """Print the machine and its load."""
        self.figure(
            "machine",
            "cores",
            [os.cpu_count() or 0],
            cpu=_cpu_model(),
            python=platform.python_version(),
            numba=importlib.metadata.version("numba"),
            numpy=importlib.metadata.version("numpy"),
            load_1m=round(os.getloadavg()[0], 1),
        )


def read_options(doc: str | None, *, rivals: bool = False, rounds: int = 7) -> Options:
    """Parse the command line of a benchmark without options of its own; see `options_parser`."""
    return options_of(options_parser(doc, rivals=rivals, rounds=rounds).parse_args())


def options_parser(doc: str | None, *, rivals: bool = False, rounds: int = 7) -> argparse.ArgumentParser:
    """Return the argument parser of a benchmark.

    Args:
        doc: Docstring of the benchmark's module.
        rivals: Whether it can measure other programs too.
        rounds: Default number of rounds.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: show that it runs")
    parser.add_argument(
        "--rounds", type=int, default=rounds, help="rounds of each figure (default: %(default)s)"
    )
    if rivals:
        parser.add_argument("--rivals", action="store_true", help="also measure rivals on the same load")
    return parser


def options_of(read: argparse.Namespace) -> Options:
    """Return the options that all benchmarks have."""
    rounds = 1 if read.quick else read.rounds
    return Options(Report(as_json=read.json), read.quick, rounds, getattr(read, "rivals", False))


def each_us(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Return the wall time of each call, for calls too short to be counted in CPU time."""
    times = []
    for call in calls:
        started_ns = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - started_ns) / 1000)
    return times


def cpu_s(work: Callable[[], object]) -> float:
    """Return this process's CPU time for some work, which excludes other load on the machine."""
    started_s = time.process_time()
    work()
    return time.process_time() - started_s


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
