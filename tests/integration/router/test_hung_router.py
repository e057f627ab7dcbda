"""A router that hangs behind a real Envoy: the failure mode or another router takes over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import urllib3

from kvroute.envoy_config import EnvoySettings, bootstrap
from tests.support.loopback import HERE, free_ports, listens
from tests.support.router.envoy import BODY, running_envoy
from tests.support.router.server import fake_pods, write_pods

CLIENTS = 8
# Above the time in which this test's Envoy detects a hung router, below the timeout of a pick (30 s).
SLOW_S = 25.0
# Routers close idle connections of their pages.
_ONCE = {"connection": "close"}


@dataclass
class Router:
    """A router process and its ports."""

    process: subprocess.Popen[bytes]
    grpc: int
    metrics: int


@dataclass
class Fleet:
    """Routers behind an Envoy."""

    url: str
    admin: str
    routers: list[Router]
    http: urllib3.PoolManager

    def post(self) -> tuple[int, bytes]:
        """Send a request; return the status and body of the response."""
        answer = self.http.request("POST", f"{self.url}/v1/completions", body=json.dumps(BODY).encode())
        return answer.status, answer.data

    def healthy(self) -> int:
        """Return the number of routers that Envoy considers healthy."""
        page = self.http.request("GET", f"{self.admin}/stats?filter=cluster.router.membership_healthy").data
        return int(page.decode().split(": ")[1])

    def picks(self, router: Router) -> float:
        """Return the number of picks of a router."""
        page = self.http.request(
            "GET", f"http://{HERE}:{router.metrics}/metrics", headers=_ONCE
        ).data.decode()
        lines = [line for line in page.splitlines() if line.startswith("kvroute_router_picks_total")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


@pytest.mark.parametrize("fail_open", [True, False], ids=["open", "closed"])
def test_a_hung_router_does_not_delay_later_requests(tmp_path: Path, fail_open: bool) -> None:
    """While a router hangs, requests in flight end within seconds and later ones get the failure mode."""
    with fleet(tmp_path, 1, fail_open=fail_open) as running:
        (router,) = running.routers
        with Load(running) as load:
            load.until(100)
            os.kill(router.process.pid, signal.SIGSTOP)
            wait_until(lambda: running.healthy() == 0, "Envoy to find the router hung")
            load.until(100)
            expected = 200 if fail_open else 503
            status, body = running.post()
            assert status == expected
            assert fail_open or json.loads(body)["error"]["code"] == 503
            os.kill(router.process.pid, signal.SIGCONT)
            wait_until(lambda: running.healthy() == 1, "Envoy to trust the router again")
            picked = running.picks(router)
            load.until(100)
        assert running.picks(router) > picked
        assert load.slowest_s < SLOW_S
        assert set(load.statuses) == {200, expected}


def test_envoy_retries_at_another_router(tmp_path: Path) -> None:
    """With two routers, one of them hung, no request fails: Envoy retries those in flight at the other."""
    with fleet(tmp_path, 2, fail_open=False) as running:
        hung, other = running.routers
        with Load(running) as load:
            load.until(100)
            os.kill(hung.process.pid, signal.SIGSTOP)
            wait_until(lambda: running.healthy() == 1, "Envoy to find the router hung")
            picked = running.picks(other)
            load.until(100)
        assert running.picks(other) >= picked + 100
        assert load.slowest_s < SLOW_S
        # Failing closed: a request without a pick would be a 503.
        assert set(load.statuses) == {200}


class Load:
    """Clients that send one request after the other."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._stop = threading.Event()
        self.statuses: list[int] = []
        self.slowest_s = 0.0
        self._threads = [threading.Thread(target=self._run) for _ in range(CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def until(self, count: int) -> None:
        """Wait for this many more responses."""
        wanted = len(self.statuses) + count
        wait_until(lambda: len(self.statuses) >= wanted, "answers")

    def _run(self) -> None:
        while not self._stop.is_set():
            began_s = time.monotonic()
            status, _ = self._fleet.post()
            self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
            self.statuses.append(status)
            time.sleep(0.05)


@contextmanager
def fleet(directory: Path, count: int, *, fail_open: bool) -> Iterator[Fleet]:
    """Run routers as processes that can be suspended, two fake pods and an Envoy."""
    with ExitStack() as stack:
        pods = stack.enter_context(fake_pods(2))
        pods_file = write_pods(directory / "pods.yaml", [pod.address for pod in pods])
        routers = [stack.enter_context(_router(pods_file)) for _ in range(count)]
        http = stack.enter_context(urllib3.PoolManager(maxsize=CLIENTS + 1, retries=False, timeout=300))
        for router in routers:
            wait_until(partial(_is_ready, http, router), "a router")
        gateway, admin = free_ports(2)
        settings = EnvoySettings(
            gateway=(HERE, gateway),
            routers=[(HERE, router.grpc) for router in routers],
            pods=[(pod.host, pod.port) for pod in pods],
            failure_mode_allow=fail_open,
        )
        config = bootstrap(settings)
        stack.enter_context(running_envoy(directory, config, gateway, admin))
        running = Fleet(f"http://{HERE}:{gateway}", f"http://{HERE}:{admin}", routers, http)
        wait_until(lambda: running.healthy() == count, "Envoy's trust in the routers")
        yield running


@contextmanager
def _router(pods_file: Path) -> Iterator[Router]:
    grpc, health, metrics = free_ports(3)
    argv = [sys.executable, "-m", "router", "--pods-file", str(pods_file), "--host", HERE]
    argv += ["--grpc-port", str(grpc), "--grpc-health-port", str(health), "--metrics-port", str(metrics)]
    # The pods publish no events.
    argv += ["--bootstrap-timeout", "1"]
    with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as process:
        try:
            yield Router(process, grpc, metrics)
        finally:
            process.kill()


def _is_ready(http: urllib3.PoolManager, router: Router) -> bool:
    page = f"http://{HERE}:{router.metrics}/ready"
    return listens(router.metrics) and http.request("GET", page, headers=_ONCE).status == 200


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition that another process brings about."""
    deadline_s = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline_s, f"not in time: {what}"
        time.sleep(0.05)
