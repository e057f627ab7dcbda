"""Ports of this machine's loopback address, for the processes that tests start."""

import os
import socket
from collections.abc import Sequence
from random import SystemRandom

HERE = "127.0.0.1"

# Below those that systems give to outgoing connections, which may take any free one at any moment.
_LOWEST, _BEYOND = 10_000, 32_000
# Test processes that run side by side draw from parts of their own: a port is bound some time after its draw.
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
# Not the shared generator: it begins anew with each test, and would give each the last one's ports.
_random = SystemRandom()


def free_port() -> int:
    """A port that nobody listened on a moment ago, and that no outgoing connection will take."""
    return free_base([0])


def free_ports(count: int) -> range:
    """So many of them in a row."""
    base = free_base(range(count))
    return range(base, base + count)


def free_base(offsets: Sequence[int]) -> int:
    """A number that is such a port with each of these offsets added, all of them small."""
    size = (_BEYOND - _LOWEST) // _WORKERS
    lowest = _LOWEST + _WORKER * size
    beyond = lowest + size - max(offsets)
    for _ in range(1000):
        base = _random.randrange(lowest, beyond)
        if all(_is_free(base + offset) for offset in offsets):
            return base
    raise AssertionError(f"no free ports from {lowest} to {beyond}")


def listens(port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as client:
        return client.connect_ex((HERE, port)) == 0


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: what is left of ended connections is in nobody's way.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HERE, port))
        except OSError:
            return False
        return True
