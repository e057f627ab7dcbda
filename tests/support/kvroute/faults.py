"""Engines, routers and Envoys with one fault each, for tests of `kvroute doctor`."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import urllib3

from kvroute.engines import engine_argument
from kvroute.envoy_config import EnvoySettings, bootstrap
from kvroute.stack import ChildPlan, StackOptions, plan_stack
from kvroute.supervisor import Supervisor
from tests.support.kvroute.stack import on_free_ports, wait_until
from tests.support.loopback import HERE, free_ports
from tests.support.router.envoy import running_envoy
from tokenization import TINY_DIRECTORY

DRAFTS = "vllm:spec_decode_num_drafts_total"


@dataclass(frozen=True)
class RunningEngine:
    """Running model server."""

    http: int
    events: int
    replay: int
    admin: int

    @property
    def address(self) -> str:
        return f"{HERE}:{self.http}"

    @property
    def flag(self) -> str:
        """Value of `--engine` with its ports."""
        return f"{self.address},events={self.events},replay={self.replay}"

    def post_admin(self, path: str) -> None:
        """Send a request to the administration port."""
        assert urllib3.request("POST", f"http://{HERE}:{self.admin}{path}").status == 200


@dataclass(frozen=True)
class RunningRouter:
    """Running router process."""

    pid: int
    grpc: int
    metrics: int

    @property
    def flags(self) -> list[str]:
        """Flags of the doctor that name it."""
        return ["--router-url", f"http://{HERE}:{self.metrics}", "--router-grpc", f"{HERE}:{self.grpc}"]


@contextmanager
def running_engines(directory: Path, *faults: tuple[str, ...]) -> Iterator[list[RunningEngine]]:
    """Run one model server for each tuple of further flags."""
    options = on_free_ports(StackOptions(replicas=len(faults)))
    children = plan_stack(options, directory).children[: len(faults)]
    supervisor = Supervisor(directory, lambda _line: None)
    plans = [
        ChildPlan(child.name, [*child.argv, *flags], child.ports, child.ready_url)
        for child, flags in zip(children, faults, strict=True)
    ]
    try:
        supervisor.start(plans)
        bases = (options.base_port + kind for kind in range(1, len(faults) + 1))
        yield [RunningEngine(*(base + kind for kind in (100, 200, 300, 400))) for base in bases]
    finally:
        supervisor.stop()


@contextmanager
def running_router_before(
    directory: Path, engines: list[RunningEngine], *flags: str, labels: Mapping[str, str] | None = None
) -> Iterator[RunningRouter]:
    """Run a router for engines, whose pods have further labels, until it is ready."""
    directory.mkdir(exist_ok=True)
    grpc, health, metrics = free_ports(3)
    entries = [engine_argument(engine.flag) for engine in engines]
    endpoints = [
        {"name": entry.name, "address": entry.address, "port": str(entry.port),
         "labels": {**entry.labels, **(labels or {})}}
        for entry in entries
    ]  # fmt: skip
    (directory / "pods.yaml").write_text(json.dumps({"endpoints": endpoints}))
    argv = [sys.executable, "-m", "router", "--pods-file", str(directory / "pods.yaml"), "--host", HERE]
    argv += ["--grpc-port", str(grpc), "--grpc-health-port", str(health), "--metrics-port", str(metrics)]
    plan = ChildPlan("router", [*argv, *flags], [grpc], f"http://{HERE}:{metrics}/ready")
    supervisor = Supervisor(directory, lambda _line: None)
    try:
        supervisor.start([plan])
        pods = f"http://{HERE}:{metrics}/debug/pods"
        wait_until(
            "views",
            lambda: all(pod["view"] == "EXACT" for pod in urllib3.request("GET", pods).json()["pods"]),
        )
        yield RunningRouter(supervisor.children[0].process.pid, grpc, metrics)
    finally:
        supervisor.stop()


@contextmanager
def running_gateway(
    directory: Path,
    router: RunningRouter,
    change: Callable[[dict[str, Any]], None] = lambda _config: None,
    elsewhere: RunningEngine | None = None,
) -> Iterator[list[str]]:
    """Run an Envoy before a router; yield the doctor's flags that name it.

    Args:
        change: Changes Envoy's configuration.
        elsewhere: Engine of the cluster round_robin.
    """
    directory.mkdir(exist_ok=True)
    gateway, admin, unused = free_ports(3)
    settings = EnvoySettings(
        gateway=(HERE, gateway),
        routers=[(HERE, router.grpc)],
        pods=[(HERE, elsewhere.http)] if elsewhere else [],
        round_robin=(HERE, unused) if elsewhere else None,
    )
    config = bootstrap(settings)
    change(config)
    with running_envoy(directory, config, gateway, admin):
        healthy = f"http://{HERE}:{admin}/stats?filter=cluster.router.membership_healthy"
        wait_until("Envoy's trust in the router", lambda: b": 1" in urllib3.request("GET", healthy).data)
        yield ["--gateway-url", f"http://{HERE}:{gateway}", "--envoy-admin", f"http://{HERE}:{admin}"]


@contextmanager
def drafting_metrics(engine: RunningEngine) -> Iterator[int]:
    """Run a server with an engine's metrics and a drafter's counter; yield its port."""

    class Handler(BaseHTTPRequestHandler):
        """Handler that answers every GET with the page."""

        def do_GET(self) -> None:
            """Send the page."""
            page = urllib3.request("GET", f"http://{engine.address}/metrics").data
            drafts = f'# TYPE {DRAFTS.removesuffix("_total")} counter\n{DRAFTS}{{engine="0"}} 7\n'
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page + drafts.encode())

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer((HERE, 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def other_ids(directory: Path) -> Path:
    """Write the tiny model's tokenizer with two digits exchanged: as many tokens, but other ids."""
    directory.mkdir()
    for file in TINY_DIRECTORY.iterdir():
        if file.is_file():
            (directory / file.name).write_bytes(file.read_bytes())
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    path.write_text(json.dumps(tokenizer))
    return directory


def longer_template(directory: Path) -> Path:
    """Write the tiny model's tokenizer with a longer chat template."""
    other_ids(directory)
    (directory / "tokenizer.json").write_bytes((TINY_DIRECTORY / "tokenizer.json").read_bytes())
    path = directory / "chat_template.jinja"
    path.write_text("Be brief. " + path.read_text())
    return directory
