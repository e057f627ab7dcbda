"""The benchmarks run, and print the figures that others look for; how fast is none of a test's business."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import go_picker
from router.bench import main

KVROUTE = str(Path(sys.executable).with_name("kvroute"))
PICKERS = ("kvroute", "gie_epp")
PICK_DOORS = ("check_grpc", "extproc")
SCHEDULE = {f"schedule_{pods}_pods{order}_us" for pods in (5, 25, 100, 400) for order in ("", "_ordered")}
FIGURES = {
    "keys": {"keys_16384_tokens_block16_us"},
    "index": {
        *(f"match_1000x256_{size}_{state}_us" for size in ("1M", "10M") for state in ("hot", "cold")),
        "match_1000x256_all_us",
        "match_1000x256_staggered_us",
        "match_under_100k_events_us",
        "bytes_per_block_1_holder",
        "bytes_per_extra_holder",
        "clear_pod_stall_ms",
        "churn_50M_resident_over_capacity",
        "memory_latency_ns",
    },
    "events": {
        f"{verb}_{blocks}_per_event{suffix}_blocks_per_s"
        for verb in ("ingest", "remove")
        for blocks in (32, 1)
        for suffix in ("", "_single_payloads", "_array", "_lora", "_slow_path", "_reference")
    },
    "pick_inside": {
        *(f"{what}_{size}_us" for what in ("route", "end") for size in ("small", "40kb", "400kb")),
        *(
            f"route_small_{step}_us"
            for step in ("tokens", "keys", "match", "schedule", "speculate", "decided")
        ),
    },
    "pick_counts": {
        f"request_small{at_once}_{what}"
        for at_once in ("", "_together")
        for what in ("instructions", "l1i_misses", "l1d_misses", "l2_misses")
    },
    "tokens": {
        *("next_turn_16k_ms", "next_turn_library_ms", "cold_16k_ms", "cold_16k_library_ms"),
        *("next_turn_16k_reasoning_ms", "render_16k_reasoning_ms", "other_question_16k_ms"),
        *("next_turn_16k_anthropic_ms", "next_turn_16k_responses_ms", "next_turn_of_many_ms"),
    },
    "schedule": SCHEDULE,
    "pick": {
        *(f"{door}_{size}_cpu_ms" for door in PICK_DOORS for size in ("small", "40kb", "400kb")),
        *(f"{door}_{what}" for door in PICK_DOORS for what in ("per_s", "p99_under_events_ms")),
        *("check_grpc_small_repeated_cpu_ms", "check_grpc_p99_ms", "check_grpc_per_s_under_events"),
        "check_grpc_floor_cpu_ms",
        *("extproc_full_small_cpu_ms", "pick_unary_cpu_ms", "chunk_full_cpu_us", "idle_100_pods_mcpu"),
        "route_small_us",
        *SCHEDULE,
    },
    "pickers": {
        *(f"picker_{size}_cpu_ratio" for size in ("small", "40kb", "400kb")),
        *(f"picker_{name}_small_{what}" for name in PICKERS for what in ("cpu_ms", "per_s", "p99_ms")),
        *(f"picker_{name}_chunk_cpu_us" for name in PICKERS),
    },
    "queues": {
        f"ttft_{size}_{load}_{policy}_ms"
        for size in ("short", "mixed")
        for load in ("4_pods_50", "4_pods_80", "8_pods_90")
        for policy in ("ordered", "fifo", "least_requests", "round_robin")
    },
    "replicas": {
        *(
            f"ttft_{size}_{load}_{routers}_ms"
            for size in ("short", "mixed")
            for load in ("4_pods_50", "4_pods_80", "8_pods_90")
            for routers in ("1_router", "4_routers_alone", "4_routers_shared_5ms_late")
        ),
        *(f"share_{what}_cpu_us" for what in ("ledger_alone", "tell", "take")),
        "share_late_ms",
    },
    "startup": {"ready_s", "ready_cpu_s", "imports_s", "imports_cpu_s"},
    "macs": {
        *(
            f"attention_{way}_{what}"
            for way in ("uncached", "cached")
            for what in ("step_macs", "by_closed_form")
        ),
        "attention_macs_saved_ratio",
        "model_macs_saved_ratio",
    },
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_printed_as_one_json_object_a_line(name: str) -> None:
    """`kvroute bench NAME --json` tells the machine first, then each figure with its unit and setting."""
    if name == "pick_counts" and shutil.which("valgrind") is None:
        pytest.skip("there is no valgrind")
    if name == "pickers" and not go_picker.program_path().exists():
        pytest.skip("the Go picker is not compiled: `python -m benchmarks.pickers` does that, in minutes")
    argv = [KVROUTE, "bench", name, "--json", "--quick"]
    ran = subprocess.run(argv, capture_output=True, text=True)
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
    assert FIGURES[name] <= set(names)


def test_an_unknown_benchmark_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong name is answered with those that there are."""
    assert main(["speed"]) == 2
    assert "speed; there are keys, index, events" in capsys.readouterr().err


def test_help_tells_all_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a name the benchmarks are listed."""
    assert main([]) == 0
    assert "keys" in capsys.readouterr().out
