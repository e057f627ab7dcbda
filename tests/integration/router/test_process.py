"""The router as a process: exit codes, one-line errors, draining."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import grpc
import pytest
from envoy.service.accesslog.v3 import als_pb2_grpc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as pb_grpc

from router.doors.ext_proc_dialects import BodyMode
from tests.support.router.bench import TINY
from tests.support.router.doors import Stream, body, headers, wait_until
from tests.support.router.server import fake_pods, write_pods

FREE_PORTS = ["--host", "127.0.0.1", "--grpc-port", "0", "--grpc-health-port", "0", "--metrics-port", "0"]


@contextmanager
def process(*argv: str) -> Iterator[subprocess.Popen[str]]:
    """Start a router process whose stderr can be read."""
    command = [sys.executable, "-m", "router", *argv]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


def grpc_port(started: subprocess.Popen[str]) -> int:
    """Wait for the log line with the ports; return the gRPC port."""
    assert started.stderr is not None
    for line in started.stderr:
        if found := re.search(r"listening: grpc (\d+)", line):
            return int(found[1])
    raise AssertionError("the router ended without listening")


def run(*argv: str) -> tuple[int, str]:
    """Run a router that cannot start; return its exit code and its stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "router", *argv], capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stderr


def test_sigterm_waits_for_the_request_inside_and_ends_with_0(tmp_path: Path) -> None:
    """A request in progress at SIGTERM is answered; then the process exits with 0."""
    with fake_pods(1) as (pod,):
        pods_file = write_pods(tmp_path / "pods.yaml", [pod.address])
        argv = ["--pods-file", str(pods_file), *FREE_PORTS, "--refresh-metrics-interval", "100ms"]
        with process(*argv) as started, grpc.insecure_channel(f"127.0.0.1:{grpc_port(started)}") as channel:
            stub = pb_grpc.ExternalProcessorStub(channel)
            stream = Stream(stub)
            wait_until(lambda: _answered(stub), "the pod's readiness")
            # In this mode the headers' response proves that the request is in progress.
            stream.send(headers(path="/v1/completions", config=(BodyMode.BUFFERED, BodyMode.NONE)))
            stream.receive()
            _drains(started, stream)
            assert started.wait(300) == 0


def test_a_router_without_requests_ends_at_once(tmp_path: Path) -> None:
    """SIGTERM and SIGINT end an idle router before the drain timeout, even with an open access log stream."""
    pods_file = write_pods(tmp_path / "pods.yaml", [])
    for number in (signal.SIGTERM, signal.SIGINT):
        with (
            process("--pods-file", str(pods_file), *FREE_PORTS) as started,
            grpc.insecure_channel(f"127.0.0.1:{grpc_port(started)}") as channel,
        ):
            entries: SimpleQueue[None] = SimpleQueue()
            logs = als_pb2_grpc.AccessLogServiceStub(channel).StreamAccessLogs.future(iter(entries.get, None))
            grpc.channel_ready_future(channel).result(300)
            started.send_signal(number)
            assert started.wait(300) == 0
            assert logs.exception(20) is not None
            entries.put(None)


def test_a_port_in_use_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    """A port in use is reported in one line with flag and port, with exit code 1."""
    pods_file = write_pods(tmp_path / "pods.yaml", [])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = run("--pods-file", str(pods_file), *FREE_PORTS, "--grpc-port", str(port))
    assert (code, said.count("\n")) == (1, 1)
    assert f"--grpc-port {port}: cannot listen on 127.0.0.1:{port}" in said


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("--config-file", "kind: EndpointPickerConfig\nplugin: []\n", ":2: plugin: unknown field"),
        ("--pods-file", "endpoints:\n- {name: a, address: x}\n", ":2: endpoints[0]"),
    ],
)
def test_wrong_input_files_are_one_line_and_exit_code_2(
    tmp_path: Path, name: str, text: str, complaint: str
) -> None:
    """An invalid input file is reported in one line with file, line and field, with exit code 2."""
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    code, said = run(name, str(path), *FREE_PORTS)
    assert (code, said.count("\n")) == (2, 1)
    assert f"{path}{complaint}" in said


def _answered(stub: pb_grpc.ExternalProcessorStub) -> bool:
    (answer,) = stub.Process(iter([headers(path="/v1/models", end=True)]), timeout=300)
    return bool(answer.HasField("request_headers"))


def _drains(started: subprocess.Popen[str], stream: Stream) -> None:
    """Send SIGTERM, wait for draining, and complete the open request."""
    started.terminate()
    assert started.stderr is not None
    assert any("draining" in line for line in started.stderr)
    stream.send(body(f'{{"model": "{TINY}", "prompt": "hello"}}'.encode()))
    assert stream.receive().HasField("request_body")
