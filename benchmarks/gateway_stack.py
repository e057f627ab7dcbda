"""A gateway under load: a real Envoy and the router (or another picker) in front of fake pods.

Starts the processes and measures their CPU per request, read from /proc (Linux). Messages between Envoy and
its ext_proc service are counted by Envoy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import urllib3

from benchmarks import BASE_PORT
from benchmarks.fake_pod import model_directory
from kvroute.envoy_config import Door
from kvroute.stack import HOST, ChildPlan, StackOptions, StackPlan, await_pods, plan_stack
from kvroute.supervisor import Supervisor, check_ports

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LOAD_TIMEOUT_S = 120.0
# The access log's last flush belongs to the period's requests.
_SETTLE_S = 0.3
# The initial blocks are applied once no process uses CPU any more.
_CALM_CORES, _CALM_LOOKS, _CALM_TIMEOUT_S = 0.15, 3, 120.0
# Offsets from the base port: of the gateway, and of Envoy's admin API.
_GATEWAY_PORT, _ADMIN_PORT = 50, 51
_NEXT_ROUTER = 10  # ports between a router and the next one
_ANSWERS = "http.gateway.ext_proc.stream_msgs_received"
_ADMITTED = "llm_d_epp_kv_cache_index_admissions_total"


@dataclass(frozen=True, slots=True)
class Effort:
    """Number of rounds, and seconds of each.

    Attributes:
        quick: Only check that everything runs, without warm-up.
    """

    rounds: int
    seconds: float
    quick: bool = False


@dataclass(frozen=True, slots=True)
class PickerPlace:
    """Arguments of another picker that replaces the router.

    Attributes:
        base_port: gRPC port; ports up to `base_port` + 50 are reserved for it, except the third, Envoy's.
        first_pod_port: First of the pods' ports on 127.0.0.1.
        responses: Whether Envoy streams responses to the picker.
    """

    base_port: int
    first_pod_port: int
    pods: int
    responses: Literal["skip", "full"]


Picker = Callable[[PickerPlace], Sequence[ChildPlan]]
"""Processes of the picker and of the pods; the picker is named "router"."""


@dataclass(frozen=True, slots=True)
class StackSetting:
    """Configuration of a measured stack.

    Attributes:
        picker: Picker that replaces the router; None: the router.
        routers: Number of routers, which share their requests in flight; the router itself is "router".
        with_events: Whether the pods publish events and have the bodies' prompts cached.
    """

    door: Door = "check_grpc"
    responses: Literal["skip", "full"] = "skip"
    pods: int = 16
    routers: int = 1
    picker: Picker | None = None
    with_events: bool = True
    base_port: int = BASE_PORT
    router_flags: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Stretch:
    """Result of one period of load.

    Attributes:
        seen: Results as reported by the clients.
        cpu_ms: CPU milliseconds per request of each process.
        answers: Messages per request that Envoy received by ext_proc; only for that service.
    """

    seen: dict[str, float]
    cpu_ms: dict[str, float]
    answers: float


class GatewayStack:
    """A started stack."""

    def __init__(self, base_port: int, supervisor: Supervisor, events: Any, metrics_url: str) -> None:
        self.url = f"http://{HOST}:{base_port + _GATEWAY_PORT}"
        self.grpc_address = f"{HOST}:{base_port}"
        self._stats_url = f"http://{HOST}:{base_port + _ADMIN_PORT}/stats?filter=^{_ANSWERS}$"
        self._metrics_url = metrics_url
        self._events = events
        self._pids = {child.plan.name: child.process.pid for child in supervisor.children}

    def load(self, bodies: Path, clients: int, seconds: float, *, repeated: bool = False) -> Stretch:
        """Send HTTP load to the gateway: chats with a new turn each, or repeated chats."""
        return self._stretch("benchmarks.load", self.url, bodies, clients, seconds, repeated=repeated)

    def pick_load(self, bodies: Path, callers: int, seconds: float, *, repeated: bool = False) -> Stretch:
        """Send the same load as PickEndpoint calls to the router."""
        address = self.grpc_address
        return self._stretch("benchmarks.pick_load", address, bodies, callers, seconds, repeated=repeated)

    def store_blocks(self, per_s: int) -> None:
        """Set the number of blocks that the pods store per second."""
        self._events.stdin.write(f"{per_s}\n".encode())
        self._events.stdin.flush()

    def admitted_blocks(self) -> int:
        """Return the number of blocks that the router has applied from events."""
        page: str = urllib3.request("GET", self._metrics_url).data.decode()
        return int(float(page.partition(f"\n{_ADMITTED} ")[2].partition("\n")[0]))

    def cpu_s(self, name: str) -> float:
        """Return the CPU seconds that a process has used."""
        return process_cpu_s(self._pids[name])

    def routers_cpu_s(self) -> float:
        """Return the CPU seconds that all routers have used."""
        return sum(self.cpu_s(name) for name in self._pids if name.startswith("router"))

    def _stretch(
        self, module: str, target: str, bodies: Path, clients: int, seconds: float, *, repeated: bool
    ) -> Stretch:
        answers = self._answers()
        before = {name: self.cpu_s(name) for name in self._pids}
        seen = run_load(module, target, bodies, clients, seconds, repeated=repeated)
        time.sleep(_SETTLE_S)
        requests = max(1, seen["requests"])
        cpu_ms = {name: 1000 * (self.cpu_s(name) - before[name]) / requests for name in before}
        return Stretch(seen, cpu_ms, (self._answers() - answers) / requests)

    def _answers(self) -> int:
        """Return the number of ext_proc messages that Envoy has received."""
        page: str = urllib3.request("GET", self._stats_url).data.decode()
        return int(page.partition(": ")[2] or 0)


@contextmanager
def gateway_stack(setting: StackSetting, bodies: Path, directory: Path) -> Iterator[GatewayStack]:
    """Start a stack; stop it on exit."""
    base = setting.base_port
    gateway = base + _GATEWAY_PORT
    model = str(model_directory(bodies))
    options = StackOptions(
        replicas=setting.pods,
        port=gateway,
        base_port=base,
        model=model,
        door=setting.door,
        responses=setting.responses,
    )
    plan = plan_stack(options, directory)
    check_ports([*plan.ports, base + _ADMIN_PORT])
    router, envoy = (child for child in plan.children if child.name in ("router", "envoy"))
    http, *told = first_pod_ports(plan)[:3]
    if setting.picker:
        children = setting.picker(PickerPlace(base, http, setting.pods, setting.responses))
    else:
        router = replace(router, argv=[*router.argv, *setting.router_flags])
        children = [fake_pods(http, setting.pods), *_peers(router, setting.routers)]
    plan = replace(plan, children=[*children, envoy])
    for name, text in plan.files.items():
        (directory / name).write_text(text)
    routers = [child.ports[0] for child in plan.children if child.name.startswith("router")]
    (directory / "envoy.json").write_text(_with_admin(plan, base + _ADMIN_PORT, routers))
    supervisor = Supervisor(directory, lambda _line: None)
    events = _events(told, setting.pods, bodies) if setting.with_events and not setting.picker else None
    try:
        supervisor.start(plan.children)
        if events is not None:
            await_pods(plan, supervisor.check)
        stack = GatewayStack(base, supervisor, events, f"{plan.router_debug_url}/metrics")
        if events is not None:
            _await_calm(lambda: stack.routers_cpu_s() + process_cpu_s(events.pid))
        yield stack
    finally:
        supervisor.stop()
        if events is not None:
            events.kill()
            events.communicate()


def bare_picker(place: PickerPlace) -> Sequence[ChildPlan]:
    """Return the command of the router's server with services that do nothing."""
    grpc, http = place.base_port, place.first_pod_port
    argv = [sys.executable, "-m", "benchmarks.bare_picker", str(grpc), f"{HOST}:{http}", place.responses]
    return fake_pods(http, place.pods), ChildPlan("router", argv, (grpc,))


def fake_pods(first_port: int, number: int, *hosts: str) -> ChildPlan:
    """Return the command of pods that compute nothing, on `number` ports of each host (127.0.0.1)."""
    argv = [sys.executable, "-m", "benchmarks.fake_pod", str(first_port), str(number), *hosts]
    return ChildPlan("pods", argv, range(first_port, first_port + number))


def _peers(router: ChildPlan, number: int) -> Sequence[ChildPlan]:
    """Return so many routers that know each other, each on the ports after the one before."""
    if number == 1:
        return [router]
    routers = []
    for at in range(number):
        ports = [port + at * _NEXT_ROUTER for port in router.ports]
        moved = {str(old): str(new) for old, new in zip(router.ports, ports, strict=True)}
        others = [router.ports[0] + other * _NEXT_ROUTER for other in range(number) if other != at]
        peers = [word for port in others for word in ("--peer", f"{HOST}:{port}")]
        argv = [*(moved.get(word, word) for word in router.argv), "--hash-seed", "7", *peers]
        ready = f"http://{HOST}:{ports[-1]}/ready"
        routers.append(ChildPlan("router" if at == 0 else f"router-{at}", argv, ports, ready))
    return routers


def _with_admin(plan: StackPlan, port: int, routers: Sequence[int]) -> str:
    """Return Envoy's configuration with admin pages, without health checks, which some pickers lack."""
    address = {"socket_address": {"address": HOST, "port_value": port}}
    config = {**json.loads(plan.files["envoy.json"]), "admin": {"address": address}}
    for cluster in config["static_resources"]["clusters"]:
        cluster.pop("health_checks", None)
        if cluster["name"] == "router":
            (group,) = cluster["load_assignment"]["endpoints"]
            group["lb_endpoints"] = [
                {"endpoint": {"address": {"socket_address": {"address": HOST, "port_value": each}}}}
                for each in routers
            ]
    return json.dumps(config)


def _await_calm(cpu_s: Callable[[], float]) -> None:
    deadline_s, calm = time.monotonic() + _CALM_TIMEOUT_S, 0
    while calm < _CALM_LOOKS:
        if time.monotonic() > deadline_s:
            raise TimeoutError("the router is still busy with what the pods hold from the start")
        before_s, then_s = cpu_s(), time.monotonic()
        time.sleep(_SETTLE_S)
        calm = calm + 1 if cpu_s() - before_s < _CALM_CORES * (time.monotonic() - then_s) else 0


def run_load(
    module: str, target: str, bodies: Path, clients: int, seconds: float, *, repeated: bool = False
) -> dict[str, float]:
    """Run one period of load in a child process."""
    argv = [sys.executable, "-m", module, target, str(bodies), str(clients), str(seconds)]
    argv += ["repeated"] if repeated else []
    if sys.stderr.isatty():
        print(f"period of {seconds:g} s: {clients} clients send {bodies.name}", file=sys.stderr)
    done = subprocess.run(argv, stdout=subprocess.PIPE, timeout=_LOAD_TIMEOUT_S, check=True)
    seen: dict[str, float] = json.loads(done.stdout)
    return seen


def process_cpu_s(pid: int) -> float:
    """Return user and system time of a process and all its threads (/proc/PID/stat, fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def first_pod_ports(plan: StackPlan) -> Sequence[int]:
    """Return the first pod's ports for HTTP, events and replay; the other pods' ports follow."""
    return next(child.ports for child in plan.children if child.name.startswith("model-server"))


def _events(ports: Sequence[int], number: int, bodies: Path) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "benchmarks.fake_events", *map(str, ports), str(number), str(bodies)]
    return subprocess.Popen(argv, stdin=subprocess.PIPE)
