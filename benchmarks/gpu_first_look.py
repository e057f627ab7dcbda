"""All figures of the engine on a GPU, unattended, in about half an hour.

    python -m benchmarks.gpu_first_look DIRECTORY [--model qwen3-8b] [--steps kernel prefill]

Each step runs in a process of its own with a timeout; a step that fails or is too slow does not stop the
others. DIRECTORY gets NAME.jsonl (figures) and NAME.log of each step, and steps.jsonl (how each ended). The
model has random weights, in the temporary directory (TMPDIR): 16 GB for Llama-3.1-8B.

Exit status: 0 if all steps passed, 1 if one failed, 2 without the device.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.engine_load import model_of
from benchmarks.random_checkpoint import write_checkpoint


@dataclass(frozen=True, slots=True)
class Step:
    """A step of `benchmarks.gpu_steps`."""

    name: str
    timeout_s: int  # at most ten minutes
    needs_cuda: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a step ended."""

    step: str
    status: str  # "passed", "failed" or "timeout"
    seconds: float


STEPS = (
    Step("card", 120),
    Step("contract", 600, needs_cuda=True),
    Step("kernel", 600),
    Step("prefill", 600),
    Step("decode", 600),
    Step("buckets", 600),
    Step("store", 300),
    Step("sleep", 300),
    Step("oom", 300, needs_cuda=True),
    Step("full_pool", 300),
    Step("http", 600),
)


def main() -> int:
    """Run the steps; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [step.name for step in STEPS]
    parser.add_argument("directory", type=Path, help="directory of the results")
    parser.add_argument("--device", default="cuda", help="torch device (default: %(default)s)")
    parser.add_argument(
        "--model", metavar="DIR|NAME", help="config.json's directory, or a preset of the plan"
    )
    parser.add_argument("--steps", nargs="+", choices=names, default=names, help="run only these")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: show that it runs, also on a CPU")
    read = parser.parse_args()
    device = torch.device(read.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: torch finds none; to see the steps run: --device cpu --quick", file=sys.stderr)
        return 2
    if device.type != "cuda" and not read.quick:
        print(f"--device {device}: only with --quick; CPUs: kvroute bench engine", file=sys.stderr)
        return 2
    steps = [
        step for step in STEPS if step.name in read.steps and (device.type == "cuda" or not step.needs_cuda)
    ]
    read.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvroute-bench-") as checkpoint:
        write_checkpoint(model_of(read.model, device, quick=read.quick), Path(checkpoint))
        options = [checkpoint, "--device", read.device, *(["--quick"] if read.quick else [])]
        outcomes = [run_step(step, options, read.directory) for step in steps]
    lines = "".join(json.dumps(asdict(outcome)) + "\n" for outcome in outcomes)
    (read.directory / "steps.jsonl").write_text(lines)
    return int(any(outcome.status != "passed" for outcome in outcomes))


def run_step(step: Step, options: list[str], directory: Path) -> Outcome:
    """Run a step with its output in `directory`; print its figures and how it ended."""
    figures, log = (directory / f"{step.name}.{suffix}" for suffix in ("jsonl", "log"))
    argv = [sys.executable, "-m", "benchmarks.gpu_steps", step.name, *options]
    started_s, status = time.monotonic(), "failed"
    with figures.open("w") as out, log.open("w") as err:
        child = subprocess.Popen(argv, stdout=out, stderr=err, start_new_session=True)
        try:
            if child.wait(step.timeout_s) == 0:
                status = "passed"
        except subprocess.TimeoutExpired:
            status = "timeout"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)  # with the processes that the step started
                child.wait()
    outcome = Outcome(step.name, status, round(time.monotonic() - started_s, 1))
    seen = "" if status == "passed" else f"; see {log}"
    print(f"{step.name}: {status} after {outcome.seconds} s{seen}", flush=True)
    for line in map(json.loads, figures.read_text().splitlines()):
        setting = " ".join(f"{name}={value}" for name, value in line["setting"].items())
        print(f"  {line['name']:<42}{line['value']:>12,.2f} {line['unit']:<9} {setting}", flush=True)
    return outcome


if __name__ == "__main__":
    raise SystemExit(main())
