"""What picking costs: the same Envoy, load and pods once with kvroute's pick and once with plain round-robin.

`python -m benchmarks.gateway [--responses skip|full] [--clients N] [--rounds N] [--seconds N]` (Linux). Sends
the same chat (about 2 KB or 40 KB) again and again and prints, as medians over rounds: requests per second,
latency, and the CPU of router and Envoy per request, read from the processes' own accounts. Round-robin is
the floor: Envoy without a pick.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from router.local.demo_texts import burst_messages
from router.local.stack import ChildPlan, StackOptions, StackPlan, plan_stack
from router.local.supervisor import Supervisor, check_ports

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Setting -> how many reports one prompt holds.
_PROMPTS = {"2kb": 1, "40kb": 20}


@dataclass(frozen=True, slots=True)
class Round:
    """One measured stretch of load."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    router_cpu_ms: float
    envoy_cpu_ms: float
    errors: int


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--responses", choices=("skip", "full"), default="skip")
    parser.add_argument("--pods", type=int, default=4)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--base-port", type=int, default=21000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvroute-bench-") as directory:
        plan = _plan(options, Path(directory))
        check_ports(plan.ports)
        for name, text in plan.files.items():
            (Path(directory) / name).write_text(text)
        supervisor = Supervisor(Path(directory), lambda line: print(line, file=sys.stderr))
        try:
            supervisor.start(plan.children)
            for size, reports in _PROMPTS.items():
                _measure(plan, supervisor, options, size, reports)
        finally:
            supervisor.stop()
    return 0


def _plan(options: argparse.Namespace, directory: Path) -> StackPlan:
    base = options.base_port
    stack = StackOptions(options.pods, base + 50, base, responses=options.responses)
    plan = plan_stack(stack, directory)
    children = [_faked(child) if child.name.startswith("model-server") else child for child in plan.children]
    return replace(plan, children=children)


def _faked(child: ChildPlan) -> ChildPlan:
    argv = [sys.executable, "-m", "benchmarks.fake_pod", str(child.ports[0])]
    return replace(child, argv=argv, ports=child.ports[:1])


def _measure(
    plan: StackPlan, supervisor: Supervisor, options: argparse.Namespace, size: str, reports: int
) -> None:
    text = "\n".join(burst_messages(number)[1]["content"] for number in range(1, reports + 1))
    body = json.dumps({"model": plan.model_name, "messages": [{"role": "user", "content": text}]}).encode()
    doors = {"kvroute": plan.gateway_url, "round_robin": plan.round_robin_url}
    rounds: dict[str, list[Round]] = {door: [] for door in doors}
    for number in range(options.rounds + 1):
        for door, url in doors.items():
            measured = _round(url, body, supervisor, options)
            if number:  # the first warms caches and connections
                rounds[door].append(measured)
    setting = {
        "responses": options.responses,
        "clients": options.clients,
        "pods": options.pods,
        "body_bytes": len(body),
        "cores": os.cpu_count(),
    }
    units = {"requests_per_s": "1/s", "errors": "1"}
    for door, measured_rounds in rounds.items():
        for field in Round.__slots__:
            value = statistics.median(getattr(one, field) for one in measured_rounds)
            name, unit = f"gateway_{size}_{door}_{field}", units.get(field, "ms")
            line = {"name": name, "unit": unit, "value": round(value, 3), "n": len(measured_rounds)}
            print(json.dumps({**line, "setting": setting}), flush=True)


def _round(url: str, body: bytes, supervisor: Supervisor, options: argparse.Namespace) -> Round:
    pids = {child.plan.name: child.process.pid for child in supervisor.children}
    router_s, envoy_s = _cpu_s(pids["router"]), _cpu_s(pids["envoy"])
    clients = [_Client(url, body) for _ in range(options.clients)]
    started_s = time.monotonic()
    for client in clients:
        client.start()
    time.sleep(options.seconds)
    for client in clients:
        client.stop.set()
    for client in clients:
        client.join()
    took_s = time.monotonic() - started_s
    time.sleep(0.2)  # the access log's last flush belongs to these requests
    times = sorted(t for client in clients for t in client.times_s)
    return Round(
        requests_per_s=len(times) / took_s,
        p50_ms=1000 * times[len(times) // 2],
        p99_ms=1000 * times[len(times) * 99 // 100],
        router_cpu_ms=1000 * (_cpu_s(pids["router"]) - router_s) / len(times),
        envoy_cpu_ms=1000 * (_cpu_s(pids["envoy"]) - envoy_s) / len(times),
        errors=sum(client.errors for client in clients),
    )


class _Client(threading.Thread):
    """Sends the same request again and again over one connection."""

    def __init__(self, url: str, body: bytes) -> None:
        super().__init__()
        self._address = urlsplit(url).netloc
        self._body = body
        self.stop = threading.Event()
        self.times_s: list[float] = []
        self.errors = 0

    def run(self) -> None:
        connection = http.client.HTTPConnection(self._address, timeout=30)
        while not self.stop.is_set():
            started_s = time.monotonic()
            try:
                connection.request(
                    "POST", "/v1/chat/completions", self._body, {"content-type": "application/json"}
                )
                response = connection.getresponse()
                response.read()
            except (OSError, http.client.HTTPException):
                self.errors += 1
                connection.close()
                continue
            self.errors += response.status != 200
            self.times_s.append(time.monotonic() - started_s)
        connection.close()


def _cpu_s(pid: int) -> float:
    """User and system time of a process and all its threads (/proc/PID/stat, fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


if __name__ == "__main__":
    raise SystemExit(main())
