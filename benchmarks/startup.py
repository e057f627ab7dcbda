"""Time from the router's start until it is ready, with compiled kernels.

`python -m benchmarks.startup [--json] [--quick] [--rounds N]`. The router has index and tokenizer in its
process; 16 pods answer its probes and replay their events. `ready_s` is the time until the gRPC health
service of the chart's readiness probe reports SERVING (called every 10 ms), `ready_cpu_s` the process's CPU
until then (Linux). `imports_s` and `imports_cpu_s`, measured in turns, are those of an interpreter that only
imports the router's required libraries.
"""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks import BASE_PORT
from benchmarks.conversations import write_bodies
from benchmarks.fake_pod import model_directory
from benchmarks.gateway_stack import first_pod_ports, process_cpu_s
from benchmarks.report import read_options
from kvroute.stack import HOST, ChildPlan, StackOptions, StackPlan, plan_stack
from kvroute.supervisor import check_ports

_PODS = 16
_ROUNDS = 5
_POLL_S = 0.01
_TIMEOUT_S = 120.0
_LIBRARIES = (
    *("cachetools", "grpc", "grpc_health.v1.health", "grpc_reflection.v1alpha.reflection", "hpack"),
    *("httptools", "jinja2", "msgspec", "numba", "numpy", "prometheus_client", "tokenizers", "urllib3"),
    *("xxhash", "yaml", "zmq"),
    "envoy.service.accesslog.v3.als_pb2",
    "envoy.service.auth.v3.external_auth_pb2",
    "envoy.service.ext_proc.v3.external_processor_pb2",
)


@dataclass(frozen=True, slots=True)
class Taken:
    """Time and CPU of one start.

    Attributes:
        wall_s: Wall time since just before the process was started.
        cpu_s: User and system time of the process.
    """

    wall_s: float
    cpu_s: float


class NotReadyError(Exception):
    """Raised when a process ends, or times out, before it is ready."""


def main() -> int:
    """Measure and print all figures."""
    options = read_options(__doc__, rounds=_ROUNDS)
    options.report.machine()
    pods = options.of_size(_PODS, 2)
    with tempfile.TemporaryDirectory(prefix="kvroute-bench-") as name:
        directory = Path(name)
        bodies = write_bodies(directory, tiny=True)["small"]
        model = str(model_directory(bodies))
        plan = plan_stack(
            StackOptions(replicas=pods, port=BASE_PORT + 50, base_port=BASE_PORT, model=model), directory
        )
        (directory / "pods.yaml").write_text(plan.files["pods.yaml"])
        with _fake_pods(plan, pods, bodies):
            # The first start fills the caches, including the kernels'.
            turns = [(_imported(), _started(plan, directory)) for _ in range(options.rounds + 1)][1:]
    for what, starts in zip(("imports", "ready"), zip(*turns, strict=True), strict=True):
        setting = {"pods": pods} if what == "ready" else {"libraries": len(_LIBRARIES)}
        options.report.figure(f"{what}_s", "s", [taken.wall_s for taken in starts], **setting)
        options.report.figure(f"{what}_cpu_s", "s", [taken.cpu_s for taken in starts], **setting)
    return 0


def _imported() -> Taken:
    """Measure an interpreter that imports only the libraries."""
    argv = [sys.executable, "-c", f"import {', '.join(_LIBRARIES)}"]
    before, then_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(argv, check=True, timeout=_TIMEOUT_S)
    wall_s, after = time.monotonic() - then_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Taken(wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def _started(plan: StackPlan, directory: Path) -> Taken:
    """Measure one start of the router, and stop it."""
    router = next(child for child in plan.children if child.name == "router")
    check_ports(router.ports)
    log_path = directory / "router.log"
    with log_path.open("wb") as log:
        then_s = time.monotonic()
        with subprocess.Popen(router.argv, stdout=log, stderr=subprocess.STDOUT) as process:
            try:
                _await_ready(router, process)
                return Taken(time.monotonic() - then_s, process_cpu_s(process.pid))
            except (NotReadyError, grpc.RpcError) as error:
                raise NotReadyError(f"{error}; it said: {log_path.read_text()}") from None
            finally:
                process.kill()


def _await_ready(router: ChildPlan, process: subprocess.Popen[bytes]) -> None:
    _, health_port, *_ = router.ports
    _await(lambda: _listens(health_port), [process], "the router")
    with grpc.insecure_channel(f"{HOST}:{health_port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        # The service of the chart's readiness probe.
        request = health_pb2.HealthCheckRequest(service="readiness")
        serving = health_pb2.HealthCheckResponse.SERVING
        _await(lambda: check(request, timeout=_TIMEOUT_S).status == serving, [process], "the router")


@contextmanager
def _fake_pods(plan: StackPlan, number: int, bodies: Path) -> Iterator[None]:
    """Start pods that compute nothing; every second one has the bodies' prompts cached."""
    http, events, replay = first_pod_ports(plan)[:3]
    check_ports(plan.ports)
    commands = (
        ["benchmarks.fake_pod", str(http), str(number)],
        ["benchmarks.fake_events", str(events), str(replay), str(number), str(bodies)],
    )
    processes = [
        subprocess.Popen([sys.executable, "-m", *command], stdin=subprocess.PIPE) for command in commands
    ]
    try:
        ports = [first + at for first in (http, events, replay) for at in range(number)]
        _await(lambda: all(map(_listens, ports)), processes, "the pods")
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _await(is_so: Callable[[], bool], processes: Sequence[subprocess.Popen[bytes]], who: str) -> None:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while not is_so():
        if any(process.poll() is not None for process in processes):
            raise NotReadyError(f"{who} ended")
        if time.monotonic() > deadline_s:
            raise NotReadyError(f"{who} not ready after {_TIMEOUT_S:.0f} s")
        time.sleep(_POLL_S)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


if __name__ == "__main__":
    raise SystemExit(main())
