"""`kvroute up` as a process: output, exit status and cleanup."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import urllib3

from kvroute.stack import LocalStackError, StackOptions, plan_stack
from kvroute.supervisor import check_ports
from tests.support.kvroute.faults import running_engines
from tests.support.kvroute.stack import on_free_ports, wait_until

RUN = "from kvroute.cli import main; raise SystemExit(main())"
# The demonstration with the load for slow models.
RUN_SMALL_DEMO = """
from functools import partial
from kvroute import up
from kvroute.demo.load import SMALL_LOAD
up.run_demo = partial(up.run_demo, load=SMALL_LOAD)
"""
# One model server is enough for tests of the command's end.
SMALL = ("--no-demo", "--replicas", "1")


def stack_ports() -> tuple[int, int]:
    """Return a free gateway port and base port."""
    options = on_free_ports(StackOptions())
    return options.port, options.base_port


def command(*arguments: str, ports: tuple[int, int], before: str = "") -> list[str]:
    """Return the command line of `kvroute up`, run after the Python code `before`."""
    return [sys.executable, "-c", before + RUN, "up",
            "--port", str(ports[0]), "--base-port", str(ports[1]), *arguments]  # fmt: skip


def all_free(ports: list[int]) -> bool:
    """Return whether every port can be bound."""
    try:
        check_ports(ports)
    except LocalStackError:
        return False
    return True


def pids_of(marker: str) -> dict[int, str]:
    """Return command lines by pid of processes whose command line contains the marker."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if marker in line:
                found[int(entry.name)] = line
    return found


def processes_of(marker: str) -> list[str]:
    """Return command lines of processes that contain the marker."""
    return list(pids_of(marker).values())


def kill_router(temporary: Path) -> None:
    """Kill the router of the stack with files in `temporary`, if it runs."""
    for pid, line in pids_of(str(temporary)).items():
        if "-m router" in line:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def running_command(
    ports: tuple[int, int], temporary: Path, *flags: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command; yield the process and its output once the stack is up; kill it at the end."""
    with subprocess.Popen(
        command(*(flags or SMALL), ports=ports),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        try:
            seen = ""
            while "Ctrl-C" not in seen:
                line = process.stdout.readline()
                assert line, f"ended early: {seen}"
                seen += line
            yield process, seen
        finally:
            process.kill()


def assert_nothing_left(ports: tuple[int, int], temporary: Path) -> None:
    """Assert that no port is bound, no file is left and no process runs."""
    if sys.platform == "linux":
        # The kernel ends a child that had just started, a moment after its parent.
        wait_until("no process is left", lambda: processes_of(str(temporary)) == [])
    plan = plan_stack(StackOptions(port=ports[0], base_port=ports[1]), Path())
    check_ports(plan.ports)
    assert list(temporary.iterdir()) == []


def test_the_demonstration_ends_and_cleans_up(tmp_path: Path) -> None:
    """With --demo-only the command prints its report without colours, exits with 0 and leaves nothing."""
    ports = stack_ports()
    done = subprocess.run(
        command("--demo-only", ports=ports, before=RUN_SMALL_DEMO),
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("first answer, by", "chat 1 ", "first token: ", "from cache: ", "computed: ", "no gain: "):
        assert line in done.stdout
    assert "predicted = delivered in" in done.stdout
    assert f"dashboard, while the stack is up: http://127.0.0.1:{ports[1] + 2}/" in done.stdout
    assert "\x1b" not in done.stdout
    assert_nothing_left(ports, tmp_path)


def test_ctrl_c_cleans_up(tmp_path: Path) -> None:
    """SIGINT ends the stack with status 0 and leaves no process, port or file."""
    ports = stack_ports()
    with running_command(ports, tmp_path) as (process, _seen):
        assert urllib3.request("GET", f"http://127.0.0.1:{ports[0]}/v1/models").status == 200
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=300)
    assert process.returncode == 0, rest
    assert_nothing_left(ports, tmp_path)


def test_running_engines_get_a_router_and_an_envoy(tmp_path: Path) -> None:
    """With --engine router and Envoy start before running servers, and each fault is told with its flag."""
    faults = (), ("--no-enable-prefix-caching",)
    (tmp_path / "engines").mkdir()
    (tmp_path / "stack").mkdir()
    with running_engines(tmp_path / "engines", *faults) as engines:
        flags = [each for engine in engines for each in ("--engine", engine.flag)]
        ports = stack_ports()
        with running_command(ports, tmp_path / "stack", *flags) as (process, seen):
            body = {"model": "kvroute-tiny", "prompt": "Hello", "max_tokens": 4}
            url = f"http://127.0.0.1:{ports[0]}/v1/completions"
            answers = [urllib3.request("POST", url, json=body) for _ in range(3)]
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=300)
    assert [answer.status for answer in answers] == [200] * 3
    assert {answer.headers["x-kvroute-pod"] for answer in answers} <= {engine.address for engine in engines}
    assert process.returncode == 0
    lines = seen.splitlines()
    outcomes = {tuple(line.split()[:2]) for line in lines}
    assert outcomes >= {("ok", check) for check in ("picks", "body", "stream")}, seen
    # The router's and the engine's tokens are equally many; only one of the pods can confirm their ids.
    tokens = next(line for line in lines if line.split()[1:2] == ["tokens"])
    assert tokens.startswith("ok") or "by both counts; the engine caches nothing" in tokens
    failed = [line for line in lines if line.startswith("fail")]
    assert all(engines[1].address in line for line in failed)
    assert "start vLLM with --enable-prefix-caching" in seen
    assert '"model": "kvroute-tiny"' in seen


@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes in /proc")
def test_a_killed_router_is_restarted_a_limited_number_of_times(tmp_path: Path) -> None:
    """A killed router is restarted; one killed too often ends the stack, which keeps its logs."""
    ports = stack_ports()
    with running_command(ports, tmp_path) as (process, seen):
        printed = Path(seen.split("logs:")[1].split()[0])
        kill_router(tmp_path)
        url = f"http://127.0.0.1:{ports[0]}/v1/completions"
        ask = json.dumps({"model": "kvroute-tiny", "prompt": "Hello", "max_tokens": 4}).encode()

        def is_served() -> bool:
            kind = {"content-type": "application/json"}
            return urllib3.request("POST", url, body=ask, headers=kind, timeout=60).status == 200

        wait_until("a request is served again", is_served)
        while process.poll() is None:
            kill_router(tmp_path)
            time.sleep(0.02)
        rest, errors = process.communicate(timeout=300)
    assert process.returncode == 1, rest
    assert len(errors.splitlines()) == 1
    assert "router was killed by SIGKILL" in errors
    assert "restarted 5 times within 60 s" in errors
    assert f"logs: {printed}" in errors
    assert "restarting it" in rest
    assert {log.name for log in printed.glob("*.log")} >= {"router.log", "envoy.log", "model-server-1.log"}
    assert processes_of(str(tmp_path)) == []


@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_start_up_cleans_up(tmp_path: Path, number: signal.Signals) -> None:
    """A signal during start-up ends the command with status 0, without a traceback."""
    ports = stack_ports()
    process = subprocess.Popen(
        command(*SMALL, ports=ports),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    wait_until("the first children load", lambda: len(processes_of(str(tmp_path))) >= 1)
    process.send_signal(number)
    _, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (0, "")
    assert_nothing_left(ports, tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of their parent's death")
def test_children_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    """SIGKILL of the command ends all children."""
    ports = stack_ports()
    process = subprocess.Popen(
        command(*SMALL, ports=ports),
        stdout=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    wait_until("the stack runs", lambda: len(processes_of(str(tmp_path))) >= 2)
    process.kill()
    process.wait()
    wait_until("the children are gone", lambda: processes_of(str(tmp_path)) == [])
    # Command lines of model servers do not contain the folder; check that their ports are free.
    plan = plan_stack(StackOptions(port=ports[0], base_port=ports[1]), tmp_path)
    wait_until("the ports are free", lambda: all_free(plan.ports))


def test_a_port_in_use_is_one_clear_line(tmp_path: Path) -> None:
    """A port in use ends the command with status 1 and one line that names the port."""
    ports = stack_ports()
    with socket.create_server(("127.0.0.1", ports[0])):
        done = subprocess.run(command(ports=ports), capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert f"port {ports[0]} is in use" in done.stderr


def test_a_failed_child_is_reported_in_one_line(tmp_path: Path) -> None:
    """A model that fails to load ends the command with status 1 and one line: child, cause, logs."""
    ports = stack_ports()
    done = subprocess.run(
        command(*SMALL, "--model", str(tmp_path / "nowhere"), ports=ports),
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        timeout=300,
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert " exited with " in done.stderr
    assert "nowhere" in done.stderr
    logs = Path(done.stderr.split("logs: ")[1].strip()).glob("*.log")
    assert any("nowhere" in log.read_text() for log in logs)
