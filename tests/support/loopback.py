"""Ports of the loopback address for processes that tests start."""

import os
import socket
from collections.abc import Sequence
from random import SystemRandom

HERE = "127.0.0.1"

# Below the ephemeral range, from which the system picks ports of outgoing connections at any time.
_LOWEST, _BEYOND = 10_000, 32_000
# Parallel test processes draw from separate ranges, since a port is bound some time after its draw.
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
# Not the shared generator: tests reseed it, and each would draw the same ports again.
_random = SystemRandom()


def free_port() -> int:
    """Return a port below the ephemeral range on which nothing listens."""
    return free_base([0])


def free_ports(count: int) -> range:
    """Return several different free ports."""
    base = free_base(range(count))
    return range(base, base + count)


def free_base(offsets: Sequence[int]) -> int:
    """Return a base port such that it and each base + offset are free."""
    size = (_BEYOND - _LOWEST) // _WORKERS
    lowest = _LOWEST + _WORKER * size
    beyond = lowest + size - max(offsets)
    for _ in range(1000):
        base = _random.randrange(lowest, beyond)
        if all(_is_free(base + offset) for offset in offsets):
            return base
    raise AssertionError(f"no free ports from {lowest} to {beyond}")


def listens(port: int) -> bool:
    """Return whether something listens on a port."""
    with socket.socket() as client:
        return client.connect_ex((HERE, port)) == 0


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # Lingering connections must not block the port, as for servers.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HERE, port))
        except OSError:
            return False
        return True
