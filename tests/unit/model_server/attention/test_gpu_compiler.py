"""The kernels compile for GPUs that need not be here: without spills, within the card, on tensor cores."""

import json
import os
import subprocess
import sys
from functools import cache

import pytest

# Shared memory of one program, in bytes: compute capabilities 8.0, 9.0 and 10.0.
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
# Instructions of the matrix units by which prefills reach their speed.
INSTRUCTIONS = {80: "mma", 90: "wgmma", 100: "tcgen05"}


@cache
def reports() -> list[dict[str, object]]:
    """Compile all kernels in a process of its own, since this one has Triton's interpreter."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.model_server.gpu_compiler", *map(str, SHARED_BYTES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("target", SHARED_BYTES)
def test_kernels_fit_the_card(target: int) -> None:
    """No kernel for heads of 64 and 128 elements spills registers, or needs more memory than there is."""
    found = [report for report in reports() if report["target"] == target]
    assert len(found) >= 8
    for report in found:
        assert report["spilled_bytes"] == 0, report
        assert int(str(report["shared_bytes"])) <= SHARED_BYTES[target], report


@pytest.mark.parametrize("target", SHARED_BYTES)
def test_prefills_use_the_tensor_cores(target: int) -> None:
    """Each prefill kernel has the card's own matrix instructions: wgmma on compute capability 9.0."""
    prefills = [
        report
        for report in reports()
        if report["target"] == target and str(report["variant"]).startswith("prefill")
    ]
    assert len(prefills) >= 2
    for report in prefills:
        assert int(str(report[INSTRUCTIONS[target]])) > 0, report
