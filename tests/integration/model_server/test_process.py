"""`python -m model_server` as a process: start, stop, logs and exit status."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import urllib3

from tests.support.model_server.http import DEADLINE_S, exit_code, wait_until
from tests.support.model_server.lora import save_adapter, tiny_weights

COMMAND = [sys.executable, "-m", "model_server"]
FREE = ["--port", "0", "--kv-events-endpoint", "tcp://*:0", "--kv-replay-endpoint", "tcp://127.0.0.1:0"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@contextmanager
def started(
    tmp_path: Path, *flags: str, command: Sequence[str] = COMMAND, deadline_s: float = DEADLINE_S
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a model server until it is ready; yield its process and URL."""
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        process = subprocess.Popen([*command, *FREE, *flags], stderr=stderr, env=ENVIRONMENT)
    try:
        wait_until(lambda: process.poll() is not None or "ready:" in log.read_text(), deadline_s)
        ready = re.search(r"ready: url=(\S+)", log.read_text())
        assert ready is not None, log.read_text()
        yield process, ready[1]
    finally:
        process.kill()
        process.wait()


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    """Run a model server that exits by itself."""
    return subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=300, env=ENVIRONMENT)


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Provide URL and log of a server with a small pool, which SIGINT ends with status 0."""
    directory = tmp_path_factory.mktemp("idle")
    with started(directory, "--num-gpu-blocks", "128", "--max-model-len", "512") as (process, url):
        yield url, directory / "log"
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0


def test_a_signal_in_the_middle_of_a_stream(tmp_path: Path) -> None:
    """SIGTERM ends a running stream with an error event within seconds, with exit status 0."""
    with started(tmp_path) as (process, url):
        body = {"prompt": "x", "max_tokens": 8_000, "ignore_eos": True, "stream": True}
        answer = urllib3.request("POST", f"{url}/v1/completions", json=body, preload_content=False)
        stream = answer.stream()
        next(stream)
        process.send_signal(signal.SIGTERM)
        tail = b"".join(stream)
        assert b'"error"' in tail or b'"finish_reason":"length"' in tail
        assert process.wait(DEADLINE_S) == 0
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    assert "stopped" in log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_loading(number: signal.Signals, tmp_path: Path) -> None:
    """A signal during imports ends the process at once with status 0."""
    log = tmp_path / "log"
    with log.open("wb") as stderr, subprocess.Popen([*COMMAND, *FREE], stderr=stderr) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        wait_until(lambda: "libtorch" in maps.read_text())
        process.send_signal(number)
        assert process.wait(DEADLINE_S) == 0
    assert log.read_text() == ""


def test_a_stranger_cannot_fill_the_log(idle: tuple[str, Path]) -> None:
    """Invalid HTTP and web socket requests are answered without log lines."""
    url, log = idle
    upgrade = b"GET /health HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    lines = log.read_text()
    host, port = url.removeprefix("http://").split(":")
    for hello in (b"hello\r\n\r\n", upgrade):
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
            connection.sendall(hello)
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1")
    assert log.read_text() == lines


def test_the_log_states_the_pool(idle: tuple[str, Path]) -> None:
    """The log has pool size, concurrency and URL, in one line each."""
    url, path = idle
    assert urllib3.request("GET", f"{url}/health").status == 200
    log = path.read_text()
    assert "CPU KV cache size: 2,048 tokens, Maximum concurrency for 512 tokens per request: 4.00x" in log
    assert "KV pool: 128 blocks of 16 tokens, 4.19 MB, 2,048 bytes per token; 4 concurrent sequences" in log


def test_a_port_in_use_is_one_line() -> None:
    """An HTTP port in use stops the start before the model is loaded, with exit status 1."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run(*FREE, "--port", str(port))
    assert result.returncode == 1
    assert result.stderr == (
        f"kvroute model-server: error: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    )


def test_an_events_port_in_use_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    """A ZMQ port in use stops the start."""
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        assert exit_code(*FREE, "--kv-events-endpoint", f"tcp://*:{port}") == 1
    assert capfd.readouterr().err == (
        f"kvroute model-server: error: KV events: cannot bind tcp://*:{port}: Address already in use\n"
    )


def test_a_missing_model_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A directory that is not a checkpoint is reported by name."""
    assert exit_code(*FREE, "--model", str(tmp_path / "nothing")) == 1
    told = capfd.readouterr().err
    assert len(told.splitlines()) == 1
    assert str(tmp_path / "nothing") in told


def test_a_pool_too_small_for_the_context_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    """A context that exceeds the pool is a configuration error with exit status 2."""
    flags = [*FREE, "--num-gpu-blocks", "4", "--max-model-len", "512", "--log-level", "error"]
    assert exit_code(*flags) == 2
    told = capfd.readouterr().err
    assert len(told.splitlines()) == 1
    assert "max_model_len is 512" in told


def test_adapters_are_loaded_at_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """--lora-modules serves adapters under their names; one that cannot be loaded stops the start."""
    sql = save_adapter(tmp_path / "sql", tiny_weights())
    sizes = ["--num-gpu-blocks", "128", "--max-model-len", "512"]
    with started(tmp_path, *sizes, "--lora-modules", f"sql={sql}", f"law={sql}") as (_, url):
        cards = urllib3.request("GET", f"{url}/v1/models").json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [
            ("kvroute-tiny", None),
            ("sql", "kvroute-tiny"),
            ("law", "kvroute-tiny"),
        ]
        body = {"model": "law", "prompt": "x", "max_tokens": 1}
        assert urllib3.request("POST", f"{url}/v1/completions", json=body).status == 200
    for pair, message in (("sql=/nothing", "/nothing"), (f"kvroute-tiny={sql}", "is the model's own name")):
        assert exit_code(*FREE, *sizes, "--lora-modules", pair) in (1, 2)
        told = capfd.readouterr().err.splitlines()
        assert message in told[-1]
