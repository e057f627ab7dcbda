"""The chart's Envoy over real routers: a router killed under load, draining, no router left."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import urllib3

from kvroute.stack import envoy_command
from router.app.server import RouterServer
from tests.support.chart.helm import CHART, clusters, envoy_bootstrap
from tests.support.loopback import HERE, free_ports, listens
from tests.support.router.bench import TINY
from tests.support.router.envoy import patient
from tests.support.router.server import FakePod, fake_pods, running_router, write_pods

BODY = json.dumps({"model": TINY, "prompt": "hello " * 100}).encode()
CLIENTS = 8
DOORS: list[dict[str, Any]] = [
    {"door": "check_grpc"},
    {"door": "ext_proc"},
]


@dataclass
class Deployed:
    """An Envoy as configured by the chart, over routers and fake pods."""

    gateway: int
    status: int
    admin: int
    router: RouterServer
    victim: subprocess.Popen[bytes] | None
    pods: list[FakePod]
    http: urllib3.PoolManager

    def post(self) -> int:
        """Send a request; return the status of the response."""
        return self.http.request("POST", f"http://{HERE}:{self.gateway}/v1/completions", body=BODY).status

    def get(self, port: int, path: str) -> urllib3.BaseHTTPResponse:
        """Get a page of Envoy."""
        return self.http.request("GET", f"http://{HERE}:{port}{path}")


@pytest.mark.parametrize("envoy", DOORS, ids=str)
def test_a_killed_router_fails_no_request(tmp_path: Path, envoy: dict[str, Any]) -> None:
    """Every request during a router's sudden death gets a response, by the other router's pick."""
    with deployed(tmp_path, envoy, victim=True) as stack:
        assert stack.victim is not None
        statuses: Counter[int] = Counter()
        stop, lock = threading.Event(), threading.Lock()

        def client() -> None:
            while not stop.is_set():
                status = stack.post()
                with lock:
                    statuses[status] += 1

        threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        wait_until(lambda: statuses[200] > 300, "traffic")
        stack.victim.kill()
        seen = statuses.total()
        wait_until(lambda: statuses.total() > seen + 300, "traffic after it")
        stop.set()
        for thread in threads:
            thread.join()
        if envoy["door"] == "ext_proc":
            # An ext_proc stream in progress cannot be retried: requests inside the killed router are lost.
            assert statuses.total() - statuses[200] <= CLIENTS
        else:
            assert set(statuses) == {200}


def test_without_routers_envoy_fails_open_if_configured(tmp_path: Path) -> None:
    """With no router left, requests go round-robin over the model servers if so configured."""
    with deployed(tmp_path, {"door": "check_grpc", "failOpen": True}) as stack:
        stack.router.close()
        before = [len(pod.seen) for pod in stack.pods]
        assert {stack.post() for _ in range(6)} == {200}
        assert all(len(pod.seen) > count for pod, count in zip(stack.pods, before, strict=True))


def test_draining_ends_when_the_last_request_does(tmp_path: Path) -> None:
    """Draining fails readiness at once, closes client connections, and waits for running requests."""
    with deployed(tmp_path, {"door": "check_grpc"}) as stack:
        assert stack.get(stack.status, "/ready").status == 200
        for pod in stack.pods:
            pod.may_finish.clear()
        answers: list[int] = []
        asking = threading.Thread(target=lambda: answers.append(stack.post()))
        asking.start()
        wait_until(lambda: any(pod.seen for pod in stack.pods), "a request on its way")
        script = CHART / "files" / "drain-envoy.sh"
        with subprocess.Popen(["bash", script, str(stack.admin), "0", "100"]) as drain:
            wait_until(lambda: stack.get(stack.status, "/ready").status == 503, "readiness to fail")
            with pytest.raises(subprocess.TimeoutExpired):
                drain.wait(2)
            for pod in stack.pods:
                pod.may_finish.set()
            assert drain.wait(300) == 0
        asking.join()
        assert answers == [200]
        closing = stack.http.request("POST", f"http://{HERE}:{stack.gateway}/v1/completions", body=BODY)
        assert (closing.status, closing.headers["connection"]) == (200, "close")


def test_the_status_port_serves_only_readiness_and_metrics(tmp_path: Path) -> None:
    """The status port serves readiness and metrics and no command."""
    with deployed(tmp_path, {"door": "check_grpc"}) as stack:
        assert "envoy_cluster_membership_healthy" in stack.get(stack.status, "/metrics").data.decode()
        assert stack.get(stack.status, "/quitquitquit").status == 404
        assert stack.http.request("POST", f"http://{HERE}:{stack.status}/metrics").status == 404


@contextmanager
def deployed(directory: Path, envoy: dict[str, Any], *, victim: bool = False) -> Iterator[Deployed]:
    """Run a router, optionally a second one to be killed, two fake pods, and the rendered Envoy."""
    with ExitStack() as stack:
        pods = stack.enter_context(fake_pods(2))
        pods_file = write_pods(directory / "pods.yaml", [pod.address for pod in pods])
        router = stack.enter_context(running_router(pods_file))
        routers = [router.ports]
        http = urllib3.PoolManager(maxsize=CLIENTS, retries=False, timeout=300)
        process = None
        if victim:
            ports, process = stack.enter_context(_router_process(pods_file))
            routers.insert(0, ports)
        for ports in routers:
            wait_until(partial(_ready, http, ports["metrics"]), "a router")
        bootstrap = envoy_bootstrap({"envoy": envoy})
        gateway, status, admin = free_ports(3)
        _place(bootstrap, gateway, status, admin, routers, [pod.port for pod in pods])
        path = directory / "envoy.json"
        path.write_text(json.dumps(patient(bootstrap)))
        command = [envoy_command(), "-c", str(path), "--disable-hot-restart", "--log-level", "error"]
        stack.enter_context(_ended(subprocess.Popen([*command, "--concurrency", "1"])))
        running = Deployed(gateway, status, admin, router, process, pods, http)
        wait_until(lambda: listens(gateway) and running.post() == 200, "Envoy")
        yield running


def _place(
    bootstrap: dict[str, Any],
    gateway: int,
    status: int,
    admin: int,
    routers: list[dict[str, int]],
    pods: list[int],
) -> None:
    """Replace the cluster's names by local addresses; the Service's address is the last router."""
    bootstrap["admin"]["address"] = _address(admin)
    for listener, port in zip(bootstrap["static_resources"]["listeners"], (gateway, status), strict=True):
        listener["address"] = _address(port)
    by_name = clusters(bootstrap)
    _endpoints(by_name["admin"], [{"address": _address(admin)}])
    placed = [
        {"address": _address(ports["grpc"]), "health_check_config": {"port_value": ports["grpc"]}}
        for ports in routers
    ]
    assignment = by_name["router"]["load_assignment"]["endpoints"]
    assignment[0]["lb_endpoints"] = [{"endpoint": endpoint} for endpoint in placed]
    assignment[1]["lb_endpoints"] = [{"endpoint": placed[-1]}]
    if "round_robin" in by_name:
        _endpoints(by_name["round_robin"], [{"address": _address(port)} for port in pods])


def _endpoints(cluster: dict[str, Any], endpoints: list[dict[str, Any]]) -> None:
    cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": [{"endpoint": each} for each in endpoints]}]


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": HERE, "port_value": port}}


@contextmanager
def _router_process(pods_file: Path) -> Iterator[tuple[dict[str, int], subprocess.Popen[bytes]]]:
    names = ("grpc", "grpc-health", "metrics")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    argv = [sys.executable, "-m", "router", "--pods-file", str(pods_file), "--host", HERE]
    argv += ["--grpc-port", str(ports["grpc"]), "--grpc-health-port", str(ports["grpc-health"])]
    argv += ["--metrics-port", str(ports["metrics"])]
    # The pods publish no events.
    argv += ["--bootstrap-timeout", "1"]
    with _ended(subprocess.Popen(argv, stderr=subprocess.DEVNULL)) as process:
        yield ports, process


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition that another process brings about."""
    deadline_s = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline_s, f"not in time: {what}"
        time.sleep(0.05)


def _ready(http: urllib3.PoolManager, port: int) -> bool:
    return listens(port) and http.request("GET", f"http://{HERE}:{port}/ready").status == 200
