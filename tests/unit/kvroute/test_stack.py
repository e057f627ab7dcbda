"""Plan, Envoy configuration and supervisor of the local stack."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from indexer.pod_entry import parse_pods
from kvroute import up
from kvroute.engines import engine_argument
from kvroute.envoy_config import EnvoySettings, bootstrap
from kvroute.stack import (
    ChildPlan,
    LocalStackError,
    StackOptions,
    StackPlan,
    envoy_command,
    plan_stack,
)
from kvroute.supervisor import Supervisor, check_ports
from tests.support.loopback import free_port


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    """Provide a supervisor whose children are stopped after the test."""
    supervisor = Supervisor(tmp_path, lambda _line: None)
    yield supervisor
    supervisor.stop()


def child(name: str, code: str) -> ChildPlan:
    """Return the plan of a child that opens its port and then runs `code`."""
    port = free_port()
    listen = f"import socket, time, signal, sys; s = socket.create_server(('127.0.0.1', {port}))"
    return ChildPlan(name, [sys.executable, "-c", f"{listen}\n{code}"], [port])


@pytest.mark.parametrize("replicas", [1, 2, 64])
def test_no_two_processes_share_a_port(replicas: int) -> None:
    """All ports of a plan differ, with any number of pods."""
    ports = plan_stack(StackOptions(replicas=replicas), Path()).ports
    assert len(ports) == len(set(ports)) == 4 * replicas + 6


@pytest.mark.parametrize(
    "options", [{"replicas": 0}, {"replicas": 101}, {"port": 0}, {"base_port": 65200}, {"base_port": 80}]
)
def test_an_option_out_of_range_is_rejected(options: dict[str, int]) -> None:
    """An option out of range is rejected with its value before anything is started."""
    with pytest.raises(LocalStackError, match=str(next(iter(options.values())))):
        plan_stack(StackOptions(**options), Path())


@pytest.mark.parametrize(
    ("option", "needed"),
    [({"responses": "full"}, "ext_proc"), ({"door": "ext_proc", "failure_mode_allow": True}, "check_grpc")],
)
def test_conflicting_options_are_rejected(option: dict[str, Any], needed: str) -> None:
    """Options that a protocol does not support are rejected, with the protocol that does."""
    with pytest.raises(ValueError, match=f"needs --door {needed}"):
        plan_stack(StackOptions(**option), Path())


@pytest.mark.parametrize("model", ["my-llama", "/models/my-llama"])
def test_a_checkpoints_tokenizer_is_the_routers_too(model: str) -> None:
    """The router tokenizes with the checkpoint's tokenizer, also if its path is a bare name."""
    router = next(
        child for child in plan_stack(StackOptions(model=model), Path()).children if child.name == "router"
    )
    assert f"my-llama={model}" in router.argv


def test_the_pods_file_lists_the_model_servers() -> None:
    """The pods file lists each model server with its ports."""
    plan = plan_stack(StackOptions(replicas=3), Path())
    pods = parse_pods(plan.files["pods.yaml"], "pods.yaml")
    assert {pod.pod for pod in pods} == set(plan.pod_urls)
    assert [f"http://{pod.admin}" for pod in pods] == plan.admin_urls


def test_a_stack_before_running_engines_has_no_model_servers(tmp_path: Path) -> None:
    """With --engine or --pods-file only router and Envoy start, and the router reads these pods."""
    engines = engine_argument("127.0.0.1:8000,replay=5558"), engine_argument("127.0.0.1:8001,events=5567")
    plan = plan_stack(StackOptions(engines=engines, tokenizers=(("m", "/models/m"),)), tmp_path)
    assert [child.name for child in plan.children] == ["router", "envoy"]
    assert list(plan.pod_urls) == ["127.0.0.1:8000", "127.0.0.1:8001"]
    assert "m=/models/m" in plan.children[0].argv
    pods = parse_pods(plan.files["pods.yaml"], "pods.yaml")
    assert [dict(pod.labels) for pod in pods] == [dict(engine.labels) for engine in engines]
    file = tmp_path / "own.yaml"
    file.write_text(plan.files["pods.yaml"])
    again = plan_stack(StackOptions(pods_file=file), tmp_path)
    assert again.pod_urls == plan.pod_urls
    assert str(file) in again.children[0].argv
    with pytest.raises(LocalStackError, match="exclude each other"):
        plan_stack(StackOptions(engines=engines, pods_file=file), tmp_path)


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"failure_mode_allow": True},
        {"door": "ext_proc"},
        {"door": "ext_proc", "responses": "full"},
    ],
)
def test_envoy_accepts_the_configuration(tmp_path: Path, chosen: dict[str, Any]) -> None:
    """Envoy accepts the bootstrap with each protocol and mode."""
    here = "127.0.0.1"
    settings = EnvoySettings(
        gateway=(here, 8080),
        routers=[(here, 9002)],
        pods=[(here, 8001)],
        round_robin=(here, 8081),
        least_requests=(here, 8082),
        **chosen,
    )
    path = tmp_path / "envoy.json"
    path.write_text(json.dumps(bootstrap(settings)))
    done = subprocess.run(
        [envoy_command(), "--mode", "validate", "--disable-hot-restart", "-c", path],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_port_in_use_is_reported() -> None:
    """A port in use is rejected by name."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        with pytest.raises(LocalStackError, match=str(port)):
            check_ports([port])


def test_a_child_that_exits_before_it_is_ready_is_reported(supervisor: Supervisor) -> None:
    """The error names the child, its exit status and its last log lines."""
    plan = ChildPlan(
        "loader", [sys.executable, "-c", "print('no such file'); raise SystemExit(3)"], [free_port()]
    )
    with pytest.raises(LocalStackError, match="loader exited with 3; last log lines: no such file"):
        supervisor.start([plan])


def test_a_slow_start_tells_what_the_program_says(tmp_path: Path) -> None:
    """A child that is not ready for a while is named with the end of its log, until it is ready."""
    lines: list[str] = []
    shown, port = tmp_path / "shown", free_port()

    def say(line: str) -> None:
        lines.append(line)
        if "loading 3 of 9" in line:
            shown.touch()

    code = (
        "import os, socket, time; print('loading 3 of 9', flush=True)\n"
        f"while not os.path.exists({str(shown)!r}): time.sleep(0.01)\n"
        f"s = socket.create_server(('127.0.0.1', {port})); time.sleep(60)"
    )
    supervisor = Supervisor(tmp_path, say, progress_s=0.01)
    supervisor.start([ChildPlan("loader", [sys.executable, "-c", code], [port])])
    supervisor.stop()
    assert "waiting for loader; last log lines: loading 3 of 9" in lines


def test_a_missing_program_is_reported(supervisor: Supervisor) -> None:
    """A missing executable is reported like an exit, without a traceback."""
    with pytest.raises(LocalStackError, match="no-such-program: No such file"):
        supervisor.start([ChildPlan("missing", ["no-such-program"], [free_port()])])


def test_an_exited_child_is_restarted(supervisor: Supervisor) -> None:
    """An exited child is restarted under a new pid and recorded."""
    supervisor.start([child("router", "time.sleep(60)")])
    first = kill(supervisor)
    supervisor.check()
    assert supervisor.children[0].process.pid != first
    assert supervisor.children[0].process.poll() is None
    assert supervisor.restarted == ["router"]


def test_a_restart_waits_for_its_delay(tmp_path: Path) -> None:
    """A child is not restarted before its delay has passed, and `check` does not block."""
    supervisor = Supervisor(tmp_path, lambda _line: None, back_off_s=(3600.0,))
    supervisor.start([child("router", "time.sleep(60)")])
    first = kill(supervisor)
    for _ in range(3):
        supervisor.check()
    assert [one.process.pid for one in supervisor.children] == [first]
    assert supervisor.restarted == ["router"]
    supervisor.stop()


def test_a_child_that_keeps_dying_ends_the_stack(tmp_path: Path) -> None:
    """After as many restarts as there are delays, the next exit is an error."""
    lines: list[str] = []
    supervisor = Supervisor(tmp_path, lines.append, back_off_s=(0.0, 0.0, 0.0))
    supervisor.start([child("router", "print('cannot go on', flush=True); time.sleep(60)")])
    for _ in range(3):
        kill(supervisor)
        supervisor.check()
    kill(supervisor)
    with pytest.raises(
        LocalStackError, match=r"router was killed by SIGKILL; .*; it was restarted 3 times within 60 s"
    ):
        supervisor.check()
    supervisor.stop()
    restarts = [line for line in lines if "restarting it" in line]
    assert len(restarts) == 3
    assert all("router was killed by SIGKILL" in line for line in restarts)


def test_last_log_lines_are_of_the_exited_process(tmp_path: Path) -> None:
    """An exit is reported with the log lines of that process, not of its predecessor."""
    once = tmp_path / "once"
    code = (
        f"import pathlib; again = pathlib.Path({str(once)!r}).exists(); pathlib.Path({str(once)!r}).touch();"
        "print('second life' if again else 'first life', flush=True); time.sleep(60)"
    )
    lines: list[str] = []
    supervisor = Supervisor(tmp_path, lines.append, back_off_s=(0.0, 0.0))
    supervisor.start([child("router", code)])
    for life in ("first life", "second life"):
        while life not in (tmp_path / "router.log").read_text():
            time.sleep(0.01)
        kill(supervisor)
        supervisor.check()
    supervisor.stop()
    first, second = (line for line in lines if "restarting it" in line)
    assert "last log lines: first life;" in first
    assert "last log lines: second life;" in second


def kill(supervisor: Supervisor) -> int:
    """Kill the only child; return its pid."""
    process = supervisor.children[0].process
    process.kill()
    process.wait()
    return process.pid


def test_stop_ends_a_child_that_ignores_sigterm(tmp_path: Path) -> None:
    """A child that ignores SIGTERM gets SIGKILL after the timeout."""
    supervisor = Supervisor(tmp_path, lambda _line: None, stop_timeout_s=0.3)
    plan = child(
        "stubborn", "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    supervisor.start([plan])
    process = supervisor.children[0].process
    while "deaf" not in (tmp_path / "stubborn.log").read_text():
        time.sleep(0.01)
    supervisor.stop()
    assert process.poll() is not None
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_a_restarted_program_explains_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stack with a restarted child exits with status 1 and names the child in one line."""
    plan = StackPlan([], {}, "", "", "", "", "", {}, [], "")
    monkeypatch.setattr(up, "plan_stack", lambda _options, _directory: plan)
    monkeypatch.setattr(up, "await_pods", lambda _plan, _check: None)
    monkeypatch.setattr(Supervisor, "start", lambda self, _plans: self.restarted.append("router"))
    monkeypatch.setattr(up, "run_demo", lambda *_: None)
    monkeypatch.setattr(up.signal, "signal", lambda _number, _handler: None)
    assert up.main(["--demo-only"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "kvroute up: exit status 1: programs exited and were restarted: router"
    ]
