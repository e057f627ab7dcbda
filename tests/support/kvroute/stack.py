"""Local stack (model servers, router, Envoy) for tests, on free ports."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import urllib3
from openai import OpenAI

from kvroute.router_pages import RouterPages
from kvroute.stack import StackOptions, StackPlan, await_pods, plan_stack
from kvroute.supervisor import Child, Supervisor
from tests.support.loopback import free_base
from tests.support.router.envoy import patient

DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class RunningStack:
    """Running stack."""

    plan: StackPlan
    supervisor: Supervisor
    directory: Path
    closing: ExitStack

    def openai(self, **settings: Any) -> OpenAI:
        """Return an OpenAI client of the gateway, closed with the stack."""
        settings = {"api_key": "none", "timeout": 60.0, **settings}
        return self.closing.enter_context(OpenAI(base_url=f"{self.plan.gateway_url}/v1", **settings))

    def decision(self, request_id: str) -> dict[str, Any]:
        """Return the router's decision record of a request."""
        return RouterPages(self.plan.router_debug_url).decision(request_id)

    def child(self, name: str) -> Child:
        """Return the child process of that name."""
        return next(child for child in self.supervisor.children if child.plan.name == name)

    def child_of(self, pod: str) -> Child:
        """Return the model server process of the pod at "ip:port"."""
        return next(
            child for child in self.supervisor.children if f"{child.plan.ports[0]}" == pod.rsplit(":")[-1]
        )

    def metrics_page(self, url: str | None = None) -> str:
        """Return /metrics of the router, or of the server at `url`."""
        page = urllib3.request("GET", f"{url or self.plan.router_debug_url}/metrics", timeout=300)
        return page.data.decode()

    def metric(self, name: str, url: str | None = None) -> float:
        """Return the sum of a metric's samples at the router, or at `url`."""
        page = self.metrics_page(url)
        lines = [line for line in page.splitlines() if line.split("{")[0].split(" ")[0] == name]
        assert lines, f"no metric {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def unread_batches(self) -> float:
        """Return the event batches that the pods' processes have published less those the router received.

        It is 0 if the router has received all, until a pod restarts: its new process counts from 0.
        """
        received = "llm_d_epp_kv_cache_events_messages_received_total"
        page = self.metrics_page().splitlines()
        pods = self.plan.pod_urls
        lines = [line for line in page if line.startswith(received) and any(pod in line for pod in pods)]
        published = "kvroute_kv_event_batches_published_total"
        sent = sum(self.metric(published, url) for url in pods.values())
        return sent - sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@contextmanager
def running_stack(directory: Path, *router_flags: str, **options: Any) -> Iterator[RunningStack]:
    """Run a stack of two model servers, its router with further flags; stop it at the end."""
    wanted = on_free_ports(StackOptions(**{"replicas": 2, **options}))
    plan = plan_stack(wanted, directory)
    children = [
        replace(child, argv=[*child.argv, *router_flags]) if child.name == "router" else child
        for child in plan.children
    ]
    for name, text in plan.files.items():
        (directory / name).write_text(text)
    (directory / "envoy.json").write_text(json.dumps(patient(json.loads(plan.files["envoy.json"]))))
    supervisor = Supervisor(directory, lambda _line: None)
    with ExitStack() as closing:
        closing.callback(supervisor.stop)
        supervisor.start(children)
        await_pods(plan, supervisor.check)
        yield RunningStack(plan, supervisor, directory, closing)


def on_free_ports(options: StackOptions) -> StackOptions:
    """Return the options with free ports."""
    above_base = replace(options, port=options.base_port + 50)
    base = free_base([port - options.base_port for port in plan_stack(above_base, Path()).ports])
    return replace(options, port=base + 50, base_port=base)


def wait_until(what: str, condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Wait for a condition; fail with `what` after the deadline."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {deadline_s:.0f} s: {what}"
        time.sleep(0.02)
