"""Ports of this machine's loopback address, for the processes that tests start."""

import socket

HERE = "127.0.0.1"


def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    with socket.create_server((HERE, 0)) as probe:
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as client:
        return client.connect_ex((HERE, port)) == 0
