"""The benchmarks run and print the figures that other tools read; speed is not tested."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import go_picker
from kvroute.cli import bench
from tests.support.loopback import free_base
from tests.support.surface_file import lines_of

KVROUTE = str(Path(sys.executable).with_name("kvroute"))
NAMES = (
    "keys",
    "index",
    "events",
    "pick_inside",
    "pick_counts",
    "tokens",
    "schedule",
    "pick",
    "pickers",
    "queues",
    "replicas",
    "startup",
    "macs",
    "engine --part roofline",
)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
def test_every_figure_is_printed_as_one_json_object_a_line(name: str) -> None:
    """`kvroute bench NAME --json` prints the machine first, then each figure with unit and settings."""
    if name == "pick_counts" and shutil.which("valgrind") is None:
        pytest.skip("there is no valgrind")
    if name == "pickers" and not go_picker.program_path().exists():
        pytest.skip("the Go picker is not compiled: `python -m benchmarks.pickers` does that, in minutes")
    argv = [KVROUTE, "bench", *name.split(), "--json", "--quick"]
    environment = {**os.environ, "KVROUTE_BENCH_PORT": str(free_base(range(1_000)))}
    ran = subprocess.run(argv, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert lines[0]["name"] == "machine"
    assert lines[0]["setting"]["cpu"]
    for line in lines:
        assert list(line) == ["name", "unit", "value", "n", "setting"]
        assert line["unit"]
        assert line["n"] >= 1
    names = [line["name"] for line in lines]
    assert len(names) == len(set(names))
    assert lines_of(f"figure of {name}") <= set(names)


def test_an_unknown_benchmark_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown benchmark is rejected with the list of names."""
    assert bench(["speed"]) == 2
    assert "unknown benchmark speed; use one of keys, index, events" in capsys.readouterr().err


def test_help_lists_all_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a name the benchmarks are listed."""
    assert bench([]) == 0
    assert "keys" in capsys.readouterr().out
