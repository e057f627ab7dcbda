"""Starts a whole local stack (model servers, router, real Envoy) for a test, on ports that are free."""

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

from kvroute.stack import StackOptions, StackPlan, await_pods, decision, plan_stack
from kvroute.supervisor import Child, Supervisor
from tests.integration.envoy_support import patient
from tests.loopback import free_base

DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class RunningStack:
    """A stack that is up."""

    plan: StackPlan
    supervisor: Supervisor
    directory: Path
    closing: ExitStack

    def openai(self, **settings: Any) -> OpenAI:
        """An unmodified OpenAI client on Envoy's address, closed with the stack."""
        settings = {"api_key": "none", "timeout": 60.0, **settings}
        return self.closing.enter_context(OpenAI(base_url=f"{self.plan.gateway_url}/v1", **settings))

    def decision(self, request_id: str) -> dict[str, Any]:
        """The router's own explanation of one pick."""
        return decision(self.plan, request_id)

    def child(self, name: str) -> Child:
        """The running process of that name."""
        return next(child for child in self.supervisor.children if child.plan.name == name)

    def child_of(self, pod: str) -> Child:
        """The model server that serves at "ip:port"."""
        return next(
            child for child in self.supervisor.children if f"{child.plan.ports[0]}" == pod.rsplit(":")[-1]
        )

    def metrics_page(self, url: str | None = None) -> str:
        """The Prometheus page of the router, or of the server at `url`."""
        page = urllib3.request("GET", f"{url or self.plan.router_debug_url}/metrics", timeout=300)
        return page.data.decode()

    def metric(self, name: str, url: str | None = None) -> float:
        """Sum of a metric's samples, on the router's page or another's."""
        page = self.metrics_page(url)
        lines = [line for line in page.splitlines() if line.split("{")[0].split(" ")[0] == name]
        assert lines, f"no metric {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@contextmanager
def running_stack(directory: Path, **options: Any) -> Iterator[RunningStack]:
    """Starts a stack, and stops it at the end whatever happened."""
    wanted = on_free_ports(StackOptions(**options))
    plan = plan_stack(wanted, directory)
    for name, text in plan.files.items():
        (directory / name).write_text(text)
    (directory / "envoy.json").write_text(json.dumps(patient(json.loads(plan.files["envoy.json"]))))
    supervisor = Supervisor(directory, lambda _line: None)
    with ExitStack() as closing:
        closing.callback(supervisor.stop)
        supervisor.start(plan.children)
        await_pods(plan, supervisor.check)
        yield RunningStack(plan, supervisor, directory, closing)


def on_free_ports(options: StackOptions) -> StackOptions:
    """The same stack, on ports that are free."""
    above_base = replace(options, port=options.base_port + 50)
    base = free_base([port - options.base_port for port in plan_stack(above_base, Path()).ports])
    return replace(options, port=base + 50, base_port=base)


def wait_until(what: str, condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Waits for a condition; fails with `what` when it does not come true."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {deadline_s:.0f} s: {what}"
        time.sleep(0.02)
