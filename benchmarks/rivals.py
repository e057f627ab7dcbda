"""Other routers on the same load as kvroute: `sglang-router` and `smg` from PyPI.

Each has a virtual environment, created on demand in the user's cache directory and kept. Figures per router
are requests per second, latency added to the pods' own, and CPU of the whole path per request (ours: Envoy
and router), including failed requests.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import BASE_PORT
from benchmarks.gateway_stack import HOST, Effort, StackSetting, gateway_stack, process_cpu_s, run_load
from benchmarks.rival_environment import environment

_PODS = 16
_PODS_PORT, _PORT, _METRICS_PORT = BASE_PORT + 101, BASE_PORT, BASE_PORT + 1
_CLIENTS = 32
_READY_S = 60.0


@dataclass(frozen=True, slots=True)
class Rival:
    """A router from PyPI.

    Attributes:
        argv: Arguments after the environment's python, without workers and ports.
    """

    package: str
    argv: Sequence[str]


RIVALS = (
    Rival("sglang-router", ("-m", "sglang_router.launch_router", "--policy", "cache_aware")),
    Rival("smg", ("-m", "smg.launch_router", "--policy", "cache_aware")),
)


def measure_rivals(bodies: Path, directory: Path, effort: Effort, report: Any) -> None:
    """Measure kvroute, each rival and the bare pods, in turns."""
    direct = _direct(bodies, effort)
    base_p50_ms = sorted(one["p50_ms"] for one in direct)[len(direct) // 2]
    with gateway_stack(StackSetting(), bodies, directory) as stack:
        # Send each chat once before it continues, here and with the other routers.
        stack.load(bodies, _CLIENTS, effort.seconds, repeated=True)
        rounds = [stack.load(bodies, _CLIENTS, effort.seconds) for _ in range(effort.rounds + 1)][1:]
        alone = [stack.load(bodies, 1, effort.seconds).seen for _ in range(effort.rounds)]
    cpu_ms = [one.cpu_ms["router"] + one.cpu_ms["envoy"] for one in rounds]
    _report(report, "kvroute", [one.seen for one in rounds], alone, cpu_ms, base_p50_ms)
    for rival in RIVALS:
        try:
            python = environment(rival.package)
            seen, alone, cpu_ms = _measure(rival, python, bodies, effort)
        except (OSError, subprocess.SubprocessError, TimeoutError) as error:
            print(f"{rival.package}: not measured: {error}", file=sys.stderr)
            continue
        _report(report, rival.package.replace("-", "_"), seen, alone, cpu_ms, base_p50_ms)


def _report(
    report: Any,
    name: str,
    seen: Sequence[dict[str, float]],
    alone: Sequence[dict[str, float]],
    cpu_ms: Sequence[float],
    base_p50_ms: float,
) -> None:
    errors = int(sum(one["errors"] for one in seen))
    setting = {"pods": _PODS, "clients": _CLIENTS, "errors": errors}
    report.figure(f"path_{name}_per_s", "1/s", [one["per_s"] for one in seen], **setting)
    report.figure(f"path_{name}_cpu_ms", "ms", cpu_ms, **setting)
    report.figure(f"path_{name}_p99_ms", "ms", [one["p99_ms"] for one in seen], **setting)
    added = [one["p50_ms"] - base_p50_ms for one in alone]
    report.figure(f"path_{name}_added_p50_ms", "ms", added, pods=_PODS, clients=1)


def _direct(bodies: Path, effort: Effort) -> list[dict[str, float]]:
    """Return the latency of one client at one pod without a router, which every path includes."""
    with _pods():
        url = f"http://{HOST}:{_PODS_PORT}"
        return [run_load("benchmarks.load", url, bodies, 1, effort.seconds) for _ in range(effort.rounds)]


def _measure(
    rival: Rival, python: Path, bodies: Path, effort: Effort
) -> tuple[list[dict[str, float]], list[dict[str, float]], list[float]]:
    workers = [f"http://{HOST}:{_PODS_PORT + number}" for number in range(_PODS)]
    argv = [str(python), *rival.argv, "--host", HOST, "--port", str(_PORT)]
    argv += ["--prometheus-port", str(_METRICS_PORT), "--worker-urls", *workers]
    url = f"http://{HOST}:{_PORT}"
    with _pods(), _running(argv) as process:
        _await_port(_PORT, process)
        time.sleep(5.0)  # until it has probed all workers
        run_load("benchmarks.load", url, bodies, _CLIENTS, effort.seconds, repeated=True)
        seen, cpu_ms = [], []
        for _ in range(effort.rounds + 1):
            cpu_s = process_cpu_s(process.pid)
            seen.append(run_load("benchmarks.load", url, bodies, _CLIENTS, effort.seconds))
            cpu_ms.append(1000 * (process_cpu_s(process.pid) - cpu_s) / max(1, seen[-1]["requests"]))
        alone = [run_load("benchmarks.load", url, bodies, 1, effort.seconds) for _ in range(effort.rounds)]
    return seen[1:], alone, cpu_ms[1:]


@contextmanager
def _pods() -> Iterator[None]:
    argv = [sys.executable, "-m", "benchmarks.fake_pod", str(_PODS_PORT), str(_PODS)]
    with _running(argv) as process:
        _await_port(_PODS_PORT + _PODS - 1, process)
        yield


@contextmanager
def _running(argv: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _await_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + _READY_S
    while True:
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                return
        if process.poll() is not None:
            raise OSError(f"{process.args!r} ended with {process.returncode}")
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"port {port} is not open after {_READY_S:.0f} s")
        time.sleep(0.1)
